# SPDX-License-Identifier: Apache-2.0
"""One start of the engine in a process of its own: what the suite startup measures.

The argument is JSON: {"spawned_s": when this process was asked for, "model": M, "options": {...}}.
One line of JSON on stdout has the seconds of every phase from then to the first token.
"""

import time

STARTED_S = time.monotonic()

import json  # noqa: E402 - the clock above comes before all that takes time
import sys  # noqa: E402


def main() -> None:
    asked = json.loads(sys.argv[1])
    phases = {"start Python": STARTED_S - asked["spawned_s"]}
    # Imported here, so that the time of each is seen.
    import jax  # noqa: F401

    imported_jax = time.monotonic()
    phases["import jax"] = imported_jax - STARTED_S
    from engine import LLM, SamplingParams
    from scripts.command_line import fail

    phases["import the engine"] = time.monotonic() - imported_jax
    before = time.monotonic()
    try:
        llm = LLM(asked["model"], **asked["options"])
    except (ValueError, OSError) as error:
        fail("benchmark", str(error))
    ready = time.monotonic()
    phases |= llm.built.phases
    phases["other"] = ready - before - sum(llm.built.phases.values())
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([[0] * min(16, llm.max_model_len - 1)], params)
    first = time.monotonic()
    phases["first token"] = first - ready
    llm.engine.worker.programs.wait()
    stats = llm.engine.stats()
    figures = {
        "ready_s": ready - asked["spawned_s"],
        "first_token_s": first - asked["spawned_s"],
        "all_programs_s": time.monotonic() - asked["spawned_s"],
        "compiled": stats["programs_compiled"],
        "loaded": stats["programs_loaded"],
        "phases": phases,
        "programs": stats["program_s"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

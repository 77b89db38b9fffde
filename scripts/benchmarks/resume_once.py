# SPDX-License-Identifier: Apache-2.0
"""A chat's next turn in a process of its own: what the suite prefix measures.

On stdin is JSON: {"model": M, "options": {...}, "prompt": [...]}. One line of JSON on stdout has
time to first token and cached tokens, with what is on disk and without.
"""

import dataclasses
import json
import sys
from typing import Any

from engine import LLM, SamplingParams
from scripts.command_line import fail


def main() -> None:
    try:
        print(json.dumps(next_turn(json.load(sys.stdin))))
    except (ValueError, OSError) as error:
        fail("benchmark", str(error))


def next_turn(asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of what is asked.

    The engine is not closed, so that the folder stays as it was for the next process.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm = LLM(asked["model"], **asked["options"])
    llm.engine.worker.programs.wait()
    figures = {}
    # Nobody else has the salts: the first prompt, which warms up, and the last are computed whole.
    for name, salt in (("warm", "warm"), ("with", None), ("without", "without")):
        one = dataclasses.replace(params, cache_salt=salt)
        [output] = llm.generate([asked["prompt"]], one)
        assert output.metrics is not None, "a request that ended has times"
        figures[name] = {
            "ttft_s": output.metrics.ttft_s,
            "cached_tokens": output.metrics.cached_tokens,
        }
    return figures


if __name__ == "__main__":
    main()

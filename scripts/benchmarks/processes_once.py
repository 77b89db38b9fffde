# SPDX-License-Identifier: Apache-2.0
"""One of several processes that decode together: what the suite processes measures.

--asked is JSON: {"model": M, "mesh": ..., "rows": at once in all, "partitions": ..., "steps": N}.
The leader writes one line of JSON to stdout: the seconds of its own thread that a step of decodes
takes to schedule, to pack, and to tell the others. Not what passes: all processes may share the
cores.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import flags

from engine import LLM, SamplingParams
from scripts.command_line import make_cpu_devices, run_command, usage_errors
from sharding.processes import num_processes

FLAGS = flags.FlagValues()
flags.DEFINE_string("asked", None, "What to run, as JSON.", flag_values=FLAGS)
PROMPT_TOKENS = 16


class Clock:
    """The time of one thread in some calls, step by step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call`, whose time counts."""

        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            result = call(*arguments)
            self.steps.append(time.thread_time() - start)
            return result

        return timed


def main() -> None:
    asked = json.loads(FLAGS.asked)
    make_cpu_devices(asked["mesh"], num_processes())
    steps, rows = asked["steps"], asked["rows"] // asked["partitions"]
    length = PROMPT_TOKENS + steps + 1
    options = dict(max_num_seqs=rows, max_num_batched_tokens=64, max_model_len=length)
    with usage_errors(), LLM(asked["model"], mesh=asked["mesh"], **options) as llm:
        if llm.follows:
            llm.follow()
            return
        print(json.dumps(measured(llm, asked["rows"], steps)), flush=True)


def measured(llm: LLM, rows: int, steps: int) -> dict[str, float]:
    """Returns the median seconds of a step of `rows` decodes, by what they are spent on."""
    engine, clocks = llm.engine, {name: Clock() for name in ("schedule", "pack", "tell")}
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for _ in range(rows):
        request, _ = llm.make_request([3] * PROMPT_TOKENS, params)
        engine.add_request(request, streams=False)
    for _ in range(steps // 2):
        engine.step()  # all prompts are through, all rows decode
    partitions, others = engine.partitions, engine.worker.others
    partitions.schedule = clocks["schedule"].timed(partitions.schedule)  # type: ignore[method-assign]
    engine._pack = clocks["pack"].timed(engine._pack)  # type: ignore[method-assign]
    if others is not None:
        others.tell = clocks["tell"].timed(others.tell)  # type: ignore[method-assign]
    for _ in range(steps // 4):
        engine.step()
    medians = {
        f"{name}_s": statistics.median(clock.steps or [0.0]) for name, clock in clocks.items()
    }
    return medians | {"host_s": sum(medians.values())}


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command, behind scripts.launch."""
    run_command(main, FLAGS, __doc__ or "", argv)

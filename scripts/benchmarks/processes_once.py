# SPDX-License-Identifier: Apache-2.0
"""One of several processes that decode together: what the suite processes measures.

--asked is JSON: {"model": M, "mesh": ..., "rows": at once in all, "partitions": ..., "steps": N}.
The leader writes one line of JSON to stdout: the seconds of its own thread that a step of decodes
takes to schedule, to pack, and to tell the others; not what passes, for all processes may share
the cores. And how many functions it calls for that, which no other process disturbs.
"""

import json
import statistics
import sys
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
    """What one thread spends in some calls, step by step: seconds or, once it `counts`, calls."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.calls: list[int] = []
        self.counts = False

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call`, which the clock looks at."""

        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            result = call(*arguments)
            self.seconds.append(time.thread_time() - start)
            return result

        def counted(*arguments: Any) -> Any:
            events: list[str] = []
            sys.setprofile(lambda frame, event, argument: events.append(event))
            try:
                return call(*arguments)
            finally:
                sys.setprofile(None)
                self.calls.append(sum(event.endswith("call") for event in events))

        return lambda *arguments: (counted if self.counts else timed)(*arguments)


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
    """Returns the medians of a step of `rows` decodes: seconds, by what for, and calls."""
    engine, clocks = llm.engine, {name: Clock() for name in ("schedule", "pack", "tell")}
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for _ in range(rows):
        request, _ = llm.make_request([3] * PROMPT_TOKENS, params)
        engine.add_request(request, streams=False)
    for _ in range(steps // 2):
        engine.step()  # all prompts are through, all rows decode
    partitions, others = engine.partitions, engine.worker.others
    partitions.schedule = clocks["schedule"].watched(partitions.schedule)  # type: ignore[method-assign]
    engine._pack = clocks["pack"].watched(engine._pack)  # type: ignore[method-assign]
    if others is not None:
        others.tell = clocks["tell"].watched(others.tell)  # type: ignore[method-assign]
    for _ in range(steps // 4):
        engine.step()
    for clock in clocks.values():
        clock.counts = True
    for _ in range(steps // 8):
        engine.step()
    seconds = {
        f"{name}_s": statistics.median(clock.seconds or [0]) for name, clock in clocks.items()
    }
    calls = sum(statistics.median(clock.calls or [0]) for clock in clocks.values())
    return seconds | {"host_s": sum(seconds.values()), "calls": calls}


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command, behind scripts.launch."""
    run_command(main, FLAGS, __doc__ or "", argv)

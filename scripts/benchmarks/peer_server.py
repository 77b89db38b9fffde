# SPDX-License-Identifier: Apache-2.0
"""The peer's side of a comparison: it answers batches. Standard library only.

The peer says one line of JSON about itself when it is ready. Then each line of standard input is a
batch {"prompts": [[id, ...], ...], "new_tokens": [n, ...]}, and the answer {"start_s": t,
"step_s": [t, ...]} has the monotonic clock, which all processes of a machine share, at the batch's
start and after each step. A step gives every request a token; the batch runs until its longest
request has all of its tokens. The end of the input ends the peer.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Steps = Callable[[Sequence[Sequence[int]], int], Iterable[None]]


def answer_batches(about: dict[str, Any], run_steps: Steps) -> None:
    """Answers batches until the end of the input.

    `run_steps(prompts, steps)` yields once when all is ready, which does not count, and then after
    each of `steps` greedy steps, when its tokens are known.
    """
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        work = iter(run_steps(batch["prompts"], max(batch["new_tokens"])))
        next(work)
        start = time.monotonic()
        steps = [time.monotonic() for _ in work]
        print(json.dumps({"start_s": start, "step_s": steps}), flush=True)

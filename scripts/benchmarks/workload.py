# SPDX-License-Identifier: Apache-2.0
"""The decode workload and its figures. Standard library only: the peer's Python imports it too."""

import random
from collections.abc import Sequence
from typing import Any

PROMPT_TOKENS = 64
NEW_TOKENS = 64


def workload_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Returns `count` prompts of PROMPT_TOKENS ids, the same at every call."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def decode_figures(start: float, token_times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns the figures of requests admitted at `start` whose tokens came at `token_times`.

    Decode is what comes after the last request's first token: `decode_tokens_per_s` counts the
    tokens emitted since over the time since, and `step_s` is that time over its steps.
    `output_tokens_per_s` counts all tokens over all the time.
    """
    last_first = max(times[0] for times in token_times)
    decoded = [time for times in token_times for time in times if time > last_first]
    end = max(times[-1] for times in token_times)
    decode_s = end - last_first
    return {
        "requests": len(token_times),
        "output_tokens": sum(len(times) for times in token_times),
        "ttft_s": last_first - start,
        "decode_s": decode_s,
        "total_s": end - start,
        "step_s": decode_s / len(set(decoded)),
        "decode_tokens_per_s": len(decoded) / decode_s,
        "output_tokens_per_s": sum(len(times) for times in token_times) / (end - start),
    }

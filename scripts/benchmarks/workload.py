# SPDX-License-Identifier: Apache-2.0
"""The workload of many equal requests, how the engine runs it, and its figures."""

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine import LLM, SamplingParams
from scripts.benchmarks.peer import Peer

OURS = "headrace"
PROMPT_TOKENS = 64
NEW_TOKENS = 64

RunBatch = Callable[[Sequence[list[int]], Sequence[int]], tuple[float, list[list[float]]]]


def workload_prompts(
    count: int, vocab_size: int, prompt_tokens: int = PROMPT_TOKENS
) -> list[list[int]]:
    """Returns `count` prompts of random ids, the same at every call."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(prompt_tokens)] for _ in range(count)]


def forced(new_tokens: int) -> SamplingParams:
    """Returns greedy parameters that run to exactly `new_tokens`."""
    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)


def run_batch(
    llm: LLM, prompts: Sequence[list[int]], new_tokens: Sequence[int]
) -> tuple[float, list[list[float]]]:
    """Returns when the prompts were given to the engine, and when the tokens of each came."""
    requests = [
        llm.make_request(prompt, forced(count))[0]
        for prompt, count in zip(prompts, new_tokens, strict=True)
    ]
    for request in requests:
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
    return min(r.arrival_s for r in requests), [r.token_times for r in requests]


def batch_runners(llm: LLM, peers: dict[str, Peer]) -> dict[str, RunBatch]:
    """Returns, by engine, what runs a batch as `run_batch` does: Headrace first."""
    ours: dict[str, RunBatch] = {OURS: partial(run_batch, llm)}
    return ours | {name: peer.run for name, peer in peers.items()}


def run_decode(run: RunBatch, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Returns the figures of NEW_TOKENS after each of the prompts."""
    return decode_figures(*run(prompts, [NEW_TOKENS] * len(prompts)))


def run_prefill(run: RunBatch, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Returns the figures of one token after each of the prompts, which have one length."""
    return prefill_figures(*run(prompts, [1] * len(prompts)), len(prompts[0]))


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


def middle_step_s(token_times: Sequence[Sequence[float]]) -> float:
    """Returns the time of the middle one of the steps in which all rows decode.

    Some seconds of a slow machine are less in it than in the steps' sum.
    """
    last_first = max(first for first, *_ in token_times)
    steps = sorted({time for row in token_times for time in row if time >= last_first})
    return statistics.median(after - before for before, after in itertools.pairwise(steps))


def prefill_figures(
    start: float, token_times: Sequence[Sequence[float]], prompt_tokens: int
) -> dict[str, Any]:
    """Returns the figures of prompts of `prompt_tokens` each: up to the last first token."""
    prefill_s = max(times[0] for times in token_times) - start
    tokens = len(token_times) * prompt_tokens
    return {
        "prompt_tokens": tokens,
        "prefill_s": prefill_s,
        "prompt_tokens_per_s": tokens / prefill_s,
    }

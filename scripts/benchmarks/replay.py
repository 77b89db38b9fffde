# SPDX-License-Identifier: Apache-2.0
"""Requests as users send them: lengths from a file, prompts cut from a text, arrivals in time."""

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints.tokenizer import Tokenizer
from engine import LLM
from engine.metrics import percentile, request_metrics
from engine.request import Request
from scripts.benchmarks.peer import Peer
from scripts.benchmarks.workload import forced
from scripts.command_line import UsageError, usage_errors

SHARES = (50, 95, 99)
TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")  # defined in engine/metrics.py
STRIDE = 997  # tokens from where one prompt begins in the text to where the next does


class Job(NamedTuple):
    """One request to come: its prompt, its forced output length, seconds after the start."""

    prompt: list[int]
    new_tokens: int
    arrival_s: float


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Returns (prompt tokens, output tokens) of each line; raises UsageError naming a bad one."""
    with usage_errors(f"--lengths={path} cannot be read: "):
        lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise UsageError(f"{path} has no lines; a line is a request")
    lengths = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            pair = row["prompt_len"], row["output_len"]
        except (ValueError, KeyError, TypeError):
            pair = None, None
        if not all(type(length) is int and length >= 1 for length in pair):
            raise UsageError(
                f"{path} line {number} is wrong; write "
                '{"prompt_len": N, "output_len": M}, both whole numbers from 1'
            )
        lengths.append(pair)
    return lengths


def cut_prompts(
    text: str, tokenizer: Tokenizer | None, prompt_lengths: Sequence[int]
) -> list[list[int]]:
    """Returns prompts of exactly those lengths, each from another place of the text.

    The text is repeated where its end is passed. Where the tokenizer puts a BOS first, so does
    each prompt.
    """
    if tokenizer is None:
        raise UsageError("the model has no tokenizer; the suite serving cuts prompts from a text")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise UsageError("--text has no words; name a file of plain text")
    first = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    prompts = []
    for index, length in enumerate(prompt_lengths):
        start = index * STRIDE
        body = [ids[(start + place) % len(ids)] for place in range(length)]
        prompts.append([*first, *body][:length])
    return prompts


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Returns when each request arrives: of a Poisson process, or all at 0 when `rate` is inf."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def replay(llm: LLM, jobs: Sequence[Job]) -> tuple[float, list[Request]]:
    """Runs the jobs on the engine, each from its arrival on; returns the start and the requests.

    A request's arrival is when it was due, so that a busy engine gains nothing by looking late.
    """
    requests = [llm.make_request(job.prompt, forced(job.new_tokens))[0] for job in jobs]
    start, due = time.monotonic(), 0
    while due < len(jobs) or llm.engine.has_work:
        now = time.monotonic() - start
        while due < len(jobs) and jobs[due].arrival_s <= now:
            llm.engine.add_request(requests[due])
            requests[due].arrival_s = start + jobs[due].arrival_s
            due += 1
        if llm.engine.has_work:
            llm.engine.step()
        else:
            time.sleep(max(0.0, jobs[due].arrival_s - now))
    return start, requests


def replay_in_batches(
    peer: Peer, jobs: Sequence[Job], batch_size: int
) -> tuple[float, list[Request]]:
    """Runs the jobs on a peer in static batches, in order of arrival; returns as `replay` does.

    A batch is what has arrived when the one before has ended, `batch_size` requests at most.
    """
    requests: list[Request] = []
    start = time.monotonic()
    while len(requests) < len(jobs):
        now = time.monotonic() - start
        first = len(requests)
        batch = [job for job in jobs[first : first + batch_size] if job.arrival_s <= now]
        if not batch:
            time.sleep(jobs[first].arrival_s - now)
            continue
        _, token_times = peer.run([job.prompt for job in batch], [job.new_tokens for job in batch])
        for job, times in zip(batch, token_times, strict=True):
            requests.append(
                Request(
                    prompt_token_ids=job.prompt,
                    params=forced(job.new_tokens),
                    limit=len(job.prompt) + job.new_tokens,
                    seed=0,
                    arrival_s=start + job.arrival_s,
                    token_times=times,
                )
            )
    return start, requests


def serving_figures(start: float, requests: Sequence[Request]) -> dict[str, Any]:
    """Returns the rates from `start` to the last token, and percentiles of every time.

    ITL's are over the gaps of all requests, the others' over requests.
    """
    total_s = max(request.token_times[-1] for request in requests) - start
    tokens = sum(len(request.token_times) for request in requests)
    figures: dict[str, Any] = {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "output_tokens": tokens,
        "total_s": total_s,
        "requests_per_s": len(requests) / total_s,
        "output_tokens_per_s": tokens / total_s,
    }
    metrics = [request_metrics(request) for request in requests]
    values: dict[str, list[float]] = {"itl_s": [gap for m in metrics for gap in m.itl_s]}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        values[name] = [value for m in metrics if (value := getattr(m, name)) is not None]
    return figures | {
        name: {f"p{share}": percentile(values[name], share) for share in SHARES} for name in TIMES
    }

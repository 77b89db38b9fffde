# SPDX-License-Identifier: Apache-2.0
"""Of the suite prefix: what comes back from the host's memory and from disk, beside recompute."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

from checkpoints import store
from engine import LLM
from engine.request import Request
from scripts.benchmarks.goals import WITH, WITHOUT, compare, compared, gain
from scripts.benchmarks.peer import ROOT
from scripts.benchmarks.prefix_engines import PAGE_SIZE, load_with_pages, page_size
from scripts.benchmarks.rounds import Figures, Run, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.workload import forced, workload_prompts
from scripts.command_line import UsageError

HOST_GB = 1.0
OLDER = 16  # requests that take the pages of the one that gives way
OUTPUT_TOKENS = 16  # of a chat's turn
MESSAGE_TOKENS = 20  # of the next


def measure_preempted(settings: Settings) -> dict[str, Any]:
    """Returns how soon a preempted request goes on: from the host's memory, and recomputed.

    The pool has just the pages of older requests at their ends. One that comes after they have
    begun fits beside them for a while, and gives way as they grow, until they have all its pages;
    when they end, it goes on.
    """
    rows = settings.options.get("max_num_seqs", OLDER + 1)
    if rows < 2:
        raise UsageError("--suite=prefix needs two rows for a preemption; raise --max_num_seqs")
    size, older = page_size(settings), rows - 1
    needed = -(-(settings.prefix_tokens + 1) // size) + 1
    # Beside three pages of each of the older (their prompt, and one ahead), the last one fits.
    growth = 3 + -(-needed // older)
    kinds: dict[str, dict[str, Any]] = {
        WITH: {"host_cache_gb": HOST_GB, "preemption": "park", "prefix_cache": True},
        WITHOUT: {},
    }
    runs: dict[str, Run] = {}
    for name, options in kinds.items():
        pages, length = older * (1 + growth), settings.prefix_tokens + growth * size
        llm = load_with_pages(settings, pages, length, max_num_seqs=rows, **options)
        vocabulary = llm.model_config.vocab_size
        first = workload_prompts(older, vocabulary, size)
        [last] = workload_prompts(1, vocabulary, settings.prefix_tokens)
        runs[name] = partial(run_preempted, llm, first, last[::-1], growth * size)
        runs[name]()  # warms up
    figures = compare(settings, runs, [gain("resumed_s", 4.0)], 3)
    restored = figures["runs"][WITH]["from_host_tokens"]
    return figures | {"facts": {"preempted": settings.prefix_tokens, "from the host": restored}}


def run_preempted(
    llm: LLM, first: Sequence[list[int]], last: list[int], new_tokens: int
) -> Figures:
    """Returns the time from the end of the `first` requests to the next token of the `last` one.

    The last is preempted on the way, which is checked.
    """
    llm.cache.clear()
    before = llm.cache.stats().get("host_out_tokens", 0)
    older = [add(llm, prompt, new_tokens) for prompt in first]
    while not all(request.token_times for request in older):
        llm.engine.step()
    request = add(llm, last, new_tokens)
    while any(llm.engine.is_running(one.id) for one in older):
        llm.engine.step()
    had, ended = len(request.token_times), max(one.token_times[-1] for one in older)
    if not had or request.preemptions != 1 or request.finish_reason is not None:
        raise UsageError(
            f"a request of {len(last)} tokens was preempted {request.preemptions} times, not once "
            "after its first token; give other --prefix_tokens, or a model without windows"
        )
    while len(request.token_times) == had:
        llm.engine.step()
    llm.engine.abort(request.id)
    while llm.engine.has_work:
        llm.engine.step()
    return {
        "resumed_s": request.token_times[had] - ended,
        "from_host_tokens": llm.cache.stats().get("host_out_tokens", 0) - before,
    }


def add(llm: LLM, prompt: list[int], new_tokens: int) -> Request:
    """Returns a request that is under way."""
    request, _ = llm.make_request(prompt, forced(new_tokens))
    llm.engine.add_request(request)
    return request


def measure_resumed(settings: Settings) -> dict[str, Any]:
    """Returns the figures of a chat's next turn in a new process, from disk and recomputed."""
    length = settings.prefix_tokens + OUTPUT_TOKENS + MESSAGE_TOKENS + 1
    with tempfile.TemporaryDirectory(prefix="headrace-disk-") as folder:
        pages = -(-2 * length // page_size(settings)) + 2
        options = {"host_cache_gb": HOST_GB, "disk_cache_dir": folder, "prefix_cache": True}
        with load_with_pages(settings, pages, length, **options) as llm:
            options |= {"page_size": PAGE_SIZE, "num_pages": llm.built.factory.num_pages}
            vocabulary = llm.model_config.vocab_size
            [prompt] = workload_prompts(1, vocabulary, settings.prefix_tokens)
            [talk] = llm.generate([prompt], forced(OUTPUT_TOKENS))
        stored = prompt + talk.outputs[0].token_ids
        message = [vocabulary // 2] * MESSAGE_TOKENS
        asked = {
            "model": str(store.resolve(settings.model).resolve()),
            "options": options | settings.options,
            "prompt": stored + message,
        }
        runs: dict[str, Run] = {"chat": partial(resume_once, asked)}
        repeats = settings.repeats or 3
        rounds, void = quiet_rounds(runs, [os.getpid()], repeats, settings.most_void)
    halves = [{name: each["chat"][name] for name in (WITH, WITHOUT)} for each in rounds]
    figures = compared(halves, void, [gain("ttft_s", 1.0)])
    cached = figures["runs"][WITH]["cached_tokens"]
    # The last token of the output was never stored.
    lost = len(stored) - 1 - cached
    return figures | {"facts": {"stored before": len(stored) - 1, "recomputed of them": lost}}


def resume_once(asked: dict[str, Any]) -> Figures:
    """Returns what a process of its own says of the next turn, with and without what is on disk."""
    command = [sys.executable, "-m", "scripts.benchmarks.resume_once"]
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise UsageError("the second process did not start; what it said stands above")
    return json.loads(done.stdout.splitlines()[-1])

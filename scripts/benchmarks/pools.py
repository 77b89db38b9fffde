# SPDX-License-Identifier: Apache-2.0
"""--num_pages_compare: whether a step's time depends on the size of the KV pool."""

import os
import statistics
from functools import partial
from typing import Any

from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Run, median_ratio, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.workload import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    run_batch,
    run_decode,
    workload_prompts,
)
from scripts.command_line import UsageError

COMPARED_POOL_TOKENS = 8192


def measure(settings: Settings) -> dict[str, Any]:
    return {"pools": [compare_pools(settings, count) for count in settings.counts]}


def compare_pools(settings: Settings, count: int) -> dict[str, Any]:
    """Returns the step's time with a pool of 8,192 tokens, and with one of what is needed.

    Both pools are for a model of one page group; page 0 is the reserved one.
    """
    page_size = settings.options.get("page_size") or 16
    tokens = {"large": COMPARED_POOL_TOKENS, "needed": count * (PROMPT_TOKENS + NEW_TOKENS)}
    if "num_pages" in settings.options:
        raise UsageError("--num_pages_compare chooses the pools itself; leave out --num_pages")
    runs: dict[str, Run] = {}
    for name, pool in tokens.items():
        sizes = {"page_size": page_size, "num_pages": -(-pool // page_size) + 1}
        llm = settings.load_rows(max(settings.counts), **sizes)
        if len(llm.engine.stats()["pages"]) > 1:
            raise UsageError("--num_pages_compare is for models of one page group; try another")
        prompts = workload_prompts(count, llm.model_config.vocab_size)
        runs[name] = partial(run_decode, partial(run_batch, llm), prompts)
        runs[name]()  # warms up
    rounds, void = quiet_rounds(runs, [os.getpid()], settings.repeats or 5, settings.most_void)
    return {
        "requests": count,
        "pool_tokens": tokens,
        "step_s": {name: statistics.median(f[name]["step_s"] for f in rounds) for name in runs},
        "ratio": median_ratio(rounds, "large", "needed", "step_s"),
        "void": void,
        "rounds": rounds,
    }


def tables(figures: dict[str, Any]) -> list[Table]:
    rows = [
        [
            str(row["requests"]),
            *(shown(row["step_s"][name], ".2f", 1e3) for name in ("needed", "large")),
            shown(row["ratio"], ".3f"),
            str(row["void"]),
        ]
        for row in figures["pools"]
    ]
    heads = ["requests", "needed ms", f"{COMPARED_POOL_TOKENS} ms", "ratio", "void"]
    return [Table("", heads, rows)]


def charts(figures: dict[str, Any]) -> list[Chart]:
    rows = figures["pools"]
    labels = [f"{row['requests']} requests" for row in rows]
    series = {name: [row["step_s"][name] * 1e3 for row in rows] for name in ("needed", "large")}
    return [Chart("pools", "A step by the size of the KV pool", "ms", labels, series)]

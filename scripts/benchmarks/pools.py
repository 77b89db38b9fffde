# SPDX-License-Identifier: Apache-2.0
"""--num_pages_compare: whether a step's time depends on the size of the KV pool."""

from typing import Any

from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.variants import compare_variants
from scripts.benchmarks.workload import NEW_TOKENS, PROMPT_TOKENS
from scripts.command_line import UsageError

COMPARED_POOL_TOKENS = 8192


def measure(settings: Settings) -> dict[str, Any]:
    return {"pools": [compare_pools(settings, count) for count in settings.counts]}


def compare_pools(settings: Settings, count: int) -> dict[str, Any]:
    """Returns the figures with a pool of what is needed, and with one of 8,192 tokens.

    Both pools are for a model of one page group; page 0 is the reserved one.
    """
    page_size = settings.options.get("page_size") or 16
    tokens = {"needed": count * (PROMPT_TOKENS + NEW_TOKENS), "large": COMPARED_POOL_TOKENS}
    if "num_pages" in settings.options:
        raise UsageError("--num_pages_compare chooses the pools itself; leave out --num_pages")
    variants = {
        name: {"page_size": page_size, "num_pages": -(-pool // page_size) + 1}
        for name, pool in tokens.items()
    }
    return compare_variants(settings, count, variants) | {"pool_tokens": tokens}


def tables(figures: dict[str, Any]) -> list[Table]:
    rows = [
        [
            str(row["requests"]),
            *(shown(row["engines"][name]["step_s"], ".2f", 1e3) for name in ("needed", "large")),
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
    series = {
        name: [row["engines"][name]["step_s"] * 1e3 for row in rows] for name in ("needed", "large")
    }
    return [Chart("pools", "A step by the size of the KV pool", "ms", labels, series)]

# SPDX-License-Identifier: Apache-2.0
"""The suite prefix: what the cache of prefixes gains, and what it costs where nothing is shared."""

from typing import Any

from scripts.benchmarks.goals import WITH, WITHOUT
from scripts.benchmarks.prefix_host import measure_host
from scripts.benchmarks.prefix_sharing import SHARING, load_pair
from scripts.benchmarks.prefix_tiers import measure_preempted, measure_resumed
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.settings import Settings
from scripts.command_line import UsageError

# Those of `SHARING` have a pair of engines in common.
ALONE = {"preempted": measure_preempted, "resumed": measure_resumed, "host": measure_host}
PARTS = [*SHARING, *ALONE]
RUNS = (WITH, WITHOUT)


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the figures of each part, with the cache and without it, and their ratios."""
    chosen = settings.fields or PARTS
    if unknown := [name for name in chosen if name not in PARTS]:
        raise UsageError(f"--fields={unknown[0]} is unknown; the parts are {', '.join(PARTS)}")
    if "num_pages" in settings.options:
        raise UsageError("--suite=prefix chooses the pools itself; leave out --num_pages")
    parts: dict[str, Any] = {}
    for name in [name for name in ALONE if name in chosen]:
        parts[name] = ALONE[name](settings)
    if sharing := [name for name in SHARING if name in chosen]:
        pair = load_pair(settings)
        parts |= {name: SHARING[name](settings, pair) for name in sharing}
    return {"prefix_tokens": settings.prefix_tokens, "prefix": parts}


def tables(figures: dict[str, Any]) -> list[Table]:
    rows = [
        [
            name,
            goal["figure"],
            *(shown(part["runs"][run][goal["figure"]], ".4g") for run in RUNS),
            shown(goal["ratio"], ".3f"),
            f"{'>=' if goal['is_least'] else '<='} {goal['wanted']}",
            str(part["void"]),
        ]
        for name, part in figures["prefix"].items()
        for goal in part["goals"]
    ]
    heads = ["part", "figure", *RUNS, "ratio", "wanted", "void"]
    facts = [
        [name, fact, shown(value, ".0f")]
        for name, part in figures["prefix"].items()
        for fact, value in part["facts"].items()
    ]
    found = [Table("", heads, rows, left=[0, 1])]
    if facts:
        found.append(Table("Counts", ["part", "of what", "count"], facts, left=[0, 1]))
    return found


def charts(figures: dict[str, Any]) -> list[Chart]:
    labels, ratios, wanted = [], [], []
    for name, part in figures["prefix"].items():
        for goal in part["goals"]:
            labels.append(f"{name}: {goal['figure']}")
            ratios.append(goal["ratio"])
            wanted.append(goal["wanted"])
    series = {"measured": ratios, "wanted": wanted}
    return [Chart("prefix", "With the cache and without", "ratio", labels, series)]

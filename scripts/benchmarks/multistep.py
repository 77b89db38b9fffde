# SPDX-License-Identifier: Apache-2.0
"""The suite steps: what several decode steps in one dispatch gain."""

import dataclasses
from typing import Any

from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.variants import FIGURE, compare_variants
from scripts.command_line import UsageError

STEPS = 8  # if --decode_steps does not say how many


def measure(settings: Settings) -> dict[str, Any]:
    options = {"decode_steps": STEPS} | settings.options
    steps = options.pop("decode_steps")
    if steps == 1:
        raise UsageError("--suite=steps compares with --decode_steps=1; give more, or leave it out")
    settings = dataclasses.replace(settings, options=options)
    variants = {"several": {"decode_steps": steps}, "one": {"decode_steps": 1}}
    rows = [compare_variants(settings, count, variants) for count in settings.counts]
    return {"decode_steps": steps, "steps": rows}


def tables(figures: dict[str, Any]) -> list[Table]:
    rows = [
        [
            str(row["requests"]),
            *(shown(row["engines"][name][FIGURE], ".1f") for name in ("one", "several")),
            shown(row["ratio"], ".3f"),
            str(row["void"]),
        ]
        for row in figures["steps"]
    ]
    heads = ["requests", "tok/s, 1 step", f"{figures['decode_steps']} steps", "ratio", "void"]
    return [Table("", heads, rows)]


def charts(figures: dict[str, Any]) -> list[Chart]:
    rows = figures["steps"]
    labels = [f"{row['requests']} requests" for row in rows]
    series = {name: [row["engines"][name][FIGURE] for row in rows] for name in ("one", "several")}
    return [Chart("steps", "Decode steps in one dispatch", "tokens/s", labels, series)]

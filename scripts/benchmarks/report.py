# SPDX-License-Identifier: Apache-2.0
"""Figures as tables on stdout and as PNG charts."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.command_line import UsageError

WIDTH = 0.8  # of a group of bars, of the place it has


class Table(NamedTuple):
    """Rows of cells under their heads; columns `left` are flush left, all others right."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = ()


class Chart(NamedTuple):
    """Groups of bars: `series` has, by name, a value for each of `labels`; None is no bar."""

    name: str  # of the file
    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


def print_tables(tables: Sequence[Table]) -> None:
    """Prints the tables, each column as wide as its widest cell; one without rows is its title."""
    for table in tables:
        if table.title:
            print(table.title)
        lines = [table.heads, *table.rows] if table.rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligns = ["<" if column in table.left else ">" for column in range(len(widths))]
        for line in lines:
            cells = zip(line, aligns, widths, strict=True)
            print("  ".join(f"{cell:{align}{width}}" for cell, align, width in cells).rstrip())


def shown(value: float | None, form: str, scale: float = 1) -> str:
    """Returns `scale` times the value as `form` writes it; a dash for what there is none of."""
    return "-" if value is None else format(value * scale, form)


def find_matplotlib() -> Any:
    """Returns the drawing part of matplotlib; raises UsageError where it is not installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(
            "--charts needs matplotlib, which is not installed; pip install 'headrace[bench]'"
        ) from error


def draw_charts(charts: Sequence[Chart], folder: Path) -> None:
    """Writes each chart to NAME.png in `folder`."""
    drawing = find_matplotlib()
    for chart in charts:
        height = max(3.0, 1.0 + 0.22 * len(chart.labels) * len(chart.series))
        figure = drawing.Figure(figsize=(8, height), layout="constrained")
        axes = figure.add_subplot()
        thick = WIDTH / len(chart.series)
        for index, (name, values) in enumerate(chart.series.items()):
            places = [at + (index + 0.5) * thick - WIDTH / 2 for at in range(len(values))]
            lengths = [value or 0.0 for value in values]
            bars = axes.barh(places, lengths, thick, label=name)
            texts = ["" if value is None else f"{value:.3g}" for value in values]
            axes.bar_label(bars, texts, padding=2, fontsize=8)
        axes.set_yticks(range(len(chart.labels)), chart.labels)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(chart.unit)
        axes.set_title(chart.title)
        if len(chart.series) > 1:
            axes.legend()
        figure.savefig(folder / f"{chart.name}.png", dpi=120)

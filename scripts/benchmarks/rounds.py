# SPDX-License-Identifier: Apache-2.0
"""Rounds: one run of each engine in turn, while the machine is quiet."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from scripts.benchmarks.machine import CpuWatch

MOST_FOREIGN_CORES = 0.1

Figures = dict[str, Any]
Run = Callable[[], Figures]
Round = dict[str, Figures]  # by engine


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Returns the names, `turn` of them moved from the front to the end, round and round."""
    turn %= len(names)
    return [*names[turn:], *names[:turn]]


def one_round(runs: dict[str, Run], pids: Sequence[int], turn: int) -> Round:
    """Returns the figures of one run of each engine, with the `foreign_cores` during each.

    The order turns from one round to the next, so that what a run leaves behind (a full cache, a
    hot core) weighs on each.
    """
    figures = {}
    for name in rotated(list(runs), turn):
        watch = CpuWatch(pids)
        figures[name] = runs[name]()
        figures[name]["foreign_cores"] = watch.foreign_cores()
    return {name: figures[name] for name in runs}


def disturbance(figures: Round) -> float:
    """Returns the most cores that other processes kept busy during one of the runs."""
    return max(run["foreign_cores"] or 0.0 for run in figures.values())


def quiet_rounds(
    runs: dict[str, Run],
    pids: Sequence[int],
    repeats: int,
    most_void: int,
) -> tuple[list[Round], int]:
    """Returns `repeats` rounds, and how many more were void.

    A round is void while other processes than `pids` used more than 0.1 core in any of its runs;
    after `most_void` of them they are kept, and their `foreign_cores` tells.
    """
    rounds: list[Round] = []
    void = 0
    while len(rounds) < repeats:
        figures = one_round(runs, pids, len(rounds) + void)
        if disturbance(figures) > MOST_FOREIGN_CORES and void < most_void:
            void += 1
            continue
        rounds.append(figures)
    return rounds, void


def medians(figures: Sequence[Figures]) -> Figures:
    """Returns the median of each figure; one that some run lacks is None."""
    columns = {name: [run[name] for run in figures] for name in figures[0]}
    return {
        name: None if None in values else statistics.median(values)
        for name, values in columns.items()
    }


def median_ratio(rounds: Sequence[Round], engine: str, other: str, figure: str) -> float:
    """Returns the median over the rounds of `engine`'s figure over that of `other`."""
    return statistics.median(r[engine][figure] / r[other][figure] for r in rounds)

# SPDX-License-Identifier: Apache-2.0
"""Two runs in turn, and the ratios between them that are wanted."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.benchmarks.rounds import Round, Run, median_ratio, medians, quiet_rounds
from scripts.benchmarks.settings import Settings

WITH, WITHOUT = "with", "without"


class Goal(NamedTuple):
    """The ratio of a figure that is wanted, `over` from one run to the other.

    wanted: the least it should be if `is_least`, else the most.
    """

    figure: str
    over: tuple[str, str]
    wanted: float
    is_least: bool = True


def gain(figure: str, wanted: float) -> Goal:
    """Returns the goal that a time is so many times shorter with the cache."""
    return Goal(figure, (WITHOUT, WITH), wanted)


def compare(
    settings: Settings, runs: dict[str, Run], goals: Sequence[Goal], repeats: int
) -> dict[str, Any]:
    """Returns the medians of the runs `with` and `without` over quiet rounds, and the ratios."""
    most_void = settings.most_void
    rounds, void = quiet_rounds(runs, [os.getpid()], settings.repeats or repeats, most_void)
    return compared(rounds, void, goals)


def compared(rounds: Sequence[Round], void: int, goals: Sequence[Goal]) -> dict[str, Any]:
    """Returns `compare`'s figures of rounds that were run."""
    return {
        "runs": {name: medians([figures[name] for figures in rounds]) for name in (WITH, WITHOUT)},
        "goals": [
            goal._asdict() | {"ratio": median_ratio(rounds, *goal.over, goal.figure)}
            for goal in goals
        ],
        "facts": {},
        "void": void,
        "rounds": list(rounds),
    }

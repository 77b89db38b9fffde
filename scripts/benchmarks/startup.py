# SPDX-License-Identifier: Apache-2.0
"""The suite startup: a start with an empty cache, starts with a full one, and what takes long."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints import store
from scripts.benchmarks.peer import ROOT
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Figures, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.command_line import UsageError, usage_errors

TIMES = ("ready_s", "first_token_s", "all_programs_s", "foreign_cores")


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the figures of one cold start, and the medians of warm ones after it.

    Cold is with an empty cache folder; the model has been fetched before.
    """
    with usage_errors():
        model = store.resolve(settings.model).resolve()
    with tempfile.TemporaryDirectory(prefix="headrace-cold-") as cache:
        run = {"start": lambda: start_once(model, settings.options, cache)}
        [cold], _ = quiet_rounds(run, [os.getpid()], 1, most_void=0)
        warm, void = quiet_rounds(run, [os.getpid()], settings.repeats or 3, settings.most_void)
    starts = {"cold": median_start([cold["start"]]), "warm": median_start(flat(warm))}
    return {
        "programs": len(starts["cold"]["programs"]),
        "starts": starts,
        "dominant": {name: dominant(start["phases"]) for name, start in starts.items()},
        "void": void,
        "rounds": [cold["start"], *flat(warm)],
    }


def flat(rounds: Sequence[dict[str, Figures]]) -> list[Figures]:
    return [figures["start"] for figures in rounds]


def start_once(model: Path, options: dict[str, Any], cache: str) -> Figures:
    """Returns what a process of its own says about one start of the engine."""
    command = [sys.executable, "-m", "scripts.benchmarks.start_once"]
    asked = {"spawned_s": time.monotonic(), "model": str(model), "options": options}
    done = subprocess.run(
        [*command, json.dumps(asked)],
        cwd=ROOT,
        env={**os.environ, "HEADRACE_CACHE": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UsageError("the engine did not start; what it said stands above")
    return json.loads(done.stdout.splitlines()[-1])


def median_start(starts: Sequence[Figures]) -> Figures:
    """Returns the medians of the starts: of each time, phase and program."""
    median: Figures = {}
    for name in TIMES:
        values = [start[name] for start in starts]
        median[name] = None if None in values else statistics.median(values)
    for name in ("phases", "programs"):
        median[name] = {
            key: statistics.median(start[name][key] for start in starts) for key in starts[0][name]
        }
    return median | {name: starts[-1][name] for name in ("compiled", "loaded")}


def dominant(phases: dict[str, float]) -> dict[str, Any]:
    """Returns the longest phase, and its share of the way to the first token."""
    name = max(phases, key=lambda phase: phases[phase])
    return {"phase": name, "share": phases[name] / sum(phases.values())}


def tables(figures: dict[str, Any]) -> list[Table]:
    starts = figures["starts"]
    rows = []
    for name, start in starts.items():
        times = [shown(start[time], ".2f") for time in TIMES]
        found = figures["dominant"][name]
        counts = [str(start["compiled"]), str(start["loaded"])]
        rows.append([name, *times[:-1], *counts, f"{found['phase']} ({found['share']:.0%})"])
        rows[-1].append(times[-1])
    heads = ["start", "ready s", "first token s", "all programs s", "compiled", "loaded"]
    heads += ["mostly", "foreign"]

    def by(part: str) -> list[list[str]]:
        keys = starts["cold"][part]
        return [[key, *(shown(s[part].get(key), ".2f") for s in starts.values())] for key in keys]

    made = "of each program, made or loaded side by side"
    return [
        Table(f"{figures['programs']} programs", heads, rows),
        Table("Seconds of each phase", ["phase", *starts], by("phases")),
        Table(f"Seconds {made}", ["program", *starts], by("programs")),
    ]


def charts(figures: dict[str, Any]) -> list[Chart]:
    found = []
    for part, title in (("phases", "Phases of a start"), ("programs", "Programs, side by side")):
        labels = list(figures["starts"]["cold"][part])
        series = {
            name: [start[part].get(label) for label in labels]
            for name, start in figures["starts"].items()
        }
        found.append(Chart(f"startup_{part}", title, "s", labels, series))
    return found

# SPDX-License-Identifier: Apache-2.0
"""The suite processes: what the leader's host does in a step, by how many processes there are.

They share one mesh of four devices, however many they are: on CPU its devices are threads beside
the leader's, which slow it down, and more of them would be taken for the cost of processes.
"""

import json
import statistics
import subprocess
import sys
from typing import Any

from checkpoints import store
from scripts.benchmarks.peer import ROOT
from scripts.benchmarks.report import Chart, Table
from scripts.benchmarks.settings import Settings
from scripts.command_line import UsageError, usage_errors

COUNTS = (1, 2, 4)
ROWS, STEPS = 32, 200
TIMES = ("schedule_s", "pack_s", "tell_s", "host_s")
DEVICES = 4
AXES = {"tensor": 1, "data": DEVICES}  # by mesh axis, the partitions that rows are in


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the medians of the rounds by axis and number of processes."""
    with usage_errors():
        model = str(store.resolve(settings.model).resolve())
    cases = [(axis, count) for axis in AXES for count in COUNTS]
    rounds = [
        {f"{axis}={count}": run_once(model, axis, count) for axis, count in cases}
        for _ in range(settings.repeats or 3)
    ]
    rows = [
        {
            "axis": axis,
            "processes": count,
            **{
                name: statistics.median(figures[f"{axis}={count}"][name] for figures in rounds)
                for name in (*TIMES, "calls")
            },
        }
        for axis, count in cases
    ]
    return {"processes": rows, "rounds": rounds}


def run_once(model: str, axis: str, count: int) -> dict[str, float]:
    """Returns what the leader of so many processes says."""
    asked = {
        "model": model,
        "mesh": f"{axis}={DEVICES}",
        "rows": ROWS,
        "partitions": AXES[axis],
        "steps": STEPS,
    }
    command = [sys.executable, "-m", "scripts.launch", f"--local={count}"]
    done = subprocess.run(
        [*command, "benchmarks.processes_once", f"--asked={json.dumps(asked)}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UsageError("the processes did not run; what they said stands above")
    return json.loads(done.stdout.splitlines()[-1])


def tables(figures: dict[str, Any]) -> list[Table]:
    rows = [
        [
            *(row["axis"], str(row["processes"])),
            *(f"{row[name] * 1e6:.0f}" for name in TIMES),
            f"{row['calls']:.0f}",
        ]
        for row in figures["processes"]
    ]
    heads = ["axis", "processes", *(f"{name.removesuffix('_s')} us" for name in TIMES), "calls"]
    return [Table(f"The leader's thread in a step of {ROWS} decodes", heads, rows)]


def charts(figures: dict[str, Any]) -> list[Chart]:
    labels = [str(count) for count in COUNTS]
    series = {
        axis: [row["host_s"] for row in figures["processes"] if row["axis"] == axis]
        for axis in AXES
    }
    return [Chart("processes", "Host time of a step by processes", "s", labels, series)]

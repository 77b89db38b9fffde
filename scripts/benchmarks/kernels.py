# SPDX-License-Identifier: Apache-2.0
"""The suite kernels: each operation at the shapes of published models, beside what the device can
do, XLA's own code and jax's kernels.

What a call has to read, write and multiply at least, at the rates at which this device copies and
multiplies in the same run, is the limit of its time.
"""

import importlib
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import XLA, Backend, choose, kernels_only
from pallas_kernels.inputs import scattered
from scripts.benchmarks.kernel_peers import PEERS, Declines, Peer
from scripts.benchmarks.kernel_timing import (
    IN_PLACE,
    Contender,
    difference,
    first_line,
    long_enough,
    timed,
)
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Run, medians, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.check_kernels import OPERATIONS
from scripts.command_line import UsageError

KERNEL, XLAS = "kernel", "xla"
REPEATS = 5
TOLERANCE = 0.05  # of the largest number: what makes another result, and not another rounding
# Of what is copied, and a side of the matrices that are multiplied: far more than caches hold.
COPY_BYTES, SIDE = 2**30, 8192
SMALL_COPY_BYTES, SMALL_SIDE = 2**26, 512  # for CPU


class Goal(NamedTuple):
    """The share of a rate that a kernel is to reach: "copy" or "matmul"."""

    operation: str
    shape: str
    rate: str
    wanted: float


GOALS = (
    Goal("paged_attention", "llama-3.1-8b, decode", "copy", 0.75),
    Goal("quantized_matmul", "llama-3.1-8b up, 16 rows, int8", "copy", 0.75),
    Goal("flash_attention", "llama-3.1-8b", "matmul", 0.55),
)


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the device's rates, the figures of every shape, and the goals' shares."""
    operations = settings.fields or list(OPERATIONS)
    if unknown := [name for name in operations if name not in OPERATIONS]:
        raise UsageError(f"--fields={unknown[0]} is unknown; name some of {', '.join(OPERATIONS)}")
    device = jax.devices()[0]
    backend = choose("auto", device.platform, device.device_kind)
    rates = measure_rates(settings, backend)
    rows = []
    for operation in operations:
        cases = importlib.import_module(f"pallas_kernels.{operation}.cases")
        for name, shape in chosen_shapes(cases, backend):
            row = measure_shape(settings, operation, cases, shape, backend)
            rows.append({"operation": operation, "shape": name} | with_shares(row, rates))
    goals = [] if backend.kind == "xla" else reached(rows)
    return {"backend": str(backend), "rates": rates, "kernels": rows, "goals": goals}


def chosen_shapes(cases: ModuleType, backend: Backend) -> list[tuple[str, Any]]:
    """Returns (name, shape) of what is measured: without kernels the first shape, made small."""
    shapes = list(cases.SHAPES.items())
    if backend.kind != "xla":
        return shapes
    name, shape = shapes[0]
    return [(f"{name}, made small", cases.small(shape))]


def measure_rates(settings: Settings, backend: Backend) -> dict[str, float | None]:
    """Returns what the device copies, bytes a second read and written, and multiplies, operations a
    second of bfloat16 and int8; None for what it cannot multiply."""
    large = backend.kind != "xla"
    size, side = (COPY_BYTES, SIDE) if large else (SMALL_COPY_BYTES, SMALL_SIDE)
    contenders = {"copy": Contender(lambda x: x + 1, copied(size), in_place=True)}
    for name, dtype in (("matmul", jnp.bfloat16), ("int8", jnp.int8)):
        contenders[name] = Contender(product, squares(side, dtype))
    figures, _, _ = compete(settings, contenders, backend)
    done = {"copy": 2 * size, "matmul": 2 * side**3, "int8": 2 * side**3}
    return {
        name: done[name] / figures[name]["seconds"] if name in figures else None for name in done
    }


def copied(size: int) -> Callable[[], Any]:
    """Returns what makes an array of so many bytes."""
    return jax.jit(lambda: (scattered(jax.ShapeDtypeStruct((size // 4,), jnp.float32), 0),))


def squares(side: int, dtype: Any) -> Callable[[], Any]:
    """Returns what makes two matrices: of equal numbers, they would be multiplied in less power
    than others, and so faster."""
    square = jax.ShapeDtypeStruct((side, side), dtype)
    return jax.jit(lambda: (scattered(square, 1), scattered(square, 2)))


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x w: of bfloat16 in bfloat16, of int8 in int32."""
    kept = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.int32
    return jnp.dot(x, w, preferred_element_type=kept)


def measure_shape(
    settings: Settings, operation: str, cases: ModuleType, shape: Any, backend: Backend
) -> dict[str, Any]:
    """Returns the figures of a shape by who does it, and why some do not."""
    contenders, reasons = make_contenders(operation, cases, shape, backend)
    figures, failed, void = compete(settings, contenders, backend, compared=True)
    return {
        "work": cases.work(shape)._asdict(),
        "engines": figures,
        "reasons": reasons | failed,
        "void": void,
    }


def make_contenders(
    operation: str, cases: ModuleType, shape: Any, backend: Backend
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Returns who is to do a shape, and of those that do not do it, why."""
    in_place = operation in IN_PLACE
    contenders = {XLAS: ours(cases, shape, backend, XLA, in_place)}
    reasons = {}
    if backend.kind != "xla":
        contenders = {KERNEL: ours(cases, shape, backend, backend, in_place)} | contenders
    for name, make in PEERS.get(backend.kind, {}).get(operation, {}).items():
        try:
            contenders[name] = of_peer(make(shape), contenders[XLAS])
        except Declines as error:
            reasons[name] = str(error)
    return contenders, reasons


def ours(
    cases: ModuleType, shape: Any, layout: Backend, backend: Backend, in_place: bool
) -> Contender:
    """Returns our call by `backend`, of arguments in the layout that `layout` wants."""
    call, _ = cases.abstract_call(shape, backend)
    make = jax.jit(lambda: cases.concrete(shape, layout, np.random.default_rng(0)))

    def kernel(*arguments: Any) -> Any:
        with kernels_only():
            return call(*arguments)

    return Contender(kernel if backend.kind != "xla" else call, make, in_place)


def of_peer(peer: Peer, owner: Contender) -> Contender:
    """Returns a peer with the arguments of `owner`."""
    arrange = jax.jit(peer.arrange)
    return Contender(peer.call, lambda: arrange(*owner.make()))


def compete(
    settings: Settings,
    contenders: dict[str, Contender],
    backend: Backend,
    compared: bool = False,
) -> tuple[dict[str, Any], dict[str, str], int]:
    """Returns (medians of those that could be timed, why others could not, void rounds).

    compared: all have to give what XLA gives, or the first if it gives nothing.
    """
    programs, failed, found = {}, {}, {}
    wanted: Any = None
    order = sorted(contenders, key=lambda name: name != XLAS)
    for name in order:
        contender = contenders[name]
        try:
            programs[name], result = long_enough(contender)
            found[name] = 0.0
            if compared:
                first = jax.tree.leaves(result)[0]
                wanted = first if wanted is None else wanted
                found[name] = difference(first, wanted)
                del first
            del result
        except Exception as error:  # of any of the compilers' own kinds
            failed[name] = first_line(error)
        else:
            if not found[name] <= TOLERANCE:
                failed[name] = f"its result differs by {found[name]:.2g} of the largest number"
    del wanted
    runs: dict[str, Run] = {
        name: partial(timed, contenders[name], programs[name])
        for name in contenders
        if name not in failed
    }
    if not runs:
        return {}, failed, 0
    # What else the host does shows in what it computes itself, not in a chip's time.
    most_void = settings.most_void if backend.kind == "xla" else 0
    rounds, void = quiet_rounds(runs, [os.getpid()], settings.repeats or REPEATS, most_void)
    figures = {name: medians([figures[name] for figures in rounds]) for name in runs}
    for name, one in figures.items():
        program = programs[name]
        one |= {"calls": program.calls, "copies": program.copies, "difference": found[name]}
    return figures, failed, void


def with_shares(row: dict[str, Any], rates: dict[str, float | None]) -> dict[str, Any]:
    """Returns a row with its limit, in seconds, and the share that ours reaches of each rate."""
    work, engines = row["work"], row["engines"]
    multiplied = "int8" if work["numbers"] == "int8" and rates["int8"] else "matmul"
    least = {"copy": work["bytes"] / (rates["copy"] or np.inf)}
    least["matmul"] = work["flops"] / (rates[multiplied] or np.inf)
    mine = main_engine(row)
    seconds = engines[mine]["seconds"] if mine in engines else None
    shares = {name: limit / seconds for name, limit in least.items()} if seconds else {}
    return row | {
        "limit_s": max(least.values()),
        "bound": max(least, key=lambda name: least[name]),
        "shares": shares,
        "share_of_limit": max(shares.values(), default=None),
    }


def main_engine(row: dict[str, Any]) -> str:
    """Returns who stands for us: the kernel, or XLA where there are none."""
    return KERNEL if KERNEL in row["engines"] or KERNEL in row["reasons"] else XLAS


def reached(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the goals of shapes that were measured, with the share of each."""
    by_name = {(row["operation"], row["shape"]): row for row in rows}
    return [
        goal._asdict() | {"share": by_name[goal[:2]]["shares"].get(goal.rate)}
        for goal in GOALS
        if goal[:2] in by_name
    ]


def tables(figures: dict[str, Any]) -> list[Table]:
    rates, found = figures["rates"], []
    told = f"copies {shown(rates['copy'], '.1f', 1e-9)} GB/s (read and written), multiplies "
    told += f"{shown(rates['matmul'], '.2f', 1e-12)} bfloat16 and "
    told += f"{shown(rates['int8'], '.2f', 1e-12)} int8 TFLOP/s; operations by {figures['backend']}"
    if figures["backend"] == str(XLA):
        told += "\nno kernels here: XLA's code alone, at the first shape of each, made small"
    found.append(Table(told, [], []))
    for operation in dict.fromkeys(row["operation"] for row in figures["kernels"]):
        rows = [row for row in figures["kernels"] if row["operation"] == operation]
        names = dict.fromkeys(n for row in rows for n in (*row["engines"], *row["reasons"]))
        mine = main_engine(rows[0])
        others = [name for name in names if name != mine]
        heads = ["shape", f"{mine} us", "limit us", "of limit", "bound", "void"]
        heads += [f"{name} us" for name in others]
        lines = [
            [
                row["shape"],
                micros(row, mine),
                shown(row["limit_s"], ".1f", 1e6),
                shown(row["share_of_limit"], ".0%"),
                row["bound"],
                str(row["void"]),
                *(micros(row, name) for name in others),
            ]
            for row in rows
        ]
        found.append(Table(f"\n{operation}", heads, lines, left=(0, 4)))
    if figures["goals"]:
        lines = [
            [goal["operation"], goal["shape"], goal["rate"], shown(goal["share"], ".0%")]
            + [f">= {goal['wanted']:.0%}", "reached" if is_reached(goal) else "missed"]
            for goal in figures["goals"]
        ]
        heads = ["operation", "shape", "of rate", "share", "wanted", ""]
        found.append(Table("\nGoals", heads, lines, left=(0, 1, 2, 5)))
    return found


def micros(row: dict[str, Any], name: str) -> str:
    engine = row["engines"].get(name)
    return shown(engine["seconds"] if engine else None, ".1f", 1e6)


def is_reached(goal: dict[str, Any]) -> bool:
    return goal["share"] is not None and goal["share"] >= goal["wanted"]


def charts(figures: dict[str, Any]) -> list[Chart]:
    rows = figures["kernels"]
    names = [f"{row['operation']}: {row['shape']}" for row in rows]
    series = {"share": [100 * (row["share_of_limit"] or 0.0) for row in rows]}
    return [Chart("kernels", "Share of what the device can do", "%", names, series)]

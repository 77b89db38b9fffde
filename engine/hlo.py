# SPDX-License-Identifier: Apache-2.0
"""What is read from a program as a compiler shows it, in optimized HLO: what its chips tell each
other, what it makes, and what it moves to and from memory.
"""

import math
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from engine.traffic import Collective

# In optimized HLO: a computation's head, a line of it, arrays, and what is called from where.
COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) \(")
LINE = re.compile(r"^\s+(?:ROOT )?%[\w.-]+ = (.*?) ([a-z][\w-]*)\(")
OPERATION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)")
OPERAND = re.compile(r"%([\w.-]+)")
ARRAY = re.compile(r"([a-z]+)(\d+)\[([\d,]*)\](\{[^}]*\})?")
LOOP = re.compile(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)")
CALL = re.compile(r"(?:calls|to_apply|(?:true|false)_computation)=%([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
COUNT = re.compile(r" s32\[\]\S* constant\((\d+)\)")
COLLECTIVES = (
    *("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all"),
    "reduce-scatter",
)
KERNEL = 'custom_call_target="tpu_custom_call"'
SLICES = ("slice", "dynamic-slice", "gather")  # of their first operand they read what they give
NOT_MADE = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional")


class Hlo(NamedTuple):
    """A program as the compiler shows it: the lines of its computations by name."""

    entry: str
    lines: dict[str, list[str]]


def parsed(text: str) -> Hlo:
    """Returns a program of its text."""
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            name = head[2]
            lines[name] = []
            entry = name if head[1] else entry
        elif lines:
            lines[name].append(line)
    return Hlo(entry, lines)


def called(line: str) -> list[str]:
    """Returns the computations that a line calls, but for loops."""
    names = CALL.findall(line)
    for branches in BRANCHES.findall(line):
        names += [branch.strip().lstrip("%") for branch in branches.split(",")]
    return names


def collectives(hlo: Hlo) -> list[Collective]:
    """Returns the collectives of a program.

    Those of a loop of a known count are there so often; what is in a loop within it, or in one
    whose end is data, counts once a turn of the outermost known one.
    """

    def walk(name: str, times: int) -> Iterator[Collective]:
        for line in hlo.lines[name]:
            if found := LINE.match(line):
                kind = found[2].removesuffix("-start")
                if kind in COLLECTIVES:
                    sizes = made_bytes(found[1])
                    # A start gives the operand beside the result.
                    size = sum(sizes) if kind == found[2] else max(sizes)
                    yield Collective(kind, times, size)
            if loop := LOOP.search(line):
                yield from walk(loop[2], times if times > 1 else turns_of(hlo.lines[loop[1]]))
            for inner in called(line):
                yield from walk(inner, times)

    return list(walk(hlo.entry, 1))


def turns_of(condition: list[str]) -> int:
    """Returns how often a loop turns whose condition this is; 1 if that is data."""
    counts = [int(found[1]) for line in condition if (found := COUNT.search(line))]
    return counts[0] if len(counts) == 1 else 1


def made_bytes(shapes: str, *, in_hbm: bool = False) -> list[int]:
    """Returns the bytes of each of the arrays that a line makes; of those in HBM only, if asked."""
    return [
        max(1, int(bits) // 8) * math.prod(int(n) for n in dims.split(",") if n)
        for _, bits, dims, layout in ARRAY.findall(shapes)
        if not in_hbm or "S(" not in layout  # the number of another memory
    ]


def largest_temporary(hlo: Hlo, total: int) -> int:
    """Returns the bytes of the largest array that may be a temporary, of `total` bytes of them.

    What is larger than all of them together is updated in place.
    """

    def walk(name: str) -> Iterator[int]:
        for line in hlo.lines[name]:
            if (found := LINE.match(line)) and found[2] not in NOT_MADE:
                yield from made_bytes(found[1], in_hbm=True)
            if loop := LOOP.search(line):
                yield from walk(loop[2])
            if found and found[2] != "fusion":  # what is fused is never in memory
                for inner in called(line):
                    yield from walk(inner)

    return max((size for size in walk(hlo.entry) if size <= total), default=0)


class Operation(NamedTuple):
    """A line: the arrays that it makes as it spells them, and the names of its operands."""

    name: str
    shapes: str
    kind: str
    operands: list[str]
    line: str
    is_root: bool


class Moved(NamedTuple):
    """What an operation does in each of `times` turns: bytes that it reads from and writes to the
    chip's memory, of each operand that it reads how many bytes there are, and of each array that it
    makes in whatever memory."""

    name: str
    times: int
    read_bytes: int
    written_bytes: int
    operand_bytes: list[int]
    made_bytes: list[int]


def operations(hlo: Hlo, name: str) -> list[Operation]:
    """Returns the operations of a computation."""
    found = [OPERATION.match(line) for line in hlo.lines[name]]
    return [
        Operation(one[2], one[3], one[4], OPERAND.findall(one[5]), one.string, bool(one[1]))
        for one in found
        if one
    ]


def moved(hlo: Hlo) -> list[Moved]:
    """Returns what a program moves outside of kernels.

    In a loop of a known count that often, of a conditional every branch. An operation that takes a
    slice of an array reads the slice, also within a fusion; one that puts a slice into an array
    writes the slice.
    """

    def walk(name: str, times: int) -> Iterator[Moved]:
        there = operations(hlo, name)
        shapes = {one.name: one.shapes for one in there}
        for one in there:
            if loop := LOOP.search(one.line):
                yield from walk(loop[2], times * turns_of(hlo.lines[loop[1]]))
            elif one.kind in ("conditional", "call"):
                for inner in called(one.line):
                    yield from walk(inner, times)
            elif one.kind not in NOT_MADE and not one.kind.endswith("-done"):
                if KERNEL not in one.line:
                    yield moved_by(hlo, one, shapes, times)

    return list(walk(hlo.entry, 1))


def moved_by(hlo: Hlo, one: Operation, shapes: dict[str, str], times: int) -> Moved:
    """Returns what an operation moves, of operands of such shapes."""
    sizes = {name: sum(made_bytes(shapes[name])) for name in one.operands if name in shapes}
    read = [
        min(sizes[name], taken(hlo, one, index))
        for index, name in enumerate(one.operands)
        if name in sizes and made_bytes(shapes[name], in_hbm=True)
    ]
    written = put(hlo, one, shapes)
    if written is None:
        made = made_bytes(one.shapes, in_hbm=True)
        # What starts a copy gives the source beside the target.
        is_copy = one.kind.endswith("-start")
        written = made_bytes_first(one.shapes) if is_copy else sum(made)
    return Moved(one.name, times, sum(read), written, list(sizes.values()), made_bytes(one.shapes))


def made_bytes_first(shapes: str) -> int:
    """Returns the bytes of the first array of a line, if it is in HBM."""
    first = ARRAY.search(shapes)
    return sum(made_bytes(first[0], in_hbm=True)) if first else 0


def taken(hlo: Hlo, one: Operation, index: int) -> int:
    """Returns how many bytes of an operand are read; more than there are is all."""
    kind, everything = one.kind.removesuffix("-start"), sys.maxsize
    if kind in SLICES and not index:
        return made_bytes(one.shapes)[0]
    if kind == "dynamic-update-slice" and not index:
        return 0
    if kind not in ("fusion", "call", "async"):
        return everything
    [inside] = called(one.line)
    there = operations(hlo, inside)
    [name] = [o.name for o in there if o.kind == "parameter" and f" parameter({index})" in o.line]
    return taken_of(hlo, there, name)


def taken_of(hlo: Hlo, there: list[Operation], name: str) -> int:
    """Returns how many bytes of a value the operations of its computation read.

    What gives it on as it is leaves that to others: all of it, then.
    """
    total = 0
    for one in there:
        for index in [index for index, operand in enumerate(one.operands) if operand == name]:
            if one.kind != "bitcast":
                total += taken(hlo, one, index)
            else:
                total += sys.maxsize if one.is_root else taken_of(hlo, there, one.name)
    return total


def put(hlo: Hlo, one: Operation, shapes: dict[str, str]) -> int | None:
    """Returns the bytes of the slice that an operation puts into an array; None if it does not."""
    if one.kind == "dynamic-update-slice":
        return sum(made_bytes(shapes[one.operands[1]]))
    if one.kind != "fusion":
        return None
    [inside] = called(one.line)
    there = operations(hlo, inside)
    [root] = [operation for operation in there if operation.is_root]
    return put(hlo, root, {operation.name: operation.shapes for operation in there})

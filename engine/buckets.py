# SPDX-License-Identifier: Apache-2.0
"""The shapes that programs are compiled for: few, coarse, and always enough."""

import functools
from typing import Literal, NamedTuple

MAX_BODIES = 16
MAX_HEADS = 8
_DECODE_ROWS = 6  # row counts of decodes alone
_MAX_WIDTH = 32  # wider pieces waste the rest of short prompts, and are no faster for long ones
_NARROW = 16  # a short prompt's chunk
_LEAST_PIECES = 4  # so that short prompts share a step also under a small budget
_SCORE_ROWS = 64


class Group(NamedTuple):
    """Rows of one static shape [rows, width] in a step."""

    kind: Literal["decode", "chunk", "tree", "ring"]
    rows: int
    width: int


Body = tuple[Group, ...]  # a chunk group first, then a decode group; either may be missing


class Repeat(NamedTuple):
    """The program of several decode steps in one dispatch, of a body of decodes."""

    body: Body


class Place(NamedTuple):
    """The program that brings experts of a layer of a segment to other slots."""

    segment: int


class Head(NamedTuple):
    """A head program: what it computes from how many hidden rows."""

    kind: Literal["greedy", "sample", "logprobs", "score"]
    rows: int


def _power_above(n: int) -> int:
    """Returns the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _unique(values) -> tuple:
    return tuple(dict.fromkeys(values))


def _spread(most: int, count: int) -> tuple[int, ...]:
    """Returns powers of two up to `most`, and `most`; evenly thinned out if they are too many."""
    rows = [1 << e for e in range(most.bit_length()) if 1 << e < most] + [most]
    last = len(rows) - 1
    if last < count:
        return tuple(rows)
    steps = count - 1
    return tuple(rows[(2 * i * last + steps) // (2 * steps)] for i in range(count))


def _even(body: Body, multiple: int) -> Body:
    """Returns a body whose groups have rows for so many equal parts; a ring's one piece stays."""
    return tuple(
        group
        if group.kind == "ring"
        else group._replace(rows=-(-group.rows // multiple) * multiple)
        for group in body
    )


class Ladder:
    """All bodies and heads of an engine.

    With `pinned` there is one body of decodes, one of chunks, and one size of heads: what a row
    computes never depends on its company. With `repeats`, bodies of decodes also run several steps
    in one dispatch, and there are fewer mixed bodies.

    Groups' rows are a multiple of `multiple`, so that the stages of a pipeline have parts of them.

    With `ring`, a step may have one piece of up to so many tokens instead of others, whose tokens
    the devices of the sequence axis share.

    rows: most decodes, and most sampled rows, of a step.   width: widest piece of a prompt.
    pieces: most pieces of a step.   ring: widest piece of a ring, 0 if there is none.
    Invariant: any step within these has a body, and at most 16 bodies and 8 heads exist.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        pinned: bool = False,
        repeats: bool = False,
        ring: int = 0,
        multiple: int = 1,
    ):
        budget = max_num_batched_tokens
        self.rows = min(max_num_seqs, budget)  # each running row needs a token of the budget
        self.width = min(_MAX_WIDTH, _power_above(budget))
        self.ring = ring = ring if ring > self.width else 0
        self.pieces = max(-(-budget // self.width), min(_LEAST_PIECES, max_num_seqs, budget))
        self.repeats: tuple[Body, ...] = ()
        if pinned:
            self.width = min(_MAX_WIDTH, 1 << budget.bit_length() - 1)  # a whole chunk fits a step
            self.pieces = budget // self.width
            pieces = Group("chunk", self.pieces, self.width)
            self.bodies: tuple[Body, ...] = ((Group("decode", self.rows, 1),), (pieces,))
            self.head_rows: tuple[int, ...] = (self.rows,)
            return
        few = _power_above(-(-self.rows // 4))
        self.head_rows = _unique([1, few, self.rows])
        decodes = [Group("decode", rows, 1) for rows in _spread(self.rows, _DECODE_ROWS)]
        alone = [Group("chunk", rows, self.width) for rows in _spread(-(-self.pieces // 4), 3)]
        alone.insert(0, Group("chunk", 1, min(_NARROW, self.width)))
        mixed: list[Body] = [
            (Group("chunk", chunks, self.width), Group("decode", rows, 1))
            for rows in _unique([self.rows] if repeats else [few, self.rows])
            for chunks in _unique([max(1, self.pieces // n) for n in (8, 2, 1)])
        ]
        if ring:
            group = Group("ring", 1, ring)
            mixed += [(group,), (group, Group("decode", self.rows, 1))]
            decodes = [Group("decode", rows, 1) for rows in _spread(self.rows, _DECODE_ROWS - 2)]
        bodies = _unique([*((g,) for g in [*decodes, *alone]), *mixed])
        # Where no more fit, the larger chunks run beside a few decodes of nobody.
        large = [(Group("chunk", max(1, self.pieces // n), self.width),) for n in (1, 2)]
        room = MAX_BODIES - len(bodies) - (len(self.head_rows) if repeats else 0)
        self.bodies = _unique([*bodies, *large[:room]])
        if repeats:
            self.repeats = tuple((Group("decode", rows, 1),) for rows in self.head_rows)
        self.bodies = _unique(_even(body, multiple) for body in self.bodies)
        self.repeats = _unique(_even(body, multiple) for body in self.repeats)
        count = len(self.bodies) + len(self.repeats)
        assert count <= MAX_BODIES, f"{count} bodies, over {MAX_BODIES}"

    def choose(self, decodes: int, pieces: int, widest: int) -> Body:
        """Returns the body of fewest tokens for so many decodes, and pieces of at most `widest`.

        Raises ValueError, naming the limits, when the step is outside of them.
        """
        for body, (decode_rows, chunk_rows, width) in self._by_size.items():
            if (body[0].kind == "ring") != (widest > self.width):
                continue
            if decodes <= decode_rows and pieces <= chunk_rows and widest <= width:
                return body
        raise ValueError(
            f"no body for {decodes} decodes and {pieces} pieces of up to {widest} tokens; "
            f"plan at most {self.rows} decodes and {self.pieces} pieces of {self.width}"
        )

    @functools.cached_property
    def _by_size(self) -> dict[Body, tuple[int, int, int]]:
        """The bodies from the one of fewest tokens on: decodes, pieces and their width."""
        ordered = sorted(self.bodies, key=lambda body: sum(g.rows * g.width for g in body))
        return {body: _capacity(body) for body in ordered}

    def choose_repeat(self, decodes: int) -> Body | None:
        """Returns the least body for so many decodes that runs several steps, if there is one."""
        return next((body for body in self.repeats if body[0].rows >= decodes), None)

    def heads(self) -> tuple[Head, ...]:
        """Returns all head programs; a step's rows are rounded up to the next of a kind."""
        large = self.head_rows[-2:]
        heads = (
            *(Head("greedy", rows) for rows in self.head_rows),
            *(Head("sample", rows) for rows in large),
            *(Head("logprobs", rows) for rows in large),
            Head("score", min(_SCORE_ROWS, self.pieces * self.width)),
        )
        assert len(heads) <= MAX_HEADS, f"{len(heads)} heads, over {MAX_HEADS}"
        return heads


def _capacity(body: Body) -> tuple[int, int, int]:
    """Returns a body's most decodes, most pieces, and their most tokens."""
    has = {group.kind: group for group in body}
    nothing = Group("chunk", 0, 0)
    chunk = has.get("chunk", has.get("ring", nothing))
    return has.get("decode", nothing).rows, chunk.rows, chunk.width

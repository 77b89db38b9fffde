# SPDX-License-Identifier: Apache-2.0
"""A step as the scheduler decides it: a frozen Plan, and the draft that it grows from."""

import dataclasses
from typing import NamedTuple

from engine.buckets import Body
from engine.moves import Delete, Load, Move, Save
from engine.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of a request: one row of the chunk group.

    Pieces of one request may share a step, in order. `samples`: the last of its chunks, whose
    token is drawn. `fresh`: the first since the request got its row. `scores`: the prompt
    positions [a, b) in it whose next token's log-probability is wanted. Each is asked for once,
    also if the request is preempted after this step was planned, so the step's scores are to be
    kept whatever became of the request.
    """

    request: Request
    row: int
    start: int
    stop: int
    samples: bool
    fresh: bool
    scores: tuple[int, int] | None
    admission: int  # which of the request's rows this is: it may have been preempted since


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One step. `decodes`: requests with one more token, whose last one is on the device.

    `sampled`: the request of each token drawn, of pieces first, then of decodes; `rows`: its row.
    A plan of decodes alone may run `repeat` times in one dispatch. `moves`: what is to be done with
    pages before it, in order.
    """

    step: int
    body: Body
    decodes: tuple[Request, ...]
    pieces: tuple[Piece, ...]
    sampled: tuple[Request, ...]
    rows: tuple[int, ...]
    repeat: int = 1
    moves: tuple[Move | Save | Load | Delete, ...] = ()


class Need(NamedTuple):
    """What a step's body must have room for: decodes, pieces, tokens of the widest piece.

    A piece wider than those of chunks takes a ring, where it is alone.
    """

    decodes: int
    pieces: int
    widest: int


@dataclasses.dataclass
class Draft:
    """A plan under construction; nothing is committed until it is whole."""

    tokens_left: int
    pieces_left: int
    decodes: list[Request] = dataclasses.field(default_factory=list)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    preempted: bool = False
    lifted: int = 0  # pages that were brought up to the device

    def drop(self, request: Request) -> None:
        """Takes back what was drafted for `request`; its share of the budget stays unused."""
        self.pieces = [piece for piece in self.pieces if piece.request is not request]
        self.decodes = [decode for decode in self.decodes if decode is not request]


def make_piece(request: Request, start: int, stop: int) -> Piece:
    """Returns the row for tokens [start, stop), which scores what was not scored before."""
    scores = None
    if request.params.prompt_logprobs is not None:
        first = max(start, request.scored)
        last = min(stop, len(request.prompt_token_ids) - 1)  # the last position has no next token
        scores = (first, last) if first < last else None
    samples = stop == request.target and not request.scores_only
    fresh = start == request.opened
    row, admission = request.running_row, request.admissions
    return Piece(request, row, start, stop, samples, fresh, scores, admission)

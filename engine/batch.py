# SPDX-License-Identifier: Apache-2.0
"""A step's host inputs: one packed int32 array, and the names of what stands where in it.

Turning many small NumPy arrays into device arguments costs more than the step's own dispatch, so
everything travels as one. Floats and unsigned words travel as their bits.

Letters: B rows of a group, T tokens a row, G page groups, J pages a row, S sampled rows, E end ids.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from engine.buckets import Body, Group
from engine.plan import Plan
from engine.request import Request
from engine.settings import BAD_WORD_TOKENS, BAD_WORDS, SETTINGS, UNUSED, row_settings

MAX_END_IDS = 32  # end ids a row can hold; a request with more is refused


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The sizes that every batch of one engine shares."""

    num_groups: int
    pages_per_row: int
    num_rows: int  # without the null row, whose index this is
    host_page: int = 1  # tokens of a page as the host counts them: those of all stripes

    def fields(self, group: Group) -> dict[str, tuple[int, ...]]:
        """Returns the packed fields of a row group and their shapes."""
        B, T = group.rows, group.width
        G, J = self.num_groups, self.pages_per_row
        fields = {"row_B": (B,), "table_GBJ": (G, B, J)}
        if group.kind == "decode":
            return fields
        fields |= {"start_B": (B,), "count_B": (B,), "cell_GB": (G, B), "token_BT": (B, T)}
        if group.kind == "tree":
            return fields | {"depth_BT": (B, T), "ancestors_BT": (B, T)}
        return fields | {
            "fresh_B": (B,),
            "length_B": (B,),
            "settle_B": (B,),
            "left_B": (B,),
            "end_ids_BE": (B, MAX_END_IDS),
            "settings_BF": (B, len(SETTINGS)),
        }

    def offset(self, group: Group, start: int) -> int:
        """Returns where in its row of a group a piece that begins at `start` does."""
        return start % self.host_page if group.kind == "ring" else 0

    def layout(self, body: tuple[Group, ...]) -> list[dict[str, tuple[int, ...]]]:
        """Returns the fields of each row group of `body`, then those of the sampled rows."""
        rows: tuple[int, ...] = (self.num_rows,)
        sampled = {"sample_index_S": rows, "sample_row_S": rows}
        return [*(self.fields(group) for group in body), sampled]

    def size(self, body: tuple[Group, ...]) -> int:
        """Returns the length of the packed array."""
        return layout_of(self, body)[-1]["sample_row_S"].stop

    def unpack(self, body: tuple[Group, ...], packed: Any) -> list[dict[str, Any]]:
        """Returns views of `packed` by name, one dict a part of `layout`."""
        return [
            {name: packed[f.start : f.stop].reshape(f.shape) for name, f in fields.items()}
            for fields in layout_of(self, body)
        ]


class Field(NamedTuple):
    """Where a field lies in the packed array, and its shape."""

    start: int
    stop: int
    shape: tuple[int, ...]


@functools.cache
def layout_of(shape: BatchShape, body: tuple[Group, ...]) -> list[dict[str, Field]]:
    """Returns where the fields of `shape.layout(body)` lie, worked out once."""
    parts, stop = [], 0
    for fields in shape.layout(body):
        part = {}
        for name, sizes in fields.items():
            start, stop = stop, stop + math.prod(sizes)
            part[name] = Field(start, stop, sizes)
        parts.append(part)
    return parts


def pack(
    plan: Plan | None,
    body: Body,
    shape: BatchShape,
    tables: np.ndarray,
    lengths: np.ndarray,
) -> np.ndarray:
    """Returns the packed int32 array of a partition's `plan` in a step of `body`; None is idle.

    `tables` int32 [G, R + 1, J] and `lengths` int32 [G, R + 1] are the scheduler's, after the
    plan; `lengths` counts the cells up to the end of this step.
    """
    packed = np.zeros(shape.size(body), np.int32)
    *parts, sampled = shape.unpack(body, packed)
    first_token = 0
    sampled["sample_row_S"][:] = shape.num_rows
    for group, part in zip(body, parts, strict=True):
        part["row_B"][:] = shape.num_rows
        if group.kind != "decode":
            part["settle_B"][:] = shape.num_rows
    if plan is None:
        return packed
    sampled["sample_row_S"][: len(plan.sampled)] = plan.rows
    indexes = sampled["sample_index_S"][: len(plan.sampled)]
    for group, part in zip(body, parts, strict=True):
        if group.kind in ("chunk", "ring"):
            pack_pieces(plan, group, part, shape, tables, lengths)
            indexes[: -len(plan.decodes) or None] = [
                first_token
                + index * group.width
                + shape.offset(group, piece.start)
                + piece.stop
                - piece.start
                - 1
                for index, piece in enumerate(plan.pieces)
                if piece.samples
            ]
        else:
            assert group.kind == "decode", "the scheduler plans no tree rows yet"
            count = len(plan.decodes)
            rows = sampled["sample_row_S"][len(plan.sampled) - count :][:count]
            part["row_B"][:count] = rows
            np.take(tables, rows, axis=1, out=part["table_GBJ"][:, :count], mode="clip")
            indexes[len(indexes) - count :] = np.arange(first_token, first_token + count)
        first_token += group.rows * group.width
    return packed


def pack_pieces(plan, group, part, shape, tables, lengths) -> None:
    """Writes the plan's pieces into a chunk group's fields."""
    last_of_row = {piece.row: index for index, piece in enumerate(plan.pieces)}
    for index, piece in enumerate(plan.pieces):
        request, row = piece.request, piece.row
        count = piece.stop - piece.start
        end = plan.pieces[last_of_row[row]].stop
        part["row_B"][index] = row
        part["start_B"][index] = piece.start
        part["count_B"][index] = count
        part["cell_GB"][:, index] = lengths[:, row] - (end - piece.start)
        part["table_GBJ"][:, index] = tables[:, row]
        first = shape.offset(group, piece.start)
        part["token_BT"][index, first : first + count] = request.tokens(piece.start, piece.stop)
        part["fresh_B"][index] = piece.fresh
        part["length_B"][index] = request.limit
        if last_of_row[row] == index:
            part["settle_B"][index] = row
            pack_settings(part, index, request, piece.stop)


def pack_settings(part: Mapping[str, np.ndarray], index: int, request: Request, stop: int) -> None:
    """Writes the row settings of a request whose KV is stored up to `stop`."""
    part["left_B"][index] = request.limit - stop
    part["end_ids_BE"][index] = -1
    part["end_ids_BE"][index, : len(request.end_ids)] = request.end_ids
    part["settings_BF"][index] = row_settings(request)


def packed_tables_size(vocabulary: int) -> int:
    """Returns the length of what `pack_tables` returns."""
    return 1 + 2 * vocabulary + BAD_WORDS * BAD_WORD_TOKENS + BAD_WORD_TOKENS - 1


def no_tables(vocabulary: int, null_row: int) -> np.ndarray:
    """Returns what `pack_tables` returns, of nobody."""
    packed = np.zeros(packed_tables_size(vocabulary), np.int32)
    packed[0] = null_row
    return packed


def pack_tables(request: Request, vocabulary: int) -> np.ndarray:
    """Returns the int32 array with which `engine.logits.set_row` sets a request's row.

    It has the row, bias and tally of every id, the bad words of several tokens, and the output's
    last tokens.
    """
    params = request.params
    bias_V = np.zeros(vocabulary, np.float32)
    if params.allowed_token_ids is not None:
        bias_V[:] = -np.inf
        bias_V[list(params.allowed_token_ids)] = 0
    for token, bias in (params.logit_bias or {}).items():
        bias_V[token] += bias
    bad_ML = np.full((BAD_WORDS, BAD_WORD_TOKENS), UNUSED, np.int32)
    several = [word for word in request.bad_words if len(word) > 1]
    for place, word in enumerate(several):
        bad_ML[place, -len(word) :] = word
    bias_V[[word[0] for word in request.bad_words if len(word) == 1]] = -np.inf
    output = request.output_token_ids
    tally_V = 2 * np.bincount(output, minlength=vocabulary)
    tally_V[request.prompt_token_ids] += 1
    recent_L = np.full(BAD_WORD_TOKENS - 1, UNUSED, np.int32)
    last = output[-len(recent_L) :]
    recent_L[len(recent_L) - len(last) :] = last
    row_1 = np.array([request.running_row])
    parts = [row_1, bias_V.view(np.int32), tally_V, bad_ML.ravel(), recent_L]
    return np.concatenate(parts, dtype=np.int32)

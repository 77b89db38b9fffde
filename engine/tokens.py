# SPDX-License-Identifier: Apache-2.0
"""The tokens of a step, by row group, as they follow from the packed arrays and the state.

Letters: T tokens of a step or of one group's rows, flat; B rows of a group, U tokens a row; G page
groups, J pages a row.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from engine.buckets import Group
from engine.models.decoder import Tokens as LayerTokens
from engine.state import State
from engine.step_config import StepConfig
from pallas_kernels.paged_attention import Rows
from sharding.layouts import places_of


class Tokens(NamedTuple):
    """The tokens of one row group, flat, and how its attention finds its keys."""

    token_T: jax.Array
    position_T: jax.Array
    cell_GT: jax.Array
    valid_T: jax.Array
    length_T: jax.Array  # the longest that each token's sequence gets
    rows_G: Rows  # with a leading group axis on tables and starts
    offset: jax.Array | None = None  # of a ring: the place of the piece's first token in it


def decode_tokens(group: Group, part: dict[str, jax.Array], state: State) -> Tokens:
    """Returns the newest token of each row; finished and null rows are idle."""
    row_B = part["row_B"]
    finished_B = state.finished_R[row_B]
    cell_GB = state.length_GR[:, row_B]
    count_B = jnp.where(finished_B, 0, 1).astype(jnp.int32)
    rows = Rows(part["table_GBJ"], cell_GB, count_B)
    length_B = state.settings(row_B)["length"]
    return Tokens(
        state.token_R[row_B], state.position_R[row_B], cell_GB, ~finished_B, length_B, rows
    )


def wide_tokens(group: Group, part: dict[str, jax.Array]) -> Tokens:
    """Returns the tokens of chunk or tree rows, which the host knows."""
    B, T = part["token_BT"].shape
    index_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    depth_BT = part.get("depth_BT")
    position_BT = part["start_B"][:, None] + (index_BT if depth_BT is None else depth_BT)
    cell_GBT = part["cell_GB"][:, :, None] + index_BT[None]
    valid_BT = index_BT < part["count_B"][:, None]
    rows = Rows(
        part["table_GBJ"], part["cell_GB"], part["count_B"], depth_BT, part.get("ancestors_BT")
    )
    flat = part["token_BT"].reshape(-1), position_BT.reshape(-1)
    cells_GT = cell_GBT.reshape(cell_GBT.shape[0], -1)
    # Tree rows get theirs when ropes that need it are drafted for.
    length_B = part.get("length_B", jnp.zeros((B,), jnp.int32))
    return Tokens(*flat, cells_GT, valid_BT.reshape(-1), jnp.repeat(length_B, T), rows)


def ring_tokens(group: Group, part: dict[str, jax.Array], cfg: StepConfig) -> Tokens:
    """Returns this device's tokens of a piece whose tokens the sequence axis shares.

    The piece stands in pages that all devices together have; queries of `rows_G` begin where the
    first of them does.
    """
    assert group.rows == 1, "one piece has the ring for itself"
    place_T, offset = ring_places(group, cfg)(cfg.axis("sequence").here()), ring_offset(part, cfg)
    count = part["count_B"][0]
    rows = Rows(part["table_GBJ"], part["cell_GB"] - offset, part["count_B"] + offset)
    return Tokens(
        part["token_BT"][0][place_T],
        part["start_B"] - offset + place_T,
        rows.start_B + place_T[None],
        (place_T >= offset) & (place_T < offset + count),
        jnp.broadcast_to(part["length_B"], place_T.shape),
        rows,
        offset,
    )


def ring_places(group: Group, cfg: StepConfig):
    """Returns the function from a device of the ring to the places of its tokens."""
    ways, page = cfg.axis("sequence").ways, cfg.layout.page_size
    return partial(places_of, cfg.ring_layout, group.width, ways, page)


def ring_offset(part: dict[str, jax.Array], cfg: StepConfig) -> jax.Array:
    """Returns the place of a piece's first token in the pages that it stands in."""
    return part["start_B"][0] % (cfg.layout.page_size * cfg.axis("sequence").ways)


def valid_places(group: Group, part: dict[str, jax.Array], cfg: StepConfig) -> jax.Array:
    """Returns bool [rows, width]: which places of a group of pieces have tokens."""
    first = ring_offset(part, cfg) if group.kind == "ring" else jnp.int32(0)
    place_BT = jnp.arange(group.width, dtype=jnp.int32)[None]
    return (place_BT >= first) & (place_BT < first + part["count_B"][:, None])


def own_tokens(group: Group, cfg: StepConfig) -> int:
    """Returns how many tokens of a group this device has."""
    count = group.rows * group.width
    return count // cfg.axis("sequence").ways if group.kind == "ring" else count


def tokens_of(group: Group, part: dict[str, jax.Array], state: State, cfg: StepConfig) -> Tokens:
    """Returns this device's tokens of a row group."""
    if group.kind == "decode":
        return decode_tokens(group, part, state)
    return ring_tokens(group, part, cfg) if group.kind == "ring" else wide_tokens(group, part)


def layer_tokens(parts: list[Tokens]) -> LayerTokens:
    """Returns what layers need to know of the tokens of all row groups."""
    return LayerTokens(
        *(
            jnp.concatenate([getattr(tokens, name) for tokens in parts])
            for name in ("position_T", "length_T", "valid_T")
        )
    )


def part_of_rows(
    tokens: Tokens, part: jax.Array, count: int, rows: int, active: jax.Array
) -> Tokens:
    """Returns the tokens of one part of a group's rows; idle ones if it is not `active`."""

    def cut(array, size, axis=0):
        return jax.lax.dynamic_slice_in_dim(array, part * size, size, axis)

    table, start, number, *rest = tokens.rows_G
    return Tokens(
        token_T=cut(tokens.token_T, count),
        position_T=cut(tokens.position_T, count),
        cell_GT=cut(tokens.cell_GT, count, 1),
        valid_T=cut(tokens.valid_T, count) & active,
        length_T=cut(tokens.length_T, count),
        rows_G=Rows(
            cut(table, rows, 1),
            cut(start, rows, 1),
            jnp.where(active, cut(number, rows), 0),
            *(array if array is None else cut(array, rows) for array in rest),
        ),
        offset=tokens.offset,
    )

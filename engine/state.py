# SPDX-License-Identifier: Apache-2.0
"""What lives on the device between steps: the page pool, and one row of numbers a request.

Letters: R rows (the last is the null row, where padding writes), G page groups, E end ids a row,
F settings of a row.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from engine.batch import MAX_END_IDS
from engine.kv import KVLayout, Pool, empty_pool
from engine.logits import Tables, empty_tables
from engine.settings import SETTINGS


@flax.struct.dataclass
class State:
    """The device state, donated to every step.

    `token_R[r]` is the newest token of row r, whose KV is not stored yet, and `position_R[r]` its
    place in the sequence. `length_GR[g, r]` counts the cells in use, which is where that token's
    KV goes: equal to the position unless cells were dropped. `left_R` tokens may still be
    sampled; a finished row writes only to the null page.
    """

    pool: Pool
    token_R: jax.Array  # int32
    position_R: jax.Array  # int32
    length_GR: jax.Array  # int32
    left_R: jax.Array  # int32
    finished_R: jax.Array  # bool
    broken_R: jax.Array  # bool: a prompt token of this row had no finite hidden state
    end_ids_RE: jax.Array  # int32, -1 where unused
    settings_RF: jax.Array  # int32, as engine/settings.py has them
    tables: Tables
    loads_1LE: jax.Array | None  # int32: what tokens chose since the last look

    def settings(self, row_B: jax.Array) -> dict[str, jax.Array]:
        """Returns the settings of the rows by name, each [B] of its own dtype."""
        rows_BF = self.settings_RF[row_B]
        return {
            name: jax.lax.bitcast_convert_type(rows_BF[:, place], dtype)
            for place, (name, dtype) in enumerate(SETTINGS.items())
        }


def state_axes(layout: KVLayout, *, stacked: bool, counts: bool) -> Any:
    """Returns a State with the logical axes of each array in its place.

    `counts`: whether the tokens that choose each expert are.
    """
    pages = layout.pool_spec(1).axes
    rows: Any = ("rows",)
    by_row: Any = ("rows", None)
    by_id: Any = ("rows", "vocab")
    groups: Any = (None, "rows")
    words: Any = ("rows", None, None)
    return State(
        pool=("layers", *pages) if stacked else (pages,) * layout.places,
        token_R=rows,
        position_R=rows,
        length_GR=groups,
        left_R=rows,
        finished_R=rows,
        broken_R=rows,
        end_ids_RE=by_row,
        settings_RF=by_row,
        tables=Tables(
            bias_RV=by_id,
            tally_RV=by_id,
            bad_RML=words,
            recent_RL=by_row,
        ),
        loads_1LE=words if counts else None,
    )


def empty_state(
    layout: KVLayout,
    num_pages: int,
    rows: int,
    vocabulary: int,
    *,
    stacked: bool,
    counted: tuple[int, int] | None = None,
) -> State:
    """Returns one device's state of an idle engine with `rows` rows, the null row included.

    `counted`: layers and experts whose loads are counted.
    """
    zeros_R = jnp.zeros((rows,), jnp.int32)
    return State(
        pool=empty_pool(layout, num_pages, stacked=stacked),
        token_R=zeros_R,
        position_R=zeros_R,
        length_GR=jnp.zeros((len(layout.groups), rows), jnp.int32),
        left_R=zeros_R,
        finished_R=jnp.ones((rows,), bool),
        broken_R=jnp.zeros((rows,), bool),
        end_ids_RE=jnp.full((rows, MAX_END_IDS), -1, jnp.int32),
        settings_RF=jnp.zeros((rows, len(SETTINGS)), jnp.int32),
        tables=empty_tables(rows, vocabulary),
        loads_1LE=None if counted is None else jnp.zeros((1, *counted), jnp.int32),
    )

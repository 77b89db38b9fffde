# SPDX-License-Identifier: Apache-2.0
"""What lives on the device between steps: the page pool, and one row of numbers a request.

Letters: R rows (the last is the null row, where padding writes), G page groups, E end ids a row.
"""

import flax.struct
import jax
import jax.numpy as jnp

from engine.batch import MAX_END_IDS
from engine.kv import KVLayout, Pool, empty_pool


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
    end_ids_RE: jax.Array  # int32, -1 where unused
    temperature_R: jax.Array  # float32, 0 is greedy
    top_k_R: jax.Array  # int32, 0 is off
    top_p_R: jax.Array  # float32, 1 is off
    seed_R2: jax.Array  # uint32, the high and low words
    sample_R: jax.Array  # int32, which of a request's samples this row draws


def empty_state(layout: KVLayout, num_pages: int, rows: int, *, stacked: bool) -> State:
    """Returns the state of an idle engine with `rows` rows, the null row included."""
    zeros_R = jnp.zeros((rows,), jnp.int32)
    return State(
        pool=empty_pool(layout, num_pages, stacked=stacked),
        token_R=zeros_R,
        position_R=zeros_R,
        length_GR=jnp.zeros((len(layout.groups), rows), jnp.int32),
        left_R=zeros_R,
        finished_R=jnp.ones((rows,), bool),
        end_ids_RE=jnp.full((rows, MAX_END_IDS), -1, jnp.int32),
        temperature_R=jnp.zeros((rows,), jnp.float32),
        top_k_R=zeros_R,
        top_p_R=jnp.ones((rows,), jnp.float32),
        seed_R2=jnp.zeros((rows, 2), jnp.uint32),
        sample_R=zeros_R,
    )

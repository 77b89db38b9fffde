# SPDX-License-Identifier: Apache-2.0
"""Which tiles of rows meet which experts: the flat list that kernels work through."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """Visits of tiles of C rows, by expert; each has a row at least, but for idle ones at the end.

    expert_V: whose rows they are. start_V: the first row of the tile. begin_V, end_V: the rows of
    it that are the expert's; equal for an idle visit. total: how many are not idle. All int32.
    """

    expert_V: jax.Array
    start_V: jax.Array
    begin_V: jax.Array
    end_V: jax.Array
    total: jax.Array


def most_visits(rows: int, experts: int, tile: int) -> int:
    """Returns how many visits there can be, whatever the sizes."""
    return min(rows, -(-rows // tile) + experts - 1)


def visits_of(sizes_E: jax.Array, rows: int, tile: int, *, aligned: bool) -> Visits:
    """Returns the visits that `sizes_E` asks for, of tiles of `tile` rows.

    Aligned tiles start at multiples of `tile`, and one that several experts share is visited for
    each; others start where an expert's rows do, and nobody shares them. No visit reaches beyond
    `rows`, whatever the sizes' sum.
    """
    E = sizes_E.shape[0]
    end_E = jnp.minimum(jnp.cumsum(sizes_E, dtype=jnp.int32), rows)
    begin_E = jnp.concatenate([jnp.zeros(1, jnp.int32), end_E[:-1]])
    base_E = begin_E // tile * tile if aligned else begin_E
    tiles_E = jnp.where(end_E > begin_E, -(-(end_E - base_E) // tile), 0)
    last_E = jnp.cumsum(tiles_E)
    first_E = last_E - tiles_E
    index_V = jnp.arange(most_visits(rows, E, tile), dtype=jnp.int32)
    is_of_VE = (index_V[:, None] >= first_E[None]) & (index_V[:, None] < last_E[None])

    def of_visit(x_E):
        """Each visit's own: a sum, where TPUs would be slow to gather. 0 for idle ones."""
        return jnp.sum(jnp.where(is_of_VE, x_E[None], 0), axis=1, dtype=jnp.int32)

    is_real_V = index_V < last_E[-1]
    start_V = jnp.where(is_real_V, of_visit(base_E - first_E * tile) + index_V * tile, 0)
    begin_V = jnp.maximum(of_visit(begin_E), start_V)
    end_V = jnp.minimum(of_visit(end_E), start_V + tile)
    expert_V = of_visit(jnp.arange(E, dtype=jnp.int32))
    return Visits(expert_V, start_V, begin_V, end_V, last_E[-1])

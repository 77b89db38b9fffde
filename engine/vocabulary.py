# SPDX-License-Identifier: Apache-2.0
"""Questions to logits whose vocabulary is split over devices, none of which sees all of it.

Each device answers for its own ids, and what travels is a few numbers a row. Where the vocabulary
is whole the answers are those of NumPy.
Letters: B rows, V ids of one device, C candidates.
"""

import jax
import jax.numpy as jnp

from sharding import Axis


def ids(size: int, axis: Axis) -> jax.Array:
    """Returns int32 [size], the ids that this device's columns are of."""
    return jnp.arange(size, dtype=jnp.int32) + axis.here() * size


def own_places(id_X: jax.Array, size: int, axis: Axis) -> jax.Array:
    """Returns the columns of ids, `size` for those that are another device's: to be dropped."""
    place_X = id_X - axis.here() * size
    return jnp.where(place_X >= 0, place_X, size)


def take(values_BV: jax.Array, id_B: jax.Array, axis: Axis) -> jax.Array:
    """Returns each row's value at an id, which must be one of the vocabulary."""
    size = values_BV.shape[1]
    place_B = id_B - axis.here() * size
    own_B = (place_B >= 0) & (place_B < size)
    value_B = jnp.take_along_axis(values_BV, jnp.clip(place_B, 0, size - 1)[:, None], axis=1)[:, 0]
    return axis.sum(jnp.where(own_B, value_B, 0)) if axis.ways > 1 else value_B


def log_total(logits_BV: jax.Array, axis: Axis) -> jax.Array:
    """Returns the log of the sum of exponentials of each row."""
    if axis.ways == 1:
        return jax.scipy.special.logsumexp(logits_BV, axis=-1)
    top_B = axis.max(logits_BV.max(axis=-1))
    top_B = jnp.where(jnp.isfinite(top_B), top_B, 0.0)
    return top_B + jnp.log(axis.sum(jnp.exp(logits_BV - top_B[:, None]).sum(axis=-1)))


def columns(whole_V: jax.Array, size: int, axis: Axis) -> jax.Array:
    """Returns the part of a vector over the vocabulary that this device's ids have."""
    if axis.ways == 1:
        return whole_V
    return jax.lax.dynamic_slice_in_dim(whole_V, axis.here() * size, size)

# SPDX-License-Identifier: Apache-2.0
"""The grouped product in XLA's own operations: for every platform, and where no kernel can.

Codes become numbers before the product; on TPU those of all experts of the layer, elsewhere those
of the experts that are hit.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import Backend
from pallas_kernels.grouped_matmul.weights import Stack, dequantized

# A few rows are multiplied one by one, and more in tiles.
SINGLE_ROWS, TILE = 64, 16


def declines(x_SD: jax.Array, stack: Stack, backend: Backend) -> str | None:
    """Returns None: there is nothing that this cannot do."""
    return None


def multiply(x_SD: jax.Array, stack: Stack, sizes_E: jax.Array, backend: Backend) -> jax.Array:
    """Returns float32 y_SF. See `grouped_matmul`."""
    return jax.lax.platform_dependent(x_SD, stack, sizes_E, tpu=ragged_dot, default=matmul_of_tiles)


def ragged_dot(x_SD: jax.Array, stack: Stack, sizes_E: jax.Array) -> jax.Array:
    """Of the experts of all layers in a row, those of other layers have no rows."""
    L, E, D, F = stack.codes_LEDF.shape
    if stack.scales_LEGF is not None:
        codes_EDF, scales_EGF = stack.codes_LEDF[stack.layer], stack.scales_LEGF[stack.layer]
        weight, sizes = dequantized(codes_EDF, scales_EGF, x_SD.dtype), sizes_E
    else:
        weight = stack.codes_LEDF.reshape(L * E, D, F)
        sizes = jnp.zeros(L * E, sizes_E.dtype)
        sizes = jax.lax.dynamic_update_slice(sizes, sizes_E, (stack.layer * E,))
    return jax.lax.ragged_dot(x_SD, weight, sizes, preferred_element_type=jnp.float32)


def matmul_of_tiles(x_SD: jax.Array, stack: Stack, sizes_E: jax.Array) -> jax.Array:
    """A loop over tiles of one expert's rows, which reads no other expert.

    XLA's CPU backend multiplies every row with every expert for a ragged dot; that for GPUs has a
    matrix of its own for every row.
    """
    S, D = x_SD.shape
    F = stack.codes_LEDF.shape[-1]
    size = 1 if S <= SINGLE_ROWS else TILE
    x_SD = jnp.pad(x_SD, ((0, size - 1), (0, 0)))  # the last tile may reach over the end
    tiles_E = -(-sizes_E // size)
    last_E, end_E = jnp.cumsum(tiles_E), jnp.cumsum(sizes_E)

    def one(tile, y_SF):
        expert = jnp.searchsorted(last_E, tile, side="right").astype(jnp.int32)
        first = tile - last_E[expert] + tiles_E[expert]
        start = end_E[expert] - sizes_E[expert] + first * size
        matrix_DF = stack.codes_LEDF[stack.layer, expert]
        if stack.scales_LEGF is not None:
            scales_GF = stack.scales_LEGF[stack.layer, expert]
            matrix_DF = dequantized(matrix_DF, scales_GF, x_SD.dtype)
        y_CF = jnp.dot(
            jax.lax.dynamic_slice(x_SD, (start, jnp.int32(0)), (size, D)),
            matrix_DF,
            preferred_element_type=jnp.float32,
        )
        # Rows behind the expert's are of those that follow, which store them again, or nobody's.
        return jax.lax.dynamic_update_slice(y_SF, y_CF, (start, jnp.int32(0)))

    y_SF = jnp.zeros((S + size - 1, F), jnp.float32)
    return jax.lax.fori_loop(0, last_E[-1], one, y_SF)[:S]

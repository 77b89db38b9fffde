# SPDX-License-Identifier: Apache-2.0
"""The operation: what it takes, and which implementation does it."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import XLA, Backend, decline
from pallas_kernels.grouped_matmul import gpu, tpu, xla
from pallas_kernels.grouped_matmul.weights import CODES, Stack, Weight, stacked

IMPLEMENTATIONS = {"xla": xla, "tpu": tpu, "gpu": gpu}


def grouped_matmul(
    x_SD: jax.Array, weight: Weight, sizes_E: jax.Array, *, backend: Backend = XLA
) -> jax.Array:
    """Returns float32 y_SF: the first `sizes_E[0]` rows times the first matrix, and so on.

    `weight` is [E, D, F] of x's dtype, codes with their scales (`QuantizedExperts`), or either of
    many layers (`OfLayers`). What rows beyond the sizes' sum get is undefined, and what is in them
    reaches no other; a matrix without rows is not read by kernels. Sums are of float32. The sizes'
    sum is S at most. Raises ValueError for shapes and dtypes that do not go together.
    """
    stack = stacked(weight)
    check(x_SD, stack, sizes_E)
    (S, D), (_, E, _, F) = x_SD.shape, stack.codes_LEDF.shape
    if 0 in (S, D, E, F):
        return jnp.zeros((S, F), jnp.float32)
    implementation = IMPLEMENTATIONS[backend.kind]
    reason = implementation.declines(x_SD, stack, backend)
    if reason is not None:
        decline("grouped_matmul", reason)
        implementation = xla
    return implementation.multiply(x_SD, stack, sizes_E, backend)


def check(x_SD: jax.Array, stack: Stack, sizes_E: jax.Array) -> None:
    """Raises ValueError for what does not go together."""
    codes, scales = stack.codes_LEDF, stack.scales_LEGF
    if codes.ndim != 4 or x_SD.ndim != 2 or sizes_E.ndim != 1:
        found = f"x {x_SD.shape}, weight {codes.shape[1:]}, sizes {sizes_E.shape}"
        raise ValueError(f"{found}: give x [S, D], weight [E, D, F] and sizes [E]")
    _, E, D, F = codes.shape
    if x_SD.shape[1] != D:
        raise ValueError(f"x has {x_SD.shape[1]} numbers a row, the matrices have {D} inputs")
    if sizes_E.shape[0] != E or sizes_E.dtype != jnp.int32:
        found = f"sizes_E is {sizes_E.dtype} [{sizes_E.shape[0]}]"
        raise ValueError(f"{found}; give int32 [{E}], a size for each matrix")
    if scales is None:
        if codes.dtype != x_SD.dtype:
            found = f"x is {x_SD.dtype}, the matrices are {codes.dtype}"
            raise ValueError(f"{found}; give both in one dtype, or codes as QuantizedExperts")
        return
    if codes.dtype.name not in CODES:
        raise ValueError(f"codes are {codes.dtype}; give one of {', '.join(CODES)}")
    if scales.dtype != jnp.float32 or scales.ndim != 4:
        raise ValueError(f"scales are {scales.dtype} {scales.shape[1:]}; give float32 [E, G, F]")
    if scales.shape[:2] + scales.shape[3:] != codes.shape[:2] + (F,):
        raise ValueError(f"scales {scales.shape[1:]} for codes {codes.shape[1:]}: give [E, G, F]")
    if scales.shape[2] == 0 or D % scales.shape[2]:
        raise ValueError(f"{scales.shape[2]} scales for {D} inputs: give a divisor of {D}")

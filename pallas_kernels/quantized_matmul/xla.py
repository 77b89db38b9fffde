# SPDX-License-Identifier: Apache-2.0
"""The quantized product in XLA's own operations: for every platform, and where no kernel can.

A scale of an output multiplies its sums. Scales of groups multiply the codes, which makes a matrix
of the rows' dtype, unless rows are int8: then one group after the other is multiplied.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import Backend
from pallas_kernels.quantized_matmul.weights import (
    QuantizedWeight,
    centered,
    group_sums,
    quantize_rows,
)

# XLA's CPU backend expands a matrix of codes in memory before a product. Up to so many rows it is
# faster to multiply and to add, which reads the codes as they are.
CPU_FEW_ROWS = 8
BOTH_COLUMNS = (((1,), (1,)), ((), ()))


def declines(x_TD: jax.Array, weight: QuantizedWeight, activations: str, backend: Backend) -> None:
    """Returns None: there is nothing that this cannot do."""
    return None


def multiply(
    x_TD: jax.Array, weight: QuantizedWeight, activations: str, backend: Backend
) -> jax.Array:
    """Returns float32 y_TF. See `quantized_matmul`."""
    if activations == "int8":
        return int8_product(x_TD, weight)
    codes_FD, zeros_FG = centered(weight)
    if weight.groups > 1:
        matrix_FD = dequantized(codes_FD, weight.scales, zeros_FG).astype(x_TD.dtype)
        return product(x_TD, matrix_FD)
    y_TF = product(x_TD, codes_FD)
    if zeros_FG is not None:
        y_TF = y_TF - group_sums(x_TD, 1) * zeros_FG.T
    return y_TF * weight.scales.T


def dequantized(codes_FD: jax.Array, scales_FG: jax.Array, zeros_FG: jax.Array | None) -> jax.Array:
    """Returns the numbers, float32 [F, D]."""
    (F, D), G = codes_FD.shape, scales_FG.shape[1]
    numbers = codes_FD.astype(jnp.float32).reshape(F, G, D // G)
    if zeros_FG is not None:
        numbers = numbers - zeros_FG[:, :, None]
    return (numbers * scales_FG[:, :, None]).reshape(F, D)


def product(x_TD: jax.Array, matrix_FD: jax.Array) -> jax.Array:
    """Returns float32 y_TF; the matrix may be codes."""

    def as_dot(x_TD, matrix_FD):
        precision = jax.lax.Precision.HIGHEST if x_TD.dtype == jnp.float32 else None
        return jax.lax.dot_general(
            x_TD,
            matrix_FD.astype(x_TD.dtype),
            BOTH_COLUMNS,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def as_sums(x_TD, matrix_FD):
        each = matrix_FD.astype(jnp.float32)[None] * x_TD.astype(jnp.float32)[:, None]
        return each.sum(axis=2)

    T = x_TD.shape[0]
    if T > CPU_FEW_ROWS:
        return as_dot(x_TD, matrix_FD)

    def on_cpu(x_TD, matrix_FD):
        return as_sums(two_rows_at_least(x_TD), matrix_FD)[:T]

    return jax.lax.platform_dependent(x_TD, matrix_FD, cpu=on_cpu, default=as_dot)


def two_rows_at_least(x_TD: jax.Array) -> jax.Array:
    """Returns the rows, and zeros below one: XLA's CPU backend is many times slower with one."""
    return jnp.pad(x_TD, ((0, 1 if x_TD.shape[0] == 1 else 0), (0, 0)))


def int8_product(x_TD: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Returns float32 y_TF of rows as int8."""
    T, F, G, group = x_TD.shape[0], weight.codes.shape[0], weight.groups, weight.group
    x_TD = two_rows_at_least(x_TD)
    rows_TD, scale_T1 = quantize_rows(x_TD)
    codes_FD, zeros_FG = centered(weight)
    sums_TG = group_sums(rows_TD, G)

    def add(g, y_TF):
        def part(array, width):
            return jax.lax.dynamic_slice_in_dim(array, g * width, width, axis=1)

        got_TF = jax.lax.dot_general(
            part(rows_TD, group),
            part(codes_FD, group),
            BOTH_COLUMNS,
            preferred_element_type=jnp.int32,
        ).astype(jnp.float32)
        if zeros_FG is not None:
            got_TF = got_TF - part(sums_TG, 1) * part(zeros_FG, 1).T
        return y_TF + got_TF * part(weight.scales, 1).T

    y_TF = jnp.zeros((x_TD.shape[0], F), jnp.float32)
    y_TF = add(0, y_TF) if G == 1 else jax.lax.fori_loop(0, G, add, y_TF)
    return (y_TF * scale_T1)[:T]

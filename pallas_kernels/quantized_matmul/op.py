# SPDX-License-Identifier: Apache-2.0
"""The operation: what it takes, and which implementation does it."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import XLA, Backend, decline
from pallas_kernels.quantized_matmul import gpu, tpu, xla
from pallas_kernels.quantized_matmul.weights import CODES, QuantizedWeight

IMPLEMENTATIONS = {"xla": xla, "tpu": tpu, "gpu": gpu}
ACTIVATIONS = ("plain", "int8")


def quantized_matmul(
    x_TD: jax.Array,
    weight: QuantizedWeight,
    *,
    backend: Backend = XLA,
    activations: str = "plain",
) -> jax.Array:
    """Returns float32 y_TF: the rows times the matrix, which is [F, D].

    Activations "int8": each row is rounded to 127 steps of its largest number in either direction,
    and integers are multiplied; codes must be integers too. Sums are of float32, or of int32 within
    a group. A row's numbers reach no other row, an output's codes no other output. Raises
    ValueError for shapes and dtypes that do not go together.
    """
    check(x_TD, weight, activations)
    (T, D), F = x_TD.shape, weight.codes.shape[0]
    if 0 in (T, D, F):
        return jnp.zeros((T, F), jnp.float32)
    implementation = IMPLEMENTATIONS[backend.kind]
    reason = implementation.declines(x_TD, weight, activations, backend)
    if reason is not None:
        decline("quantized_matmul", reason)
        implementation = xla
    return implementation.multiply(x_TD, weight, activations, backend)


def check(x_TD: jax.Array, weight: QuantizedWeight, activations: str) -> None:
    """Raises ValueError for what does not go together."""
    codes, scales, zeros = weight
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations={activations!r}; give one of {', '.join(ACTIVATIONS)}")
    if x_TD.ndim != 2 or codes.ndim != 2 or scales.ndim != 2:
        found = f"x {x_TD.shape}, codes {codes.shape}, scales {scales.shape}"
        raise ValueError(f"{found}: give x [T, D], codes [F, D] and scales [F, G]")
    if not jnp.issubdtype(x_TD.dtype, jnp.floating):
        raise ValueError(f"x is {x_TD.dtype}; give float32, bfloat16 or float16")
    if codes.dtype.name not in CODES:
        raise ValueError(f"codes are {codes.dtype}; give one of {', '.join(CODES)}")
    if activations == "int8" and codes.dtype == jnp.float8_e4m3fn:
        raise ValueError(f'codes are {codes.dtype}, which int8 rows cannot meet; give "plain"')
    if x_TD.shape[1] != weight.inputs:
        found = f"x has {x_TD.shape[1]} numbers a row, the matrix has {weight.inputs} inputs"
        raise ValueError(f"{found}; give rows as wide as the matrix, packed in 2 codes or not")
    if scales.dtype != jnp.float32 or scales.shape[0] != codes.shape[0]:
        found = f"scales are {scales.dtype} {scales.shape}"
        raise ValueError(f"{found}; give float32 [{codes.shape[0]}, G], some for each output")
    if weight.groups == 0 or weight.inputs % weight.groups:
        found = f"{weight.groups} scales for {weight.inputs} inputs"
        raise ValueError(f"{found}: give a divisor of {weight.inputs}")
    if zeros is not None and (zeros.dtype != jnp.float32 or zeros.shape != scales.shape):
        found = f"zeros are {zeros.dtype} {zeros.shape}"
        raise ValueError(f"{found}; give float32 {scales.shape}, as many as scales, or None")

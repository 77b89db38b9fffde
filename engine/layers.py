# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoder layer, as pure functions.

Letters: T tokens, D width, F FFN width, N query heads, K KV heads, H head width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from sharding import ALONE, Axis

Params = dict[str, jax.Array]


# XLA's CPU backend multiplies few rows fastest with features major: measured in WORKSPACE.md.
CPU_FEATURE_MAJOR_ROWS = range(2, 65)


def matmul(x_TD: jax.Array, weight_FD: jax.Array) -> jax.Array:
    """Returns float32 y_TF = x @ weight^T in the order that the platform does best.

    D and F are any widths. Weights stay as checkpoints have them, [out, in].
    """
    return jax.lax.platform_dependent(x_TD, weight_FD, cpu=_cpu_matmul, default=_contract_last)


def _contract_last(x_TD: jax.Array, weight_FD: jax.Array) -> jax.Array:
    axes = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x_TD, weight_FD, axes, preferred_element_type=jnp.float32)


def _cpu_matmul(x_TD: jax.Array, weight_FD: jax.Array) -> jax.Array:
    T = x_TD.shape[0]
    if T == 1 and x_TD.dtype != jnp.float32:
        # A narrow matrix would be expanded for a single row; two rows take the fast path.
        return _cpu_matmul(jnp.concatenate([x_TD, x_TD]), weight_FD)[:1]
    if T not in CPU_FEATURE_MAJOR_ROWS:
        return _contract_last(x_TD, weight_FD)
    # The barriers keep XLA from folding the transposes back into the slow order.
    x_DT = jax.lax.optimization_barrier(x_TD.T)
    axes = (((1,), (0,)), ((), ()))
    y_FT = jax.lax.dot_general(weight_FD, x_DT, axes, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y_FT).T


def linear(
    x_TD: jax.Array,
    weight_FD: jax.Array,
    bias_F: jax.Array | None = None,
    over: Axis = ALONE,
) -> jax.Array:
    """Returns y_TF = x @ weight^T + bias, accumulated in float32, in x's dtype.

    `over`: the mesh axis over which x and the weights' columns are split; it is summed.
    """
    y_TF = matmul(x_TD, weight_FD)
    if over.ways > 1:  # what travels is in x's dtype
        y_TF = over.sum(y_TF.astype(x_TD.dtype)).astype(jnp.float32)
    if bias_F is not None:
        y_TF = y_TF + bias_F.astype(jnp.float32)[None]
    return y_TF.astype(x_TD.dtype)


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, over: Axis = ALONE, count: int | None = None
) -> jax.Array:
    """Returns x / rms(x) * weight over the last axis, computed in float32, in x's dtype.

    `over`: the mesh axis over which the last axis is split. `count`: how many of its numbers, on
    all devices, are meant; the others are zeros. None: all.
    """
    y = x.astype(jnp.float32)
    mean = over.sum(jnp.sum(y * y, axis=-1, keepdims=True)) / (count or x.shape[-1] * over.ways)
    y = y * jax.lax.rsqrt(mean + eps)
    return (y * weight.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


def rotate(x_TNH: jax.Array, cos_TX: jax.Array, sin_TX: jax.Array) -> jax.Array:
    """Returns x with the first 2X coordinates of each head rotated by the angles, by halves.

    RoPE, arXiv 2104.09864; where 2X is less than the head, the rest stays.
    """
    X = cos_TX.shape[-1]
    cos, sin = cos_TX[:, None, :], sin_TX[:, None, :]
    first, second = x_TNH[..., :X].astype(jnp.float32), x_TNH[..., X : 2 * X].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x_TNH.dtype)
    if 2 * X == x_TNH.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_TNH[..., 2 * X :]], axis=-1)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def gated_mlp(x_TD: jax.Array, p: Params, activation: str, over: Axis = ALONE) -> jax.Array:
    """Returns down(activation(gate(x)) * up(x)), summed over the axis that splits its units."""
    gate_TF = linear(x_TD, p["gate"], p.get("gate_bias"))
    up_TF = linear(x_TD, p["up"], p.get("up_bias"))
    return linear(ACTIVATIONS[activation](gate_TF) * up_TF, p["down"], p.get("down_bias"), over)

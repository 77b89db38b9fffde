# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoder layer, as pure functions.

Letters: T tokens, D width, F FFN width, N query heads, K KV heads, H head width, V vocabulary.
"""

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


def linear(x_TD: jax.Array, weight_FD: jax.Array, bias_F: jax.Array | None = None) -> jax.Array:
    """Returns y_TF = x @ weight^T + bias, accumulated in float32, in x's dtype; D, F: any widths.

    Contracting the last axis of both is the order XLA does well on CPU, and that of checkpoints.
    """
    axes = (((1,), (1,)), ((), ()))
    y_TF = jax.lax.dot_general(x_TD, weight_FD, axes, preferred_element_type=jnp.float32)
    if bias_F is not None:
        y_TF = y_TF + bias_F.astype(jnp.float32)[None]
    return y_TF.astype(x_TD.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x) * weight over the last axis, computed in float32, in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


def rotate(x_TNH: jax.Array, cos_TX: jax.Array, sin_TX: jax.Array) -> jax.Array:
    """Returns x with the halves of each head rotated by the angles (RoPE, arXiv 2104.09864)."""
    X = cos_TX.shape[-1]
    cos, sin = cos_TX[:, None, :], sin_TX[:, None, :]
    first, second = x_TNH[..., :X].astype(jnp.float32), x_TNH[..., X:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_TNH.dtype)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def gated_mlp(x_TD: jax.Array, p: Params, activation: str) -> jax.Array:
    """Returns down(activation(gate(x)) * up(x))."""
    gate_TF = linear(x_TD, p["gate"], p.get("gate_bias"))
    up_TF = linear(x_TD, p["up"], p.get("up_bias"))
    return linear(ACTIVATIONS[activation](gate_TF) * up_TF, p["down"], p.get("down_bias"))

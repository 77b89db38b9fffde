# SPDX-License-Identifier: Apache-2.0
"""The one decoder-only transformer, as pure functions over a tree of parameters.

Parameters: {"embedding", "final_norm", ["head"], "segments": (segment, ...)}; a segment is a
tuple of one dict a layer (unrolled: fast on CPU) or one dict of stacked arrays (scanned: small
and quick to compile on TPU and GPU).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from engine.layers import Params, gated_mlp, linear, matmul, rms_norm, rotate
from engine.models.config import ModelConfig
from engine.models.rope import rope_tables
from pallas_kernels.paged_attention import NO_WINDOW


class LayerData(NamedTuple):
    """What differs by layer beside the weights: integers, or arrays of them in a scan."""

    window: Any
    rope: Any
    group: Any
    place: Any


# (cache, layer, q_TNH, k_TKH, v_TKH) -> (cache, out_TNH): how a layer meets the other tokens.
Attend = Callable[[Any, LayerData, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]


def layer_data(config: ModelConfig, groups: Any = None, places: Any = None) -> LayerData:
    """Returns the data of all layers, each field int32 [L]; no groups means no pages."""
    zeros = (0,) * config.num_layers
    windows = [NO_WINDOW if window is None else window for window in config.windows]
    rows = (windows, config.rope_of_layer, groups or zeros, places or zeros)
    return LayerData(*(np.array(row, np.int32) for row in rows))


def segment_data(data: LayerData, run: range) -> LayerData:
    """Returns the data of the layers of one segment."""
    return LayerData(*(field[run.start : run.stop] for field in data))


def map_layers(function, carry, segment: Any, data: LayerData):
    """Returns the carry after `function(carry, params, data)` for each layer of a segment."""
    if isinstance(segment, tuple):
        for index, params in enumerate(segment):
            carry = function(carry, params, LayerData(*(int(field[index]) for field in data)))
        return carry

    def body(carry, layer):
        return function(carry, *layer), None

    stacked = (segment, LayerData(*(jnp.asarray(field) for field in data)))
    return jax.lax.scan(body, carry, stacked)[0]


def embed(params: Params, config: ModelConfig, token_T: jax.Array, dtype) -> jax.Array:
    """Returns x_TD, the scaled embeddings of the tokens."""
    x_TD = params["embedding"].at[token_T].get(mode="clip").astype(dtype)
    if config.embedding_scale == 1.0:
        return x_TD
    return x_TD * jnp.asarray(config.embedding_scale, dtype)


def queries_keys_values(h_TD: jax.Array, p: Params, config: ModelConfig):
    """Returns (q_TNH, k_TKH, v_TKH), from one fused matrix or from three."""
    T, N, K = h_TD.shape[0], config.query_heads, config.kv_heads
    if "qkv" in p:
        joined = linear(h_TD, p["qkv"], p.get("qkv_bias")).reshape(T, N + 2 * K, config.head_width)
        return joined[:, :N], joined[:, N : N + K], joined[:, N + K :]
    return tuple(
        linear(h_TD, p[name], p.get(f"{name}_bias")).reshape(T, heads, config.head_width)
        for name, heads in (("q", N), ("k", K), ("v", K))
    )


def norm_heads(x_TNH: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the heads normed, each by itself or all together."""
    if config.qk_norm == "head":
        return rms_norm(x_TNH, weight, config.norm_eps)
    flat_TX = x_TNH.reshape(x_TNH.shape[0], -1)
    return rms_norm(flat_TX, weight, config.norm_eps).reshape(x_TNH.shape)


# The two halves of a layer are programs within the program: unrolled layers share one trace.
@partial(jax.jit, static_argnames="config")
def before_attention(x_TD: jax.Array, p: Params, config: ModelConfig, cos_TX, sin_TX):
    """Returns (q_TNH, k_TKH, v_TKH), normed, projected and rotated."""
    h_TD = rms_norm(x_TD, p["attention_norm"], config.norm_eps) if config.pre_norms else x_TD
    q_TNH, k_TKH, v_TKH = queries_keys_values(h_TD, p, config)
    if config.qk_norm:
        q_TNH = norm_heads(q_TNH, p["q_norm"], config)
        k_TKH = norm_heads(k_TKH, p["k_norm"], config)
    return rotate(q_TNH, cos_TX, sin_TX), rotate(k_TKH, cos_TX, sin_TX), v_TKH


@partial(jax.jit, static_argnames="config")
def after_attention(x_TD: jax.Array, out_TNH: jax.Array, p: Params, config: ModelConfig):
    """Returns x_TD with attention's output and the MLP's added."""
    h_TD = linear(out_TNH.reshape(x_TD.shape[0], -1), p["o"], p.get("o_bias"))
    if config.post_norms:
        h_TD = rms_norm(h_TD, p["post_attention_norm"], config.norm_eps)
    x_TD = x_TD + h_TD
    h_TD = rms_norm(x_TD, p["mlp_norm"], config.norm_eps) if config.pre_norms else x_TD
    h_TD = gated_mlp(h_TD, p, config.activation)
    if config.post_norms:
        h_TD = rms_norm(h_TD, p["post_mlp_norm"], config.norm_eps)
    return x_TD + h_TD


def decoder_layer(x_TD, p: Params, layer: LayerData, config: ModelConfig, ropes, attend, cache):
    """Returns (x_TD, cache) after one layer."""
    cos_TX, sin_TX = ropes[0][layer.rope], ropes[1][layer.rope]
    heads = before_attention(x_TD, p, config, cos_TX, sin_TX)
    cache, out_TNH = attend(cache, layer, *heads)
    return after_attention(x_TD, out_TNH, p, config), cache


def run_layers(
    params: Params,
    config: ModelConfig,
    x_TD: jax.Array,
    position_T: jax.Array,
    *,
    length_T: jax.Array,
    attend: Attend,
    cache: Any,
    data: LayerData,
) -> tuple[jax.Array, Any]:
    """Returns (x_TD, cache) after all layers, before the final norm.

    `length_T` has the final length of each token's sequence, by which some ropes choose.
    """
    ropes = rope_tables(config.ropes, config.rope_width, position_T, length_T)

    def one(carry, p, layer):
        return decoder_layer(carry[0], p, layer, config, ropes, attend, carry[1])

    carry = (x_TD, cache)
    for run, segment in zip(config.segments(), params["segments"], strict=True):
        carry = map_layers(one, carry, segment, segment_data(data, run))
    return carry


def final_norm(params: Params, config: ModelConfig, x_TD: jax.Array) -> jax.Array:
    """Returns the final hidden rows that the head reads."""
    return rms_norm(x_TD, params["final_norm"], config.norm_eps)


def head_parameters(params: Params, config: ModelConfig) -> Params:
    """Returns the one parameter that `head_logits` reads: a call with fewer leaves is cheaper."""
    name = "embedding" if config.tied_embeddings else "head"
    return {name: params[name]}


def head_logits(params: Params, config: ModelConfig, hidden_TD: jax.Array) -> jax.Array:
    """Returns float32 logits_TV of final hidden rows."""
    weight = params["embedding" if config.tied_embeddings else "head"]
    logits_TV = matmul(hidden_TD, weight)
    if config.logit_softcap is not None:
        logits_TV = config.logit_softcap * jnp.tanh(logits_TV / config.logit_softcap)
    return logits_TV

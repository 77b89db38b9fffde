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

from engine.experts import EXPERT_MATRICES, expert_mlp
from engine.layers import Params, gated_mlp, linear, matmul, rms_norm, rotate
from engine.models.config import Latent, ModelConfig
from engine.models.rope import rope_tables
from engine.vocabulary import own_places
from pallas_kernels.grouped_matmul import OfLayers
from pallas_kernels.paged_attention import NO_WINDOW


class LayerData(NamedTuple):
    """What differs by layer beside the weights: integers, or arrays of them in a scan."""

    window: Any
    rope: Any
    group: Any
    place: Any
    number: Any  # of the layer in the model


class Heads(NamedTuple):
    """What a layer's attention takes. Of latent attention with absorbed weights, v is None: a
    token has one key for all heads, whose first numbers are its value.
    """

    q_TNH: jax.Array
    k_TKH: jax.Array
    v_TKY: jax.Array | None
    sinks_N: jax.Array | None = None


class Tokens(NamedTuple):
    """The tokens that run through the layers."""

    position_T: jax.Array
    length_T: jax.Array  # the final length of each one's sequence, by which some ropes choose
    valid_T: jax.Array  # bool; padding is sent to no expert


# (cache, layer, heads) -> (cache, out_TNY): how a layer meets the other tokens.
Attend = Callable[[Any, LayerData, Heads], tuple[Any, jax.Array]]


def layer_data(config: ModelConfig, groups: Any = None, places: Any = None) -> LayerData:
    """Returns the data of all layers, each field int32 [L]; no groups means no pages."""
    zeros = (0,) * config.num_layers
    windows = [NO_WINDOW if window is None else window for window in config.windows]
    numbers = range(config.num_layers)
    rows = (windows, config.rope_of_layer, groups or zeros, places or zeros, numbers)
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

    whole = {name: segment[name] for name in EXPERT_MATRICES if name in segment}
    sliced = {name: array for name, array in segment.items() if name not in whole}

    def body(carry, layer):
        params, data, index = layer
        experts = {name: OfLayers(array, index) for name, array in whole.items()}
        return function(carry, params | experts, data), None

    places = jnp.arange(len(data.group), dtype=jnp.int32)
    stacked = (sliced, LayerData(*(jnp.asarray(field) for field in data)), places)
    return jax.lax.scan(body, carry, stacked)[0]


def embed(params: Params, config: ModelConfig, token_T: jax.Array, dtype) -> jax.Array:
    """Returns x_TD, the scaled embeddings of the tokens."""
    table_VD, tensor = params["embedding"], config.tensor
    if tensor.ways == 1:
        x_TD = table_VD.at[token_T].get(mode="clip").astype(dtype)
    else:  # each device looks up its own ids
        place_T = own_places(token_T, table_VD.shape[0], tensor)
        x_TD = tensor.sum(table_VD.at[place_T].get(mode="fill", fill_value=0).astype(dtype))
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


def norm_heads(
    x_TNH: jax.Array, weight: jax.Array, config: ModelConfig, heads: int | None = None
) -> jax.Array:
    """Returns the heads normed, each by itself or all together.

    `heads`: how many there are on all devices without those that fill up; None: none fill up.
    """
    if config.qk_norm == "head":
        return rms_norm(x_TNH, weight, config.norm_eps)
    flat_TX = x_TNH.reshape(x_TNH.shape[0], -1)
    count = None if heads is None else heads * config.head_width
    normed = rms_norm(flat_TX, weight, config.norm_eps, config.tensor, count)
    return normed.reshape(x_TNH.shape)


# The two halves of a layer are programs within the program: unrolled layers share one trace.
@partial(jax.jit, static_argnames=("config", "expand"))
def before_attention(
    x_TD: jax.Array, p: Params, config: ModelConfig, cos_TX, sin_TX, expand: bool
) -> Heads:
    """Returns what attention takes: normed, projected and rotated.

    With `expand`, latent attention has keys and values of every head, as if it were none.
    """
    h_TD = rms_norm(x_TD, p["attention_norm"], config.norm_eps) if config.pre_norms else x_TD
    if config.latent is not None:
        return latent_heads(h_TD, p, config, config.latent, cos_TX, sin_TX, expand)
    q_TNH, k_TKH, v_TKH = queries_keys_values(h_TD, p, config)
    if config.qk_norm:
        q_TNH = norm_heads(q_TNH, p["q_norm"], config, config.real_query_heads)
        k_TKH = norm_heads(k_TKH, p["k_norm"], config)
    q_TNH, k_TKH = rotate(q_TNH, cos_TX, sin_TX), rotate(k_TKH, cos_TX, sin_TX)
    return Heads(q_TNH, k_TKH, v_TKH, p.get("sinks"))


def latent_heads(
    h_TD: jax.Array, p: Params, config: ModelConfig, latent: Latent, cos_TX, sin_TX, expand: bool
) -> Heads:
    """Returns the heads of latent attention, expanded or with their weights absorbed.

    Absorbed, a query is brought to the latent by the keys' weights: q . (U c) = (U^T q) . c.
    """
    T, N, R, P = h_TD.shape[0], config.query_heads, latent.rank, latent.plain_width
    if latent.query_rank is None:
        query = linear(h_TD, p["q"])
    else:
        query = rms_norm(linear(h_TD, p["q_down"]), p["q_norm"], latent.norm_eps)
        query = linear(query, p["q_up"])
    query = query.reshape(T, N, P + latent.rope_width)
    down = linear(h_TD, p["kv_down"])
    c_TR = rms_norm(down[:, :R], p["kv_norm"], latent.norm_eps)
    q_rope = rotate(query[..., P:], cos_TX, sin_TX)
    k_rope = rotate(down[:, None, R:], cos_TX, sin_TX)
    if expand:
        key = einsum("tr,npr->tnp", c_TR, p["k_up"])
        value = einsum("tr,nvr->tnv", c_TR, p["v_up"])
        k_rope = jnp.broadcast_to(k_rope, (T, N, latent.rope_width))
        query = jnp.concatenate([query[..., :P], q_rope], axis=-1)
        return Heads(query, jnp.concatenate([key, k_rope], axis=-1), value)
    query = einsum("tnp,npr->tnr", query[..., :P], p["k_up"])
    cell = jnp.concatenate([c_TR[:, None], k_rope], axis=-1)
    return Heads(jnp.concatenate([query, q_rope], axis=-1), cell, None)


def einsum(formula: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns a product accumulated in float32, in x's dtype."""
    return jnp.einsum(formula, x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


@partial(jax.jit, static_argnames=("config", "expand"))
def after_attention(
    x_TD: jax.Array, out_TNY: jax.Array, valid_T: jax.Array, p: Params, config: ModelConfig, expand
) -> tuple[jax.Array, jax.Array | None]:
    """Returns x_TD with attention's output and the feed-forward's added.

    And, where experts are counted, how many tokens chose each.
    """
    if config.latent is not None and not expand:
        out = einsum("tnr,nvr->tnv", out_TNY, p["v_up"])
    else:
        out = out_TNY
    h_TD = linear(out.reshape(x_TD.shape[0], -1), p["o"], p.get("o_bias"), config.tensor)
    if config.post_norms:
        h_TD = rms_norm(h_TD, p["post_attention_norm"], config.norm_eps)
    x_TD = x_TD + h_TD
    h_TD = rms_norm(x_TD, p["mlp_norm"], config.norm_eps) if config.pre_norms else x_TD
    count_E = None
    if config.experts is not None and "router" in p:
        h_TD, count_E = expert_mlp(h_TD, valid_T, p, config.experts, config.tensor, config.expert)
    else:
        h_TD = gated_mlp(h_TD, p, config.activation, config.tensor)
    if config.post_norms:
        h_TD = rms_norm(h_TD, p["post_mlp_norm"], config.norm_eps)
    return x_TD + h_TD, count_E


def decoder_layer(
    x_TD, p: Params, layer: LayerData, config: ModelConfig, ropes, valid_T, attend, cache, expand
):
    """Returns (x_TD, cache, tokens by expert or None) after one layer."""
    cos_TX, sin_TX = ropes[0][layer.rope], ropes[1][layer.rope]
    heads = before_attention(x_TD, p, config, cos_TX, sin_TX, expand)
    cache, out_TNY = attend(cache, layer, heads)
    x_TD, count_E = after_attention(x_TD, out_TNY, valid_T, p, config, expand)
    return x_TD, cache, count_E


def layer_function(config: ModelConfig, tokens: Tokens, attend: Attend):
    """Returns what a layer does: ((x_TD, cache), parameters, LayerData) -> (x_TD, cache).

    Where experts are counted the cache is (cache, load_LE), what tokens chose being added.
    """
    if config.experts is not None and config.experts.counts:
        return counting(config, tokens, attend)
    ropes = rope_tables(config.ropes, config.rope_width, tokens.position_T, tokens.length_T)

    def one(carry, p, layer):
        x_TD, cache = carry
        x_TD, cache, _ = decoder_layer(
            x_TD, p, layer, config, ropes, tokens.valid_T, attend, cache, expand=False
        )
        return x_TD, cache

    return one


def counting(config: ModelConfig, tokens: Tokens, attend: Attend):
    """Returns `layer_function` where experts are counted."""
    ropes = rope_tables(config.ropes, config.rope_width, tokens.position_T, tokens.length_T)

    def one(carry, p, layer):
        x_TD, (cache, load_LE) = carry
        x_TD, cache, count_E = decoder_layer(
            x_TD, p, layer, config, ropes, tokens.valid_T, attend, cache, expand=False
        )
        if count_E is not None:
            load_LE = load_LE.at[layer.number].add(count_E)
        return x_TD, (cache, load_LE)

    return one


def run_layers(
    params: Params,
    config: ModelConfig,
    x_TD: jax.Array,
    tokens: Tokens,
    *,
    attend: Attend,
    cache: Any,
    data: LayerData,
) -> tuple[jax.Array, Any]:
    """Returns (x_TD, cache) after all layers, before the final norm."""
    one = layer_function(config, tokens, attend)
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
    """Returns float32 logits_TV of final hidden rows, of this device's ids."""
    weight = params["embedding" if config.tied_embeddings else "head"]
    logits_TV = matmul(hidden_TD, weight)
    if config.logit_softcap is not None:
        logits_TV = config.logit_softcap * jnp.tanh(logits_TV / config.logit_softcap)
    return logits_TV

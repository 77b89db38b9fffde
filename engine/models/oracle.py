# SPDX-License-Identifier: Apache-2.0
"""A plain forward pass over a whole sequence: no cache, no pages, no batch.

The oracle that the paged engine is held to, and what `llm.forward` runs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from engine.layers import Params
from engine.models.config import ModelConfig
from engine.models.decoder import (
    decoder_layer,
    embed,
    final_norm,
    head_logits,
    layer_data,
    map_layers,
    segment_data,
)
from engine.models.rope import rope_tables
from engine.models.stages import stacked_layers


def dense_attend(config: ModelConfig, mask_TT: jax.Array | None):
    """Returns an `Attend` over all tokens at once; `mask_TT` replaces the causal mask if given."""

    def attend(cache, layer, heads):
        q_TNH, k_TKH, v_TKY, sinks_N = heads
        T, N, H = q_TNH.shape
        K = k_TKH.shape[1]
        q_TKGH = q_TNH.reshape(T, K, N // K, H)
        logits = jnp.einsum("tkgh,skh->kgts", q_TKGH, k_TKH, preferred_element_type=jnp.float32)
        logits = logits * config.attention_scale
        if config.attention_softcap is not None:
            logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
        index_T = jnp.arange(T, dtype=jnp.int32)
        distance_TT = index_T[:, None] - index_T[None, :]
        seen_TT = (distance_TT >= 0) if mask_TT is None else mask_TT
        seen_TT = seen_TT & (distance_TT < layer.window)
        logits = jnp.where(seen_TT[None, None], logits, -jnp.inf)
        if sinks_N is not None:  # one more logit a query, whose weight is thrown away
            sinks = jnp.broadcast_to(sinks_N.reshape(K, N // K, 1, 1), (K, N // K, T, 1))
            logits = jnp.concatenate([logits, sinks.astype(jnp.float32)], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1)[..., :T]
        out_TKGX = jnp.einsum("kgts,skx->tkgx", weights.astype(v_TKY.dtype), v_TKY)
        return cache, out_TKGX.reshape(T, N, -1)

    return attend


def forward(
    params: Params,
    config: ModelConfig,
    token_T: jax.Array,
    position_T: jax.Array | None = None,
    mask_TT: jax.Array | None = None,
    length: jax.Array | int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (logits_TV float32, hidden [L + 1, T, D]).

    hidden[0] is the embeddings and hidden[l] layer l's output, before the final norm. Positions
    default to 0 .. T-1; `mask_TT` (row: query) replaces the causal mask, windows still hold.
    `length` is how many tokens the sequence has, T if not given: padding may follow them.
    """
    T = token_T.shape[0]
    if position_T is None:
        position_T = jnp.arange(T, dtype=jnp.int32)
    dtype = params["embedding"].dtype
    x_TD = embed(params, config, token_T, dtype)
    length_T = jnp.full_like(position_T, T if length is None else length)
    valid_T = jnp.arange(T, dtype=jnp.int32) < length_T
    ropes = rope_tables(config.ropes, config.rope_width, position_T, length_T)
    attend = dense_attend(config, mask_TT)
    hidden_LTD = jnp.zeros((config.num_layers + 1, *x_TD.shape), dtype).at[0].set(x_TD)

    def one(carry, p, layer):
        x_TD, hidden_LTD, index = carry
        x_TD, _, _ = decoder_layer(
            x_TD, p, layer, config, ropes, valid_T, attend, None, expand=True
        )
        return x_TD, hidden_LTD.at[index].set(x_TD), index + 1

    carry = (x_TD, hidden_LTD, jnp.int32(1))
    data = layer_data(config)
    stacks = stacked_layers(config, config.stages)
    for run, segment, stack in zip(config.segments(), params["segments"], stacks, strict=True):
        if config.stages > 1:  # without the places of no layer
            real = [place for place, layer in enumerate(stack) if layer is not None]
            segment = {name: array[np.array(real)] for name, array in segment.items()}
        carry = map_layers(one, carry, segment, segment_data(data, run))
    x_TD, hidden_LTD, _ = carry
    return head_logits(params, config, final_norm(params, config, x_TD)), hidden_LTD


forward_jit = jax.jit(forward, static_argnames="config")

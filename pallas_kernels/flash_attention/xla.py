# SPDX-License-Identifier: Apache-2.0
"""Attention over a run of cells in plain XLA: blocks of queries meet the blocks that they see.

FlashAttention-2, arXiv 2307.08691: a loop over keys within one over queries, an online softmax.

Letters: T queries, S cells, N query heads, K KV heads, H width of queries and keys, C width of a
cell, X queries of a KV head in a block, W tokens of a block, R blocks of queries, Q of keys.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import Backend
from pallas_kernels.paged_attention.rows import Call
from pallas_kernels.paged_attention.xla import (
    Parts,
    accumulate,
    by_kv_head,
    lse_of,
    no_parts,
    output_of,
)

BLOCK = 64
NOWHERE = 1 << 30  # the place of a key that nobody sees: after all


def declines(q_TNH: jax.Array, cell_SKC: jax.Array, call: Call, backend: Backend) -> str | None:
    """Returns None: it takes all."""
    return None


def attend(
    q_TNH: jax.Array,
    cell_SKC: jax.Array,
    place_T: jax.Array,
    place_S: jax.Array,
    window: jax.Array | int,
    first: jax.Array,
    call: Call,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_TNV, lse_TN) float32, as `flash_attention` has them, without sinks."""
    T, K = q_TNH.shape[0], cell_SKC.shape[1]
    q_TNH, place_T = padded(q_TNH, place_T, BLOCK, -1)
    cell_SKC, place_S = padded(cell_SKC, place_S, BLOCK, NOWHERE)
    q_RWNH = q_TNH.reshape(-1, BLOCK, *q_TNH.shape[1:])
    q_RKXH = by_kv_head(q_RWNH, K, call.scale)
    parts = no_parts(q_RKXH, BLOCK, call.values[1] - call.values[0], None)
    places = place_T.reshape(-1, BLOCK), place_S.reshape(-1, BLOCK)
    parts = add_blocks(parts, q_RKXH, cell_SKC, *places, window, call.softcap, call.values, first)
    out_RWNV, lse_RWN = output_of(parts, BLOCK), lse_of(parts, BLOCK)
    out_TNV = out_RWNV.reshape(len(q_TNH), *out_RWNV.shape[2:])
    return out_TNV[:T], lse_RWN.reshape(len(q_TNH), -1)[:T]


def padded(
    array_TX: jax.Array, place_T: jax.Array, block: int, nowhere: int
) -> tuple[jax.Array, jax.Array]:
    """Returns both filled up to whole blocks, with zeros at a place where nothing meets."""
    spare = -array_TX.shape[0] % block
    array_TX = jnp.pad(array_TX, ((0, spare), *((0, 0),) * (array_TX.ndim - 1)))
    return array_TX, jnp.pad(place_T, (0, spare), constant_values=nowhere)


def blocks_seen(
    own_RW: jax.Array, place_QW: jax.Array, window: jax.Array | int, first: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Returns (start_R, stop_R): which of the blocks of keys each block of queries sees any of.

    Places rise within a block, but for what fills it up: -1 behind queries.
    """
    last_Q, begin_Q = place_QW[:, -1], place_QW[:, 0]
    latest_R = own_RW.max(axis=1)
    least_R = jnp.maximum(own_RW[:, 0] - window + 1, first)
    start_R = jnp.sum(last_Q[None] < least_R[:, None], axis=1, dtype=jnp.int32)
    stop_R = jnp.sum(begin_Q[None] <= latest_R[:, None], axis=1, dtype=jnp.int32)
    idle_R = latest_R < first
    return start_R, jnp.where(idle_R, start_R, jnp.maximum(start_R, stop_R))


def add_blocks(
    parts: Parts,
    q_RKXH: jax.Array,
    cell_SKC: jax.Array,
    own_RW: jax.Array,
    place_QW: jax.Array,
    window: jax.Array | int,
    softcap: float | None,
    values: tuple[int, int],
    first: jax.Array | int,
) -> Parts:
    """Returns the parts of blocks of queries with those of the keys that they see."""
    R, H = len(own_RW), q_RKXH.shape[-1]
    start_R, stop_R = blocks_seen(own_RW, place_QW, window, first)
    cell_QKWC = cell_SKC.reshape(*place_QW.shape, *cell_SKC.shape[1:]).transpose(0, 2, 1, 3)

    def queries(index, parts):
        q_KXH, own_W = q_RKXH[index], own_RW[index]

        def keys(other, carry):
            kv = cell_QKWC[other][None]
            distance_TS = own_W[:, None] - place_QW[other][None, :]
            mask_TS = (distance_TS >= 0) & (distance_TS < window)
            mask_TS = mask_TS & (place_QW[other][None, :] >= first)
            value = kv[..., values[0] : values[1]]
            return accumulate(carry, q_KXH[None], kv[..., :H], value, mask_TS[None], softcap)

        mine = Parts(*(part[index][None] for part in parts))
        mine = jax.lax.fori_loop(start_R[index], stop_R[index], keys, mine)
        return Parts(*(p.at[index].set(m[0]) for p, m in zip(parts, mine, strict=True)))

    return jax.lax.fori_loop(0, R, queries, parts)

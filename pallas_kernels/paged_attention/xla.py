# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain XLA: a loop over blocks of pages with an online softmax.

The loop's bounds are data, so the work follows the longest context that is really there, and the
part of a window that lies behind a row costs nothing. Online softmax: Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018 (arXiv 1805.02867).

Letters: B rows, T tokens a row, N query heads, K KV heads, G query heads a KV head, H width of
queries and keys, V width of values, S cells of a block, J pages of a row.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.rows import Rows
from pallas_kernels.pages import gather_pages
from sharding import ALONE, Axis

# Cells a block: enough that a loop turn's fixed cost is small, few enough that short contexts do
# not pay for long ones and that 32 rows of a block stay in the processor's cache. Measured:
# WORKSPACE.md.
BLOCK_CELLS = 64
# Below any logit, and finite: a difference of two of them is 0, not NaN.
LOWEST = -1e30


def paged_attention(
    q_BTNH: jax.Array,
    pool: jax.Array,
    rows: Rows,
    window: jax.Array | int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    values: tuple[int, int] | None = None,
    block_cells: int = BLOCK_CELLS,
    stripes: Axis = ALONE,
) -> jax.Array:
    """Returns the attention output [B, T, N, V] of `rows` over `pool` [P, K, W, C].

    A cell's first H numbers are its key, those of `values` its value: the H after the key if not
    given. `sinks_N` is one more logit of each head, without a value. The keys of this step are in
    the pool already. Softmax in float32; output in q's dtype. Tokens beyond a row's count give
    finite values that mean nothing; an idle row gives zeros.

    Over `stripes`, a mesh axis, the pages of a row are dealt out in turn: place p of a device's
    table is page p * ways + its own number of the row. All devices have all queries; each attends
    over its own pages, and their parts are merged by their softmax sums (flash-decoding).
    """
    B, T, N, H = q_BTNH.shape
    K, W = pool.shape[1:3]
    start, stop = values or (H, 2 * H)
    ways, stripe = stripes.ways, stripes.here()
    pages = max(1, block_cells // W)
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    q_BKXH = (q_BKGTH * jnp.asarray(scale, q_BTNH.dtype)).reshape(B, K, N // K * T, H)
    # The first place of the table that anyone here sees a cell of.
    first_B = jnp.maximum(rows.start_B - window + 1, 0) // (W * ways)
    blocks_B = -(-(rows.start_B + rows.count_B - first_B * (W * ways)) // (pages * W * ways))
    num_blocks = jnp.max(jnp.where(rows.count_B > 0, blocks_B, 0))

    def block(i, carry):
        page_BJ = first_B[:, None] + i * pages + jnp.arange(pages, dtype=jnp.int32)[None]
        # Past the table's end there is nothing to see; the clamp only keeps the read inside.
        inside_BJ = jnp.minimum(page_BJ, rows.table_BJ.shape[1] - 1)
        # K and V together: two gathers would fetch every cell's memory twice.
        kv = gather_pages(pool, jnp.take_along_axis(rows.table_BJ, inside_BJ, axis=1))
        cell_BJ = (page_BJ * ways + stripe) * W
        cell_BJW = cell_BJ[:, :, None] + jnp.arange(W, dtype=jnp.int32)[None, None]
        cell_BS = cell_BJW.reshape(B, pages * W)
        mask_BTS = visible(cell_BS, rows, window, T)
        # A weight of 0 does not silence NaN or infinity, which cells seen by nobody may hold.
        seen_BS = mask_BTS.any(axis=1)
        kv = jnp.where(seen_BS[:, None, :, None], kv, jnp.zeros((), kv.dtype))
        return accumulate(carry, q_BKXH, kv[..., :H], kv[..., start:stop], mask_BTS, softcap)

    V = stop - start
    zeros = jnp.zeros((B, K, N // K * T), jnp.float32)
    high, total = zeros + LOWEST, zeros
    if sinks_N is not None:
        high = jnp.broadcast_to(sinks_N.reshape(1, K, N // K, 1), (B, K, N // K, T))
        high = high.reshape(zeros.shape).astype(jnp.float32)
        total = zeros + jnp.where(stripe == 0, 1.0, 0.0)  # it counts once
    begin = (high, total, jnp.zeros((B, K, N // K * T, V), jnp.float32))
    high, total, sum_BKXV = jax.lax.fori_loop(0, num_blocks, block, begin)
    total_BKX, sum_BKXV = merged(high, total, sum_BKXV, stripes)
    out_BKXV = sum_BKXV / jnp.maximum(total_BKX, 1e-30)[..., None]
    out_BKGTV = out_BKXV.astype(q_BTNH.dtype).reshape(B, K, N // K, T, V)
    return out_BKGTV.transpose(0, 3, 1, 2, 4).reshape(B, T, N, V)


def visible(cell_BS: jax.Array, rows: Rows, window: jax.Array | int, T: int) -> jax.Array:
    """Returns mask_BTS: whether query t of row b sees the cell, by the rule of `Rows`.

    Nobody sees a cell past the row's last, and an idle row sees none.
    """
    index_T = jnp.arange(T, dtype=jnp.int32)
    end_B = jnp.where(rows.count_B > 0, rows.start_B + rows.count_B, 0)
    used_BS = cell_BS < end_B[:, None]
    own_BS = cell_BS - rows.start_B[:, None]  # this step's token in the cell, negative before it
    if rows.depth_BT is None or rows.ancestors_BT is None:
        distance_BTS = index_T[None, :, None] - own_BS[:, None, :]
        return used_BS[:, None, :] & (distance_BTS >= 0) & (distance_BTS < window)
    token_BS = jnp.clip(own_BS, 0, T - 1)
    new_BS = own_BS >= 0
    depth_BS = jnp.where(new_BS, jnp.take_along_axis(rows.depth_BT, token_BS, axis=1), own_BS)
    near_BTS = rows.depth_BT[:, :, None] - depth_BS[:, None, :] < window
    bit_BTS = (rows.ancestors_BT[:, :, None] >> token_BS[:, None, :]) & 1
    related_BTS = ~new_BS[:, None, :] | (bit_BTS == 1)
    return used_BS[:, None, :] & near_BTS & related_BTS


def merged(
    high_BKX: jax.Array, total_BKX: jax.Array, sum_BKXV: jax.Array, axis: Axis
) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of weights, weighted values) of all devices of an axis."""
    if axis.ways == 1:
        return total_BKX, sum_BKXV
    keep_BKX1 = jnp.exp(high_BKX - axis.max(high_BKX))[..., None]
    both = jnp.concatenate([sum_BKXV, total_BKX[..., None]], axis=-1)
    both = axis.sum(both * keep_BKX1)
    return both[..., -1], both[..., :-1]


def accumulate(carry, q_BKXH, k_BKSH, v_BKSV, mask_BTS, softcap):
    """Returns the running (maximum, sum of weights, weighted values) with one more block."""
    high_BKX, total_BKX, sum_BKXV = carry
    B, K, X, _ = q_BKXH.shape
    _, T, S = mask_BTS.shape
    # K on the left is the order that XLA's CPU backend does fastest.
    logits = jnp.einsum("bksh,bkxh->bkxs", k_BKSH, q_BKXH, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    masked = jnp.where(mask_BTS[:, None, None], logits.reshape(B, K, X // T, T, S), LOWEST)
    logits = masked.reshape(B, K, X, S)
    new_high_BKX = jnp.maximum(high_BKX, logits.max(axis=-1))
    # A block in which a query sees nothing: LOWEST - LOWEST would weigh 1, so the mask says 0.
    weights = jnp.where(logits > LOWEST / 2, jnp.exp(logits - new_high_BKX[..., None]), 0.0)
    keep_BKX = jnp.exp(high_BKX - new_high_BKX)
    values = jnp.einsum(
        "bkxs,bksv->bkxv", weights.astype(v_BKSV.dtype), v_BKSV, preferred_element_type=jnp.float32
    )
    total_BKX = total_BKX * keep_BKX + weights.sum(axis=-1)
    return new_high_BKX, total_BKX, sum_BKXV * keep_BKX[..., None] + values

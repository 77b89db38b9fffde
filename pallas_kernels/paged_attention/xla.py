# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain XLA: a loop over blocks of pages with an online softmax.

The loop's bounds are data, so the work follows the longest context that is really there, and the
part of a window that lies behind a row costs nothing. Online softmax: Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018 (arXiv 1805.02867).

Letters: B rows, T tokens a row, N query heads, K KV heads, G query heads a KV head, H width of
queries and keys, V width of values, S cells of a block, J pages of a row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.rows import Call, Rows
from pallas_kernels.pages import Pages, gather_pages, gather_sides
from pallas_kernels.softmax import LOWEST
from sharding import ALONE, Axis

# Cells a block: enough that a loop turn's fixed cost is small, few enough that short contexts do
# not pay for long ones and that 32 rows of a block stay in the processor's cache. Measured:
# WORKSPACE.md.
BLOCK_CELLS = 64


class Parts(NamedTuple):
    """Softmax over some of the keys: the highest logit, the sum of weights, the weighted values.

    float32 [B, K, X] and [B, K, X, V], X a KV head's queries, heads major.
    """

    high_BKX: jax.Array
    total_BKX: jax.Array
    sum_BKXV: jax.Array


def attend(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    call: Call,
    stripes: Axis = ALONE,
    sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BTNV, lse_BTN), float32, as `paged_attention` has them."""
    T, K, values = q_BTNH.shape[1], pages.cells.shape[1], call.values
    q_BKXH = by_kv_head(q_BTNH, K, call.scale)
    begin = no_parts(q_BKXH, T, values[1] - values[0], sinks_N, stripes)
    parts = add_pages(
        begin,
        q_BKXH,
        pages,
        rows,
        window,
        T=T,
        softcap=call.softcap,
        values=values,
        block_cells=(call.blocks or {}).get("cells", BLOCK_CELLS),
        stripes=stripes,
    )
    parts = merged(parts, stripes)
    return output_of(parts, T), lse_of(parts, T)


def mass(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    lse_BTN: jax.Array,
    call: Call,
    stripes: Axis = ALONE,
) -> jax.Array:
    """Returns mass_BKS as `attention_mass` has it."""
    (B, T, _, H), (_, K, W, _) = q_BTNH.shape, pages.cells.shape
    q_BKXH = by_kv_head(q_BTNH, K, call.scale)
    lse_BKX = by_kv_head(lse_BTN[..., None], K, 1.0)[..., 0]
    real_BT = jnp.arange(T, dtype=jnp.int32)[None] < rows.count_B[:, None]
    blocks = Blocks(pages, rows, window, T, call.values, BLOCK_CELLS, stripes)
    J = rows.table_BJ.shape[1]
    size = blocks.pages * W

    def block(i, mass_BKS):
        key_BKSH, _, bias_BKS, mask_BTS = blocks.read(i, H)
        seen_BTS = mask_BTS & real_BT[:, :, None]
        logits = masked_logits(q_BKXH, key_BKSH, bias_BKS, seen_BTS, call.softcap)
        weights = jnp.where(logits > LOWEST / 2, jnp.exp(logits - lse_BKX[..., None]), 0.0)
        cell_BS = (blocks.first_B[:, None] + i * blocks.pages) * W + jnp.arange(size)[None]
        cell_BS = jnp.where(cell_BS < J * W, cell_BS, J * W)  # beyond the table: dropped
        add = jax.vmap(lambda m_KS, cell_S, w_KS: m_KS.at[:, cell_S].add(w_KS, mode="drop"))
        return add(mass_BKS, cell_BS, weights.sum(axis=2))

    begin = jnp.zeros((B, K, J * W), jnp.float32)
    return jax.lax.fori_loop(0, blocks.count, block, begin)


def by_kv_head(q_BTNH: jax.Array, kv_heads: int, scale: float) -> jax.Array:
    """Returns the scaled queries as q_BKXH, those of a KV head together."""
    B, T, N, H = q_BTNH.shape
    q_BKGTH = q_BTNH.reshape(B, T, kv_heads, N // kv_heads, H).transpose(0, 2, 3, 1, 4)
    q_BKGTH = q_BKGTH * jnp.asarray(scale, q_BTNH.dtype)
    return q_BKGTH.reshape(B, kv_heads, N // kv_heads * T, H)


def no_parts(
    q_BKXH: jax.Array, T: int, value_width: int, sinks_N: jax.Array | None, axis: Axis = ALONE
) -> Parts:
    """Returns the parts of no keys, the sinks' logits included: of the first device of `axis`."""
    B, K, X, _ = q_BKXH.shape
    zeros = jnp.zeros((B, K, X), jnp.float32)
    high, total = zeros + LOWEST, zeros
    if sinks_N is not None:
        high = jnp.broadcast_to(sinks_N.reshape(1, K, X // T, 1), (B, K, X // T, T))
        high = high.reshape(zeros.shape).astype(jnp.float32)
        total = zeros + jnp.where(axis.here() == 0, 1.0, 0.0)  # it counts once
    return Parts(high, total, jnp.zeros((B, K, X, value_width), jnp.float32))


def output_of(parts: Parts, T: int) -> jax.Array:
    """Returns the attention output [B, T, N, V], float32, of the parts of all keys."""
    B, K, X, V = parts.sum_BKXV.shape
    out_BKXV = parts.sum_BKXV / jnp.maximum(parts.total_BKX, 1e-30)[..., None]
    out_BKGTV = out_BKXV.reshape(B, K, X // T, T, V)
    return out_BKGTV.transpose(0, 3, 1, 2, 4).reshape(B, T, K * X // T, V)


def lse_of(parts: Parts, T: int) -> jax.Array:
    """Returns the log-sum-exp of each query's logits, lse_BTN; LOWEST if it has none."""
    B, K, X = parts.total_BKX.shape
    log_BKX = parts.high_BKX + jnp.log(jnp.maximum(parts.total_BKX, 1e-30))
    log_BKX = jnp.where(parts.total_BKX > 0, log_BKX, LOWEST)
    return log_BKX.reshape(B, K * X // T, T).transpose(0, 2, 1)


def add_pages(
    parts: Parts,
    q_BKXH: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    *,
    T: int,
    softcap: float | None,
    values: tuple[int, int],
    block_cells: int = BLOCK_CELLS,
    stripes: Axis = ALONE,
) -> Parts:
    """Returns the parts with those of this device's pages, of `T` queries a row."""
    blocks = Blocks(pages, rows, window, T, values, block_cells, stripes)

    def block(i, carry):
        key_BKSH, value_BKSV, bias_BKS, mask_BTS = blocks.read(i, q_BKXH.shape[-1])
        return accumulate(carry, q_BKXH, key_BKSH, value_BKSV, mask_BTS, softcap, bias_BKS)

    return jax.lax.fori_loop(0, blocks.count, block, parts)


class Blocks:
    """The blocks of pages that anyone of some rows sees a cell of; `count` of them, traced."""

    def __init__(
        self,
        pages: Pages,
        rows: Rows,
        window: jax.Array | int,
        T: int,
        values: tuple[int, int],
        block_cells: int,
        stripes: Axis,
    ) -> None:
        self._all, self._rows, self._window, self._T, self._values = pages, rows, window, T, values
        self._page, self._ways, self._stripe = pages.cells.shape[2], stripes.ways, stripes.here()
        self.pages = max(1, block_cells // self._page)
        self._end_B = jnp.where(rows.count_B > 0, rows.ends(), 0)
        # The first place of the table that anyone here sees a cell of.
        dealt = self._page * self._ways
        self.first_B = jnp.maximum(rows.start_B - window + 1, 0) // dealt
        blocks_B = -(-(self._end_B - self.first_B * dealt) // (self.pages * dealt))
        self.count = jnp.max(blocks_B)

    def read(self, i: jax.Array, H: int):
        """Returns (key_BKSH, value_BKSV, bias_BKS or None, mask_BTS) of a block."""
        W, rows = self._page, self._rows
        page_BJ = self.first_B[:, None] + i * self.pages
        page_BJ = page_BJ + jnp.arange(self.pages, dtype=jnp.int32)[None]
        # Past the table's end there is nothing to see; the clamp only keeps the read inside.
        inside_BJ = jnp.minimum(page_BJ, rows.table_BJ.shape[1] - 1)
        number_BJ = jnp.take_along_axis(rows.table_BJ, inside_BJ, axis=1)
        # K and V together: two gathers would fetch every cell's memory twice.
        kv = gather_pages(self._all.cells, number_BJ)
        if self._all.scale_PK2W is not None:
            scale_BK2S = gather_sides(self._all.scale_PK2W, number_BJ)
            split = self._values[0] or self._values[1]
            is_first_C = jnp.arange(kv.shape[-1]) < split
            kv = kv.astype(jnp.float32) * jnp.where(
                is_first_C, scale_BK2S[:, :, 0, :, None], scale_BK2S[:, :, 1, :, None]
            )
        bias_BKS = None
        if self._all.bias_PKW is not None:
            bias_BKS = gather_sides(self._all.bias_PKW[:, :, None], number_BJ)[:, :, 0]
        cell_BJ = (page_BJ * self._ways + self._stripe) * W
        cell_BJW = cell_BJ[:, :, None] + jnp.arange(W, dtype=jnp.int32)[None, None]
        cell_BS = cell_BJW.reshape(cell_BJ.shape[0], -1)
        mask_BTS = visible(cell_BS, rows, self._end_B, self._window, self._T)
        # A weight of 0 does not silence NaN or infinity, which cells seen by nobody may hold.
        seen_BS = mask_BTS.any(axis=1)
        kv = jnp.where(seen_BS[:, None, :, None], kv, jnp.zeros((), kv.dtype))
        return kv[..., :H], kv[..., self._values[0] : self._values[1]], bias_BKS, mask_BTS


def visible(
    cell_BS: jax.Array, rows: Rows, end_B: jax.Array, window: jax.Array | int, T: int
) -> jax.Array:
    """Returns mask_BTS: whether query t of row b sees the cell, by the rule of `Rows`.

    Nobody sees a cell from `end_B` on.
    """
    index_T = jnp.arange(T, dtype=jnp.int32)
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


def merged(parts: Parts, axis: Axis) -> Parts:
    """Returns the parts of all devices of an axis together."""
    if axis.ways == 1:
        return parts
    high_BKX = axis.max(parts.high_BKX)
    keep_BKX1 = jnp.exp(parts.high_BKX - high_BKX)[..., None]
    both = jnp.concatenate([parts.sum_BKXV, parts.total_BKX[..., None]], axis=-1)
    both = axis.sum(both * keep_BKX1)
    return Parts(high_BKX, both[..., -1], both[..., :-1])


def masked_logits(q_BKXH, k_BKSH, bias_BKS, mask_BTS, softcap) -> jax.Array:
    """Returns float32 logits [B, K, X, S], at most LOWEST where the mask or a bias of -inf is."""
    (B, K, X, _), (_, T, S) = q_BKXH.shape, mask_BTS.shape
    k_BKSH = k_BKSH.astype(q_BKXH.dtype)
    # K on the left is the order that XLA's CPU backend does fastest.
    logits = jnp.einsum("bksh,bkxh->bkxs", k_BKSH, q_BKXH, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if bias_BKS is not None:
        logits = logits + jnp.maximum(bias_BKS, LOWEST)[:, :, None]
    masked = jnp.where(mask_BTS[:, None, None], logits.reshape(B, K, X // T, T, S), LOWEST)
    return masked.reshape(B, K, X, S)


def accumulate(
    carry: Parts, q_BKXH, k_BKSH, v_BKSV, mask_BTS, softcap, bias_BKS: jax.Array | None = None
) -> Parts:
    """Returns the parts with those of one more block of keys."""
    high_BKX, total_BKX, sum_BKXV = carry
    logits = masked_logits(q_BKXH, k_BKSH, bias_BKS, mask_BTS, softcap)
    new_high_BKX = jnp.maximum(high_BKX, logits.max(axis=-1))
    # A block in which a query sees nothing: LOWEST - LOWEST would weigh 1, so the mask says 0.
    weights = jnp.where(logits > LOWEST / 2, jnp.exp(logits - new_high_BKX[..., None]), 0.0)
    keep_BKX = jnp.exp(high_BKX - new_high_BKX)
    values = jnp.einsum(
        "bkxs,bksv->bkxv", weights.astype(v_BKSV.dtype), v_BKSV, preferred_element_type=jnp.float32
    )
    total_BKX = total_BKX * keep_BKX + weights.sum(axis=-1)
    return Parts(new_high_BKX, total_BKX, sum_BKXV * keep_BKX[..., None] + values)

# SPDX-License-Identifier: Apache-2.0
"""The layout of a page: its shape, its bytes, how cells are written and gathered.

A pool is `[P, K, W, C]`: pages, KV heads, cells of a page, and the numbers of a cell: K beside V of
one head, so that one read brings both, and a head size of 64 fills the 128 lanes of a TPU register
without padding; or, of latent attention, one latent beside the rotated key. A cell may be filled up
with zeros: XLA for TPU lays an array out so that lanes are wasted least, and a pool whose cells
take no whole lanes is copied into another layout by every program. Page 0 is the null page: it
belongs to nobody, writes that must go nowhere go there, and no query ever sees it.

Letters: P pages, K KV heads, W cells a page, C numbers a cell, T tokens, B rows, J pages of a row.
"""

import jax
import jax.numpy as jnp
import numpy as np

NULL_PAGE = 0


def page_shape(kv_heads: int, page_size: int, cell_width: int) -> tuple[int, int, int]:
    """Returns the shape of one page of one layer, without the page axis."""
    return (kv_heads, page_size, cell_width)


def page_bytes(kv_heads: int, page_size: int, cell_width: int, dtype: np.dtype) -> int:
    """Returns the bytes of one page of one layer."""
    return int(np.prod(page_shape(kv_heads, page_size, cell_width))) * np.dtype(dtype).itemsize


def write_cells(
    pool: jax.Array, cell_TKC: jax.Array, page_T: jax.Array, offset_T: jax.Array
) -> jax.Array:
    """Returns `pool` [P, K, W, C] with each token's cells, of C numbers or less, stored at
    (page_T, offset_T).

    What is not finite is stored as 0: a cell that a query's mask leaves out is still multiplied by
    0, so that a NaN there would reach whoever has the page next. In place when `pool` is donated
    or a loop carry. Tokens that must not be kept have page 0;
    several of them may share a cell there, whose content is never read.
    """
    P, K, W, C = pool.shape
    unused = C - cell_TKC.shape[-1]
    cell_TKC = jnp.pad(cell_TKC.astype(pool.dtype), ((0, 0), (0, 0), (0, unused)))
    cell_TKC = jnp.where(jnp.isfinite(cell_TKC), cell_TKC, 0)
    heads_K = jnp.arange(K, dtype=jnp.int32)
    row_TK = (page_T[:, None] * K + heads_K[None, :]) * W + offset_T[:, None]
    # One flat axis of cells: a scatter with a single index is what XLA does in place and fast.
    flat = pool.reshape(P * K * W, C).at[row_TK].set(cell_TKC, mode="promise_in_bounds")
    return flat.reshape(pool.shape)


def gather_pages(pool: jax.Array, page_BJ: jax.Array) -> jax.Array:
    """Returns the cells of the pages `page_BJ`, [B, K, J * W, C]."""
    P, K, W, C = pool.shape
    B, J = page_BJ.shape
    heads_K = jnp.arange(K, dtype=jnp.int32)
    row_BKJ = page_BJ[:, None, :] * K + heads_K[None, :, None]
    cells = pool.reshape(P * K, W, C).at[row_BKJ].get(mode="promise_in_bounds")
    return cells.reshape(B, K, J * W, C)

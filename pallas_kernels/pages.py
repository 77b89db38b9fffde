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

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NULL_PAGE = 0


class Pages(NamedTuple):
    """Pages of one layer, or of many in a row, with what stands beside their cells.

    cells: [P, K, W, C], what fills a used one up being finite; integers and 8-bit floats are codes.
    scale_PK2W: float32, what each cell's codes are multiplied by: those of its key and of its value
    or, of a latent, those of the latent and of what is behind it. bias_PKW: float32, what is added
    to each cell's logits; -inf marks a cell that nobody sees. None: there are none.
    """

    cells: jax.Array
    scale_PK2W: jax.Array | None = None
    bias_PKW: jax.Array | None = None


def page_shape(kv_heads: int, page_size: int, cell_width: int) -> tuple[int, int, int]:
    """Returns the shape of one page of one layer, without the page axis."""
    return (kv_heads, page_size, cell_width)


def page_bytes(kv_heads: int, page_size: int, cell_width: int, dtype: np.dtype) -> int:
    """Returns the bytes of one page of one layer."""
    return int(np.prod(page_shape(kv_heads, page_size, cell_width))) * np.dtype(dtype).itemsize


def gather_sides(side_PKXW: jax.Array, page_BJ: jax.Array) -> jax.Array:
    """Returns what stands beside the cells of the pages `page_BJ`, [B, K, X, J * W]."""
    B, J = page_BJ.shape
    side_BJKXW = side_PKXW.at[page_BJ].get(mode="promise_in_bounds")
    _, _, K, X, W = side_BJKXW.shape
    return side_BJKXW.transpose(0, 2, 3, 1, 4).reshape(B, K, X, J * W)


def gather_pages(pool: jax.Array, page_BJ: jax.Array) -> jax.Array:
    """Returns the cells of the pages `page_BJ`, [B, K, J * W, C]."""
    P, K, W, C = pool.shape
    B, J = page_BJ.shape
    heads_K = jnp.arange(K, dtype=jnp.int32)
    row_BKJ = page_BJ[:, None, :] * K + heads_K[None, :, None]
    cells = pool.reshape(P * K, W, C).at[row_BKJ].get(mode="promise_in_bounds")
    return cells.reshape(B, K, J * W, C)

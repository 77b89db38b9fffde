# SPDX-License-Identifier: Apache-2.0
"""New cells into pages in plain XLA: a scatter of whole cells."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import Backend
from pallas_kernels.pages import Pages


def declines(pages: Pages, tokens: int, run: int, backend: Backend) -> str | None:
    """Returns None: it takes all."""
    return None


def store(
    pages: Pages, new: Pages, page_T: jax.Array, offset_T: jax.Array, run: int, backend: Backend
) -> Pages:
    """Returns the pages with what is new of each token stored: [T, K, ...] where pages have [P, K,
    ...] and cells. Tokens that are not kept share cells of page 0, whose content nobody reads.
    """
    P, K, W, C = pages.cells.shape
    cell_TKC = jnp.pad(new.cells, ((0, 0), (0, 0), (0, C - new.cells.shape[-1])))
    heads_K = jnp.arange(K, dtype=jnp.int32)
    row_TK = (page_T[:, None] * K + heads_K[None, :]) * W + offset_T[:, None]
    # One flat axis of cells: a scatter with a single index is what XLA does in place and fast.
    flat = pages.cells.reshape(P * K * W, C).at[row_TK].set(cell_TKC, mode="promise_in_bounds")
    return store_sides(pages, new, page_T, offset_T)._replace(cells=flat.reshape(P, K, W, C))


def store_sides(pages: Pages, new: Pages, page_T: jax.Array, offset_T: jax.Array) -> Pages:
    """Returns the pages with what stands beside the new cells."""
    scale_PK2W, bias_PKW = pages.scale_PK2W, pages.bias_PKW
    if scale_PK2W is not None:
        scale_PK2W = scale_PK2W.at[page_T, :, :, offset_T].set(new.scale_PK2W)
    if bias_PKW is not None:
        bias_PKW = bias_PKW.at[page_T, :, offset_T].set(new.bias_PKW)
    return Pages(pages.cells, scale_PK2W, bias_PKW)

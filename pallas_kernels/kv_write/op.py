# SPDX-License-Identifier: Apache-2.0
"""The operation: cells are made storable, and an implementation stores them."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import XLA, Backend, decline
from pallas_kernels.kv_write import gpu, tpu, xla
from pallas_kernels.pages import Pages

IMPLEMENTATIONS = {"xla": xla, "tpu": tpu, "gpu": gpu}


def kv_write(
    pages: Pages,
    cell_TKC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    run: int = 1,
    split: int | None = None,
    backend: Backend = XLA,
) -> Pages:
    """Returns the pages with each token's cells, of C numbers or less, at (page_T, offset_T).

    Tokens come in runs of `run`, whose cells follow one another: offsets rise by one and begin anew
    with the next page, also where page_T is 0, which says that a token is not kept. Those of a page
    that are kept follow one another. Runs may meet within a page, in different cells. What is not
    finite is stored as 0: a cell that a query's mask leaves out is still multiplied by 0, so that a
    NaN there would reach whoever has the page next.

    Pages with scales get codes: a key's numbers, the first `split`, and the others have a scale a
    cell and head each, their largest magnitude over the largest code. Their biases are 0. In place
    when `pages` are donated or a loop carry.
    Raises ValueError for shapes that do not go together.
    """
    check(pages, cell_TKC, page_T, offset_T, run, split)
    if not len(page_T):
        return pages
    cell_TKC = jnp.where(jnp.isfinite(cell_TKC), cell_TKC, 0)
    scale_TK2 = bias_TK = None
    if pages.scale_PK2W is not None:
        assert split is not None, "check saw to it"
        cell_TKC, scale_TK2 = encoded(cell_TKC, split, pages.cells.dtype)
    if pages.bias_PKW is not None:
        bias_TK = jnp.zeros(cell_TKC.shape[:2], jnp.float32)
    new = Pages(cell_TKC.astype(pages.cells.dtype), scale_TK2, bias_TK)
    reason = IMPLEMENTATIONS[backend.kind].declines(pages, len(page_T), run, backend)
    if reason is not None:
        decline("kv_write", reason)
        backend = XLA
    return IMPLEMENTATIONS[backend.kind].store(pages, new, page_T, offset_T, run, backend)


def encoded(cell_TKC: jax.Array, split: int, dtype) -> tuple[jax.Array, jax.Array]:
    """Returns (code_TKC, scale_TK2): of the first `split` numbers of a cell, and of the others."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    parts, scales = [], []
    for part in (cell_TKC[..., :split], cell_TKC[..., split:]):
        part = part.astype(jnp.float32)
        scale_TK1 = jnp.max(jnp.abs(part), axis=-1, keepdims=True, initial=0.0) / most
        code = part / jnp.where(scale_TK1 > 0, scale_TK1, 1.0)
        parts.append(jnp.clip(jnp.round(code) if is_integer else code, -most, most))
        scales.append(scale_TK1)
    return jnp.concatenate(parts, axis=-1).astype(dtype), jnp.concatenate(scales, axis=-1)


def check(
    pages: Pages,
    cell_TKC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    run: int,
    split: int | None,
) -> None:
    """Raises ValueError for shapes that do not go together."""
    (T, K, C), (_, heads, _, width) = cell_TKC.shape, pages.cells.shape
    if K != heads or C > width:
        raise ValueError(f"cells of {K} heads of {C} for pages of {heads} of {width}: give those")
    if page_T.shape != (T,) or offset_T.shape != (T,):
        raise ValueError(f"{T} tokens, places for {page_T.shape[0]}: give one a token")
    if run < 1 or T % run:
        raise ValueError(f"run={run} must divide the number of tokens, {T}")
    if pages.scale_PK2W is not None and not 0 < (split or 0) <= C:
        raise ValueError(f"split={split} must be from 1 to {C}: the numbers of the first scale")

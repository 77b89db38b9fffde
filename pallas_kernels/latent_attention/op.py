# SPDX-License-Identifier: Apache-2.0
"""The operation, by the kernels of paged attention: one KV head whose value is within its key."""

import jax

from pallas_kernels.backends import XLA, Backend
from pallas_kernels.paged_attention import Rows, attention_mass, paged_attention
from pallas_kernels.pages import Pages
from sharding import ALONE, Axis


def latent_attention(
    q_BTNC: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    *,
    rank: int,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    stripes: Axis = ALONE,
    backend: Backend = XLA,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BTNR, lse_BTN) of absorbed queries over pages of latents, R being `rank`.

    A cell's first R numbers are the latent, and the value; those behind it up to a query's width
    are the rotated key that all heads share (DeepSeek-V2, arXiv 2405.04434). `scale` is that of the
    heads as they were before their weights were absorbed. All else is as in `paged_attention`.
    Raises ValueError for pages of several heads, and for a rank that is no part of the queries.
    """
    check(q_BTNC, pages, rank)
    return paged_attention(
        q_BTNC,
        pages,
        rows,
        window,
        scale=scale,
        softcap=softcap,
        sinks_N=sinks_N,
        values=(0, rank),
        stripes=stripes,
        backend=backend,
        operation="latent_attention",
    )


def latent_mass(
    q_BTNC: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    lse_BTN: jax.Array,
    *,
    rank: int,
    scale: float,
    softcap: float | None = None,
    stripes: Axis = ALONE,
    backend: Backend = XLA,
) -> jax.Array:
    """Returns mass_B1S, float32, as `attention_mass` does."""
    check(q_BTNC, pages, rank)
    return attention_mass(
        q_BTNC,
        pages,
        rows,
        window,
        lse_BTN,
        scale=scale,
        softcap=softcap,
        values=(0, rank),
        stripes=stripes,
        backend=backend,
        operation="latent_attention",
    )


def check(q_BTNC: jax.Array, pages: Pages, rank: int) -> None:
    """Raises ValueError for what are no latents."""
    if pages.cells.shape[1] != 1:
        heads = pages.cells.shape[1]
        raise ValueError(f"pages of {heads} heads: a latent is one for all; use paged_attention")
    if not 0 < rank <= q_BTNC.shape[-1]:
        width = q_BTNC.shape[-1]
        raise ValueError(f"rank={rank} must be from 1 to the queries' width, {width}")

# SPDX-License-Identifier: Apache-2.0
"""The operation: which implementation does it, and what all of them leave to be done after them."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import XLA, Backend, decline
from pallas_kernels.paged_attention import gpu, tpu, xla
from pallas_kernels.paged_attention.rows import Call, Rows
from pallas_kernels.pages import Pages
from pallas_kernels.softmax import LOWEST
from sharding import ALONE, Axis

KERNELS = {"tpu": tpu, "gpu": gpu}


def paged_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    values: tuple[int, int] | None = None,
    stripes: Axis = ALONE,
    backend: Backend = XLA,
    operation: str = "paged_attention",
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BTNV in `dtype`, or q's, lse_BTN float32) of `rows` over `pages`.

    A cell's first H numbers are its key, those of `values` its value: the H after the key if not
    given; (0, R) is a latent of R numbers. `sinks_N` is one more logit of each head, without a
    value. The keys of this step are in the pages already. Softmax in float32. Tokens beyond a row's
    count give finite values that mean nothing; an idle row gives zeros. The log-sum-exp of all
    logits, the sink's included, is what outputs over other keys are merged by; of none it is -1e30.

    Over `stripes`, a mesh axis, the pages of a row are dealt out in turn: place p of a device's
    table is page p * ways + its own number of the row. All devices have all queries; each attends
    over its own pages, and their parts are merged by their softmax sums (flash-decoding).
    Raises ValueError for shapes that do not go together.
    """
    check(q_BTNH, pages, rows)
    values = values or (q_BTNH.shape[-1], 2 * q_BTNH.shape[-1])
    call = Call(scale, values, softcap, stripes.ways, operation)
    backend = chosen(q_BTNH, pages, rows, call, backend)
    if backend.kind == "xla":
        out_BTNV, lse_BTN = xla.attend(q_BTNH, pages, rows, window, call, stripes, sinks_N)
    else:
        kernel = KERNELS[backend.kind].attend
        out_BTNV, lse_BTN = kernel(q_BTNH, pages, rows, window, stripes.here(), call, backend)
        out_BTNV, lse_BTN = merge(out_BTNV, lse_BTN, sinks_N, stripes)
    return out_BTNV.astype(dtype or q_BTNH.dtype), lse_BTN


def attention_mass(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    lse_BTN: jax.Array,
    *,
    scale: float,
    softcap: float | None = None,
    values: tuple[int, int] | None = None,
    stripes: Axis = ALONE,
    backend: Backend = XLA,
    operation: str = "paged_attention",
) -> jax.Array:
    """Returns mass_BKS, float32: the softmax weights that each cell of a row's table gets from all
    queries of its KV head together, which policies of eviction ask for.

    S runs over the table's places and their cells; `lse_BTN` is what `paged_attention` gave.
    """
    check(q_BTNH, pages, rows)
    values = values or (q_BTNH.shape[-1], 2 * q_BTNH.shape[-1])
    call = Call(scale, values, softcap, stripes.ways, operation, mass=True)
    backend = chosen(q_BTNH, pages, rows, call, backend)
    if backend.kind == "xla":
        return xla.mass(q_BTNH, pages, rows, window, lse_BTN, call, stripes)
    kernel = KERNELS[backend.kind].mass
    return kernel(q_BTNH, pages, rows, window, stripes.here(), lse_BTN, call, backend)


def check(q_BTNH: jax.Array, pages: Pages, rows: Rows) -> None:
    """Raises ValueError for shapes that do not go together."""
    (B, T, N, H), (_, K, _, C) = q_BTNH.shape, pages.cells.shape
    if N % K:
        raise ValueError(f"{N} query heads over {K} KV heads: give a multiple of {K}")
    if H > C:
        raise ValueError(f"queries of {H} numbers over cells of {C}: give cells that hold a key")
    for name in ("table_BJ", "start_B", "count_B"):
        if getattr(rows, name).shape[0] != B:
            found = getattr(rows, name).shape[0]
            raise ValueError(f"{name} is of {found} rows, the queries are of {B}: give as many")
    if rows.ancestors_BT is not None and T > 32:
        raise ValueError(f"a tree of {T} tokens: an ancestor set has 32 bits, so give 32 at most")


def chosen(q_BTNH: jax.Array, pages: Pages, rows: Rows, call: Call, backend: Backend) -> Backend:
    """Returns the backend that takes these arguments: XLA, with a warning, for one that cannot."""
    if backend.kind == "xla":
        return backend
    reason = KERNELS[backend.kind].declines(q_BTNH, pages, rows, call, backend)
    if reason is None:
        return backend
    decline(call.operation, reason)
    return XLA


def merge(
    out_BTNV: jax.Array, lse_BTN: jax.Array, sinks_N: jax.Array | None, stripes: Axis
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BTNV, lse_BTN) of what all devices of `stripes` have, and of the sinks."""
    high_BTN = stripes.max(lse_BTN) if stripes.ways > 1 else lse_BTN
    if sinks_N is not None:
        sinks_11N = sinks_N.astype(jnp.float32)[None, None]
        high_BTN = jnp.maximum(high_BTN, sinks_11N)
    share_BTN = jnp.where(lse_BTN > LOWEST / 2, jnp.exp(lse_BTN - high_BTN), 0.0)
    if stripes.ways == 1 and sinks_N is None:
        return out_BTNV, lse_BTN
    both = jnp.concatenate([out_BTNV * share_BTN[..., None], share_BTN[..., None]], axis=-1)
    both = stripes.sum(both) if stripes.ways > 1 else both
    total_BTN = both[..., -1]
    if sinks_N is not None:
        total_BTN = total_BTN + jnp.exp(sinks_11N - high_BTN)
    is_any = total_BTN > 0
    lse_BTN = jnp.where(is_any, high_BTN + jnp.log(jnp.where(is_any, total_BTN, 1.0)), LOWEST)
    return both[..., :-1] / jnp.where(is_any, total_BTN, 1.0)[..., None], lse_BTN

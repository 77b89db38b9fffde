# SPDX-License-Identifier: Apache-2.0
"""The operation: which implementation does it, and the sinks, which all leave to be done."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import XLA, Backend, decline
from pallas_kernels.flash_attention import gpu, tpu, xla
from pallas_kernels.paged_attention.op import merge
from pallas_kernels.paged_attention.rows import Call
from sharding import ALONE

IMPLEMENTATIONS = {"xla": xla, "tpu": tpu, "gpu": gpu}


def flash_attention(
    q_TNH: jax.Array,
    cell_SKC: jax.Array,
    place_T: jax.Array,
    place_S: jax.Array,
    window: jax.Array | int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    values: tuple[int, int] | None = None,
    first: jax.Array | int = 0,
    backend: Backend = XLA,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_TNV in `dtype`, or q's, lse_TN float32) of queries over cells.

    A cell's first H numbers are its key, those of `values` its value: the H after the key if not
    given. `place_T` and `place_S`, int32 and rising, are where queries and keys stand in the
    sequence; a query sees the places up to its own, nearer than `window`, from `first` on. Blocks
    that nobody sees are passed over. Softmax in float32; a query that sees nothing gives 0 and a
    log-sum-exp of -1e30. `sinks_N` is one more logit of each head, without a value.
    Raises ValueError for shapes that do not go together.
    """
    check(q_TNH, cell_SKC, place_T, place_S)
    call = Call(
        scale, values or (q_TNH.shape[-1], 2 * q_TNH.shape[-1]), softcap, 1, "flash_attention"
    )
    reason = IMPLEMENTATIONS[backend.kind].declines(q_TNH, cell_SKC, call, backend)
    if reason is not None:
        decline(call.operation, reason)
        backend = XLA
    attend = IMPLEMENTATIONS[backend.kind].attend
    out_TNV, lse_TN = attend(
        q_TNH, cell_SKC, place_T, place_S, window, jnp.asarray(first, jnp.int32), call, backend
    )
    out_BTNV, lse_BTN = merge(out_TNV[None], lse_TN[None], sinks_N, ALONE)
    return out_BTNV[0].astype(dtype or q_TNH.dtype), lse_BTN[0]


def check(q_TNH: jax.Array, cell_SKC: jax.Array, place_T: jax.Array, place_S: jax.Array) -> None:
    """Raises ValueError for shapes that do not go together."""
    (T, N, H), (S, K, C) = q_TNH.shape, cell_SKC.shape
    if N % K:
        raise ValueError(f"{N} query heads over {K} KV heads: give a multiple of {K}")
    if H > C:
        raise ValueError(f"queries of {H} numbers over cells of {C}: give cells that hold a key")
    if place_T.shape != (T,) or place_S.shape != (S,):
        found = place_T.shape + place_S.shape
        raise ValueError(f"places of {found} for {T} queries and {S} keys: give one each")

# SPDX-License-Identifier: Apache-2.0
"""Ring attention in plain XLA: keys and values go round, each device attends with its queries.

Ring Attention with blockwise transformers, arXiv 2310.01889. Queries and keys are met in blocks;
those that the mask hides whole are passed over, so that the work of a device is what its queries
see. Masks are by places in the run, whatever the layout of tokens over devices.

Letters: T tokens of a device, N query heads, K KV heads, H width of queries and keys, C width of a
cell, X queries of a KV head in a block, W tokens of a block, R blocks of a device.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.rows import Rows
from pallas_kernels.paged_attention.xla import (
    Parts,
    accumulate,
    add_pages,
    by_kv_head,
    joined,
    merged,
    no_parts,
    output_of,
)
from sharding import Axis


def ring_attention(
    q_TNH: jax.Array,
    cell_TKC: jax.Array,
    places: Callable[[jax.Array], jax.Array],
    axis: Axis,
    window: jax.Array | int,
    *,
    block: int,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    values: tuple[int, int] | None = None,
    first: jax.Array | int = 0,
) -> jax.Array:
    """Returns [T, N, V], the output of this device's queries over the run that all have together.

    `places(d)`: int32 [T], the places of device d's tokens in the run, rising. A cell's first H
    numbers are its key, those of `values` its value: the H after the key if not given. A query
    sees the places up to its own, nearer than `window`, from `first` on. `block`: tokens that are
    met at once; it divides T. Softmax in float32. Queries before `first` give zeros.
    """
    T, _, H = q_TNH.shape
    values = values or (H, 2 * H)
    q_BKXH = by_kv_head(
        q_TNH.reshape(T // block, block, *q_TNH.shape[1:]), cell_TKC.shape[1], scale
    )
    begin = no_parts(q_BKXH, block, values[1] - values[0], sinks_N)
    parts = add_ring(
        begin, q_BKXH, cell_TKC, places, axis, window, softcap=softcap, values=values, first=first
    )
    return output_of(parts, block, q_TNH.dtype).reshape(T, q_TNH.shape[1], -1)


def add_ring(
    parts: Parts,
    q_RKXH: jax.Array,
    cell_TKC: jax.Array,
    places: Callable[[jax.Array], jax.Array],
    axis: Axis,
    window: jax.Array | int,
    *,
    softcap: float | None,
    values: tuple[int, int],
    first: jax.Array | int = 0,
) -> Parts:
    """Returns the parts of this device's blocks of queries with those of all devices' keys."""
    R, W = q_RKXH.shape[0], cell_TKC.shape[0] // q_RKXH.shape[0]
    here = axis.here()
    own_RW = places(here).reshape(R, W)
    turn = [(device, (device + 1) % axis.ways) for device in range(axis.ways)]

    def add(hop, parts, cell_TKC):
        place_RW = places((here - hop) % axis.ways).reshape(R, W)
        return add_blocks(parts, q_RKXH, cell_TKC, own_RW, place_RW, window, softcap, values, first)

    def one(hop, carry):
        parts, cell_TKC = carry
        coming_TKC = jax.lax.ppermute(cell_TKC, axis.names, turn)  # while this one is looked at
        return add(hop, parts, cell_TKC), coming_TKC

    last = axis.ways - 1
    if last:
        parts, cell_TKC = jax.lax.fori_loop(0, last, one, (parts, cell_TKC))
    return add(last, parts, cell_TKC)


def add_past(
    parts: Parts,
    q_TNH: jax.Array,
    pool: jax.Array,
    rows: Rows,
    order_T: jax.Array,
    place_T: jax.Array,
    axis: Axis,
    window: jax.Array | int,
    *,
    end: jax.Array,
    scale: float,
    softcap: float | None,
    values: tuple[int, int],
) -> Parts:
    """Returns the parts with those of cells before `end`, which are in the devices' pages.

    Every device looks into its own pages for all queries of the run, `order_T` of which brings them
    into order; `place_T` are its own. `rows` is one row whose queries begin where the run does.
    """
    R, K, X, V = parts.sum_BKXV.shape
    q_1TNH = axis.gather(q_TNH, 0)[order_T][None]
    q_1KXH = by_kv_head(q_1TNH, K, scale)
    C = len(order_T)
    past = add_pages(
        no_parts(q_1KXH, C, V, None),
        q_1KXH,
        pool,
        rows,
        window,
        T=C,
        softcap=softcap,
        values=values,
        stripes=axis,
        end_B=end[None],
    )
    past = merged(past, axis)

    def own(part_1KX):
        """Of this device's queries, in its blocks."""
        rest = part_1KX.shape[3:]
        part_KGT = part_1KX.reshape(K, -1, C, *rest)[:, :, place_T]
        part_KGRW = part_KGT.reshape(K, part_KGT.shape[1], R, -1, *rest)
        return jnp.moveaxis(part_KGRW, 2, 0).reshape(R, K, X, *rest)

    return joined(parts, Parts(*(own(part) for part in past)))


def blocks_seen(
    own_RW: jax.Array, place_RW: jax.Array, window: jax.Array | int, first: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Returns (start_R, stop_R): which of the blocks of keys each block of queries sees any of."""
    last_R, begin_R = place_RW[:, -1], place_RW[:, 0]
    least_R = jnp.maximum(own_RW[:, 0] - window + 1, first)
    start_R = jnp.sum(last_R[None] < least_R[:, None], axis=1, dtype=jnp.int32)
    stop_R = jnp.sum(begin_R[None] <= own_RW[:, -1:], axis=1, dtype=jnp.int32)
    idle_R = own_RW[:, -1] < first
    return start_R, jnp.where(idle_R, start_R, stop_R)


def add_blocks(
    parts: Parts,
    q_RKXH: jax.Array,
    cell_TKC: jax.Array,
    own_RW: jax.Array,
    place_RW: jax.Array,
    window: jax.Array | int,
    softcap: float | None,
    values: tuple[int, int],
    first: jax.Array | int,
) -> Parts:
    """Returns the parts with those of the keys that one device had."""
    R, W = own_RW.shape
    H = q_RKXH.shape[-1]
    start_R, stop_R = blocks_seen(own_RW, place_RW, window, first)
    cell_RKWC = cell_TKC.reshape(R, W, *cell_TKC.shape[1:]).transpose(0, 2, 1, 3)

    def queries(index, parts):
        q_KXH, own_W = q_RKXH[index], own_RW[index]

        def keys(other, carry):
            kv = cell_RKWC[other][None]
            distance_TS = own_W[:, None] - place_RW[other][None, :]
            mask_TS = (distance_TS >= 0) & (distance_TS < window)
            mask_TS = mask_TS & (place_RW[other][None, :] >= first)
            value = kv[..., values[0] : values[1]]
            return accumulate(carry, q_KXH[None], kv[..., :H], value, mask_TS[None], softcap)

        mine = Parts(*(part[index][None] for part in parts))
        mine = jax.lax.fori_loop(start_R[index], stop_R[index], keys, mine)
        return Parts(*(p.at[index].set(m[0]) for p, m in zip(parts, mine, strict=True)))

    return jax.lax.fori_loop(0, R, queries, parts)

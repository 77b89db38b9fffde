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

from pallas_kernels.flash_attention.xla import add_blocks
from pallas_kernels.paged_attention.rows import Rows
from pallas_kernels.paged_attention.xla import (
    Parts,
    add_pages,
    by_kv_head,
    joined,
    merged,
    no_parts,
    output_of,
)
from pallas_kernels.pages import Pages
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
        Pages(pool),
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

# SPDX-License-Identifier: Apache-2.0
"""The operation: keys and values go round, each device attends with its queries.

Ring Attention with blockwise transformers, arXiv 2310.01889. Each device meets the cells that pass
by `flash_attention`, which passes over the blocks that its queries do not see, so that the work of
a device is what its queries see, and the outputs are merged by their log-sum-exps. Masks are by
places in the run, whatever the layout of tokens over devices.

Letters: T tokens of a device, A of the run, N query heads, K KV heads, H width of queries and keys,
V of values, C of a cell.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backends import XLA, Backend
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.paged_attention import Rows, paged_attention
from pallas_kernels.paged_attention.op import merge
from pallas_kernels.pages import Pages
from sharding import ALONE, Axis

Outputs = tuple[jax.Array, jax.Array]  # out_TNV and lse_TN, float32


class Past(NamedTuple):
    """What was stored before a run: cells of the devices' pages.

    rows: one row whose queries begin where the run does, and that sees cells before its `end_B`
    only. order_A: which of all devices' tokens, one device's after the other's, is at each place of
    the run.
    """

    pages: Pages
    rows: Rows
    order_A: jax.Array


def ring_attention(
    q_TNH: jax.Array,
    cell_TKC: jax.Array,
    places: Callable[[jax.Array], jax.Array],
    axis: Axis,
    window: jax.Array | int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    values: tuple[int, int] | None = None,
    first: jax.Array | int = 0,
    past: Past | None = None,
    backend: Backend = XLA,
) -> jax.Array:
    """Returns [T, N, V], the output of this device's queries over the run that all have together.

    `places(d)`: int32 [T], the places of device d's tokens in the run, rising. A cell's first H
    numbers are its key, those of `values` its value: the H after the key if not given. A query
    sees the places up to its own, nearer than `window`, from `first` on, and what of `past` is in
    its window. Softmax in float32. Queries before `first` see no place of the run.
    """
    values = values or (q_TNH.shape[-1], 2 * q_TNH.shape[-1])
    attend = dict(scale=scale, softcap=softcap, values=values, backend=backend, dtype=jnp.float32)
    meet = partial(flash_attention, window=window, first=first, **attend)
    outputs = round_the_ring(meet, q_TNH, cell_TKC, places, axis)
    if past is not None:
        look = partial(paged_attention, window=window, stripes=axis, **attend)
        outputs = jax.lax.cond(
            past.rows.ends()[0] > 0,
            lambda outputs: joined(outputs, of_past(look, q_TNH, past, places, axis)),
            lambda outputs: outputs,
            outputs,
        )
    out_TNV, lse_TN = outputs
    out_1TNV, _ = merge(out_TNV[None], lse_TN[None], sinks_N, ALONE)
    return out_1TNV[0].astype(q_TNH.dtype)


def round_the_ring(
    meet: Callable[..., Outputs],
    q_TNH: jax.Array,
    cell_TKC: jax.Array,
    places: Callable[[jax.Array], jax.Array],
    axis: Axis,
) -> Outputs:
    """Returns the outputs of this device's queries over all devices' cells."""
    here, last = axis.here(), axis.ways - 1
    own_T = places(here)
    turn = [(device, (device + 1) % axis.ways) for device in range(axis.ways)]
    if not last:
        return meet(q_TNH, cell_TKC, own_T, own_T)

    def one(hop, carry):
        outputs, cell_TKC = carry
        coming_TKC = jax.lax.ppermute(cell_TKC, axis.names, turn)  # while this one is looked at
        other_T = places((here - hop) % axis.ways)
        return joined(outputs, meet(q_TNH, cell_TKC, own_T, other_T)), coming_TKC

    # The first hop is to oneself, the last sends nothing on: what comes first is sent before.
    begin = meet(q_TNH, cell_TKC, own_T, own_T), jax.lax.ppermute(cell_TKC, axis.names, turn)
    outputs, cell_TKC = jax.lax.fori_loop(1, last, one, begin)
    other_T = places((here - last) % axis.ways)
    return joined(outputs, meet(q_TNH, cell_TKC, own_T, other_T))


def of_past(
    look: Callable[..., Outputs],
    q_TNH: jax.Array,
    past: Past,
    places: Callable[[jax.Array], jax.Array],
    axis: Axis,
) -> Outputs:
    """Returns the outputs of this device's queries over the past.

    Every device looks into its own pages for all queries of the run.
    """
    q_1ANH = axis.gather(q_TNH, 0)[past.order_A][None]
    out_1ANV, lse_1AN = look(q_1ANH, past.pages, past.rows)
    place_T = places(axis.here())
    return out_1ANV[0, place_T], lse_1AN[0, place_T]


def joined(one: Outputs, other: Outputs) -> Outputs:
    """Returns the outputs over two sets of keys together; those of none have a sum of -1e30."""
    high_TN = jnp.maximum(one[1], other[1])
    weights = [jnp.exp(lse_TN - high_TN) for _, lse_TN in (one, other)]
    total_TN = weights[0] + weights[1]
    out_TNV = one[0] * weights[0][..., None] + other[0] * weights[1][..., None]
    return out_TNV / total_TN[..., None], high_TN + jnp.log(total_TN)

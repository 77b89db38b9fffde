# SPDX-License-Identifier: Apache-2.0
"""Attention over a run of cells for TPU: blocks stream through vector memory by the grid itself.

Tiling. The grid is (KV heads, blocks of queries, blocks of keys), keys innermost: a program has the
X queries of one KV head in its block, heads major, and one block of cells, K beside V, as one
array. Which blocks of keys a block of queries sees is reckoned before and lies in scalar memory;
the grid is as long as the most that any sees.

Pipeline. Pallas fetches the next program's block while this one is worked on. A program beyond the
blocks that are seen fetches nothing: its index is that of the last seen one, which is there.

Lanes are as in `pallas_kernels.paged_attention.tpu`: queries are filled up with zeros to whole
registers, and the values' lanes are cut out at the end.

Memory. `vmem_bytes` is the formula; a call that would not fit is declined.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import Backend
from pallas_kernels.flash_attention.xla import NOWHERE, blocks_seen, padded
from pallas_kernels.paged_attention.rows import Call
from pallas_kernels.softmax import LOWEST, softmax_end, softmax_step
from pallas_kernels.tpu_tiles import LANES, SUBLANES, dot, lacking, limit, up
from pallas_kernels.tuning import block_sizes


class Tile(NamedTuple):
    """The sizes of a call; all static."""

    heads: int  # KV heads
    group: int  # query heads of one
    queries: int  # tokens of a block of queries
    cells: int  # of a block of keys
    width: int  # of a cell
    keys: int  # lanes of a cell that keys reach
    values: tuple[int, int]  # lanes that values reach
    scale: float
    softcap: float | None

    @property
    def X(self) -> int:  # noqa: N802 - the letter
        return self.group * self.queries

    def vmem_bytes(self, itemsize: int) -> int:
        """What a program takes of the vector memory: blocks twice, sums, temporaries."""
        out = up(self.values[1] - self.values[0], LANES)
        blocks = 2 * itemsize * (self.X * up(self.keys, LANES) + self.cells * up(self.width, LANES))
        places = 2 * 4 * SUBLANES * (self.X + self.cells)
        outputs = 2 * 4 * self.X * (out + SUBLANES)
        sums = 4 * self.X * (out + 3 * LANES)
        return blocks + places + outputs + sums + 4 * 4 * self.X * self.cells


def rule(T: int, S: int, G: int) -> dict[str, int]:
    """Returns the block sizes of shapes that nobody measured."""
    queries = max(SUBLANES, min(512 // G, up(T, SUBLANES)))
    return {"queries": queries, "cells": min(512, up(S, LANES))}


def tile_of(q_TNH: jax.Array, cell_SKC: jax.Array, call: Call, backend: Backend) -> Tile:
    """Returns the sizes of a call: those that it names, that were measured, or of the rule."""
    (T, N, H), (S, K, C) = q_TNH.shape, cell_SKC.shape
    sizes = call.blocks
    if sizes is None:
        shape = {"T": T, "S": S, "N": N, "K": K, "H": H, "C": C}
        dtype, fallback = jnp.dtype(cell_SKC.dtype).name, rule(T, S, N // K)
        sizes = block_sizes(call.operation, backend.chip, shape, dtype, fallback)
    values = call.values[0] // LANES * LANES, min(C, up(call.values[1], LANES))
    keys = min(C, up(H, LANES))
    return Tile(
        K, N // K, sizes["queries"], sizes["cells"], C, keys, values, call.scale, call.softcap
    )


def declines(q_TNH: jax.Array, cell_SKC: jax.Array, call: Call, backend: Backend) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    need = tile_of(q_TNH, cell_SKC, call, backend).vmem_bytes(q_TNH.dtype.itemsize)
    return lacking(need, backend)


def attend(
    q_TNH: jax.Array,
    cell_SKC: jax.Array,
    place_T: jax.Array,
    place_S: jax.Array,
    window: jax.Array | int,
    first: jax.Array,
    call: Call,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_TNV, lse_TN), float32, without sinks."""
    T, N, _ = q_TNH.shape
    tile = tile_of(q_TNH, cell_SKC, call, backend)
    K, G, W = tile.heads, tile.group, tile.queries
    q_TNH, place_T = padded(q_TNH, place_T, W, -1)
    cell_SKC, place_S = padded(cell_SKC, place_S, tile.cells, NOWHERE)
    R, Q = len(place_T) // W, len(place_S) // tile.cells
    own_RW = place_T.reshape(R, W)
    start_R, stop_R = blocks_seen(own_RW, place_S.reshape(Q, tile.cells), window, first)
    settings = jnp.stack([jnp.asarray(window, jnp.int32), first])
    q = jnp.pad(q_TNH, ((0, 0), (0, 0), (0, tile.keys - q_TNH.shape[-1])))
    q_KRXY = q.reshape(R, W, K, G, -1).transpose(2, 0, 3, 1, 4).reshape(K, R, tile.X, -1)
    own_R1X = jnp.broadcast_to(own_RW[:, None], (R, G, W)).reshape(R, 1, tile.X)
    cell_KSC = cell_SKC.transpose(1, 0, 2)
    width = tile.values[1] - tile.values[0]

    most = jnp.maximum(jnp.max(stop_R - start_R), 1)  # of a program that sees none, outputs are 0

    def of_keys(r, s, start, stop):
        return jnp.minimum(jnp.minimum(start[r] + s, jnp.maximum(stop[r] - 1, start[r])), Q - 1)

    inputs = [q_KRXY, own_R1X, cell_KSC, place_S[None]]
    in_specs = [
        pl.BlockSpec((1, 1, tile.X, tile.keys), lambda k, r, s, *_: (k, r, 0, 0)),
        pl.BlockSpec((1, 1, tile.X), lambda k, r, s, *_: (r, 0, 0)),
        pl.BlockSpec(
            (1, tile.cells, tile.width),
            lambda k, r, s, start, stop, _: (k, of_keys(r, s, start, stop), 0),
        ),
        pl.BlockSpec(
            (1, tile.cells), lambda k, r, s, start, stop, _: (0, of_keys(r, s, start, stop))
        ),
    ]
    outputs = [(tile.X, width), (1, tile.X)]
    out_shape = [jax.ShapeDtypeStruct((K, R, *block), jnp.float32) for block in outputs]
    out_specs = [
        pl.BlockSpec((1, 1, *block), lambda k, r, s, *_: (k, r, 0, 0)) for block in outputs
    ]
    scratch = [
        *(pltpu.VMEM((tile.X, lanes), jnp.float32) for lanes in (LANES, LANES, width)),
        pltpu.VMEM((tile.X, LANES), jnp.int32),
    ]
    blocks = zip([*in_specs, *out_specs], [*inputs, *out_shape], strict=True)
    need = tile.vmem_bytes(q_TNH.dtype.itemsize)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(K, R, most),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=limit(need, backend, blocks, scratch),
        ),
        # Of all blocks: which are seen is data.
        cost_estimate=pl.CostEstimate(
            flops=2 * K * R * tile.X * Q * tile.cells * (tile.keys + width),
            transcendentals=K * R * tile.X * Q * tile.cells,
            bytes_accessed=(q_KRXY.size + R * cell_KSC.size) * q_TNH.dtype.itemsize
            + K * R * tile.X * width * 4,
        ),
        interpret=backend.interpret,
        name="flash_attention",
    )(start_R, stop_R, settings, *inputs)

    def by_token(x_KRXV):
        x = x_KRXV.reshape(K, R, G, W, -1).transpose(1, 3, 0, 2, 4)
        return x.reshape(R * W, N, -1)[:T]

    begin, end = (lane - tile.values[0] for lane in call.values)
    return by_token(out)[..., begin:end], by_token(lse.swapaxes(2, 3))[..., 0]


def _kernel(start, stop, settings, q_ref, own_ref, cell_ref, place_ref, *outs, tile: Tile) -> None:
    out_ref, lse_ref, high, total, out, own = outs
    r, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        high[...] = jnp.full_like(high, LOWEST)
        total[...] = jnp.zeros_like(total)
        out[...] = jnp.zeros_like(out)
        own[...] = jnp.broadcast_to(own_ref[0].T, own.shape)

    @pl.when(start[r] + s < stop[r])
    def _():
        place_1S = place_ref[...]
        distance_XS = own[:, :1] - place_1S
        seen_XS = (distance_XS >= 0) & (distance_XS < settings[0]) & (place_1S >= settings[1])
        cell_SC = cell_ref[0]
        logits_XS = dot(q_ref[0, 0], cell_SC[:, : tile.keys]) * tile.scale
        if tile.softcap is not None:
            logits_XS = tile.softcap * jnp.tanh(logits_XS / tile.softcap)
        logits_XS = jnp.where(seen_XS, logits_XS, LOWEST)
        now_X1, sum_X1, keep_X1, weight_XS = softmax_step(high[:, :1], total[:, :1], logits_XS)
        high[...] = jnp.broadcast_to(now_X1, high.shape)
        total[...] = jnp.broadcast_to(sum_X1, total.shape)
        value_SZ = cell_SC[:, tile.values[0] : tile.values[1]]
        out[...] = out[...] * keep_X1 + dot(weight_XS.astype(value_SZ.dtype), value_SZ, contract=0)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        out_ref[0, 0], lse_X1 = softmax_end(out[...], high[:, :1], total[:, :1])
        # Numbers of queries come and go as rows: as a column each would take 128 lanes in memory.
        lse_ref[0, 0] = lse_X1.T

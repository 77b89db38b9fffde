# SPDX-License-Identifier: Apache-2.0
"""New cells into pages for TPU: strips of cells are read, changed and written back.

Tiling. A TPU's memory is written in strips: as many cells of a page as a register has rows of the
type (8 of float32, 16 of bfloat16, 32 of a byte), all heads. A run of tokens falls into a known
number of strips at most; XLA brings the new cells into their places in them, which are few numbers.

Pipeline. A program has `STRIPS` strips: it starts to read all of them (but those that are new
whole), and as they come puts the new cells in and starts to write them. Two runs may meet within a
strip, as pieces of one prompt do: a strip that an earlier one of the program has is left until
those are written. What stands beside the cells of a page (scales, bias) is one strip, cells along
lanes, and is written likewise.

Memory. `vmem_bytes` is the formula; where strips are in scalar memory takes `SCALARS` numbers of
each.

Letters: M strips of a run, N of all, S cells of a strip.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import Backend
from pallas_kernels.pages import Pages
from pallas_kernels.tpu_tiles import LANES, SUBLANES, lacking, limit

STRIPS = 16  # of a program: their reads hide each other's wait
SCALARS, SCALAR_BYTES = 5, 512 * 1024  # of a strip, and what is taken of a core's 1 MiB at most


def strip_cells(dtype) -> int:
    """Returns the cells of a strip."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def vmem_bytes(pages: Pages) -> int:
    """Returns what a program takes at most: new cells twice and those read, of all its strips, and
    what is made of one of them as numbers."""
    _, K, W, C = pages.cells.shape
    itemsize = jnp.dtype(pages.cells.dtype).itemsize
    strip = K * strip_cells(pages.cells.dtype) * C
    side = K * SUBLANES * W if pages.scale_PK2W is not None else 0
    return max((3 * STRIPS * itemsize + 16) * strip, (3 * STRIPS * 4 + 16) * side)


def declines(pages: Pages, tokens: int, run: int, backend: Backend) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    W, C = pages.cells.shape[2:]
    cells = strip_cells(pages.cells.dtype)
    if W % cells:
        return f"page_size={W} of {pages.cells.dtype}; a multiple of {cells} is needed"
    if backend.interpret:
        return None
    if C % LANES:
        return f"cells of {C} numbers; whole registers of {LANES} are needed"
    if (pages.scale_PK2W is not None or pages.bias_PKW is not None) and W % LANES:
        return f"page_size={W} with scales or a bias; a multiple of {LANES} is needed"
    if (reason := lacking(vmem_bytes(pages), backend)) is not None:
        return reason
    scalars = 4 * SCALARS * (tokens // run * strips_of(run, cells) + STRIPS)
    if scalars > SCALAR_BYTES:
        return f"{tokens} tokens in runs of {run}: {scalars} bytes of scalar memory; give fewer"
    return None


def strips_of(run: int, S: int) -> int:
    """Returns how many strips of S cells a run falls into at most."""
    return (run - 1 + S - 1) // S + 1


def store(
    pages: Pages, new: Pages, page_T: jax.Array, offset_T: jax.Array, run: int, backend: Backend
) -> Pages:
    """Returns the pages with what is new of each token stored, zeros behind cells."""
    W, C = pages.cells.shape[2:]
    S = strip_cells(pages.cells.dtype)
    need = vmem_bytes(pages)
    where = strips(page_T, offset_T, run, S, W)
    cell_TKC = jnp.pad(new.cells, ((0, 0), (0, 0), (0, C - new.cells.shape[-1])))
    cells = write(pages.cells, by_strip(cell_TKC, where, 2), where, backend, need, lanes=False)
    scale_PK2W, bias_PKW = pages.scale_PK2W, pages.bias_PKW
    if scale_PK2W is not None or bias_PKW is not None:
        where = strips(page_T, offset_T, run, W, W)  # a page's are one strip, cells along lanes
    if scale_PK2W is not None and new.scale_PK2W is not None:
        scale_NK2S = by_strip(new.scale_PK2W, where, 3)
        scale_PK2W = write(scale_PK2W, scale_NK2S, where, backend, need, lanes=True)
    if bias_PKW is not None and new.bias_PKW is not None:
        bias_NKS = by_strip(new.bias_PKW, where, 2)
        bias_PKW = write(bias_PKW, bias_NKS, where, backend, need, lanes=True)
    return Pages(cells, scale_PK2W, bias_PKW)


def by_strip(new: jax.Array, where: "Strips", axis: int) -> jax.Array:
    """Returns what is new of each token, [T, ...], by strips, with their cells along `axis`.

    Of a strip for one token it is that token's, along an axis of 1, whatever cell it is for.
    """
    if where.token_NS is None:
        spare = ((0, len(where.page_N) - len(new)), *((0, 0),) * (new.ndim - 1))
        return jnp.expand_dims(jnp.pad(new, spare), axis)
    return jnp.moveaxis(new[where.token_NS], 1, axis)


class Strips(NamedTuple):
    """Where strips are, and which of their cells are new: [low, high) of each.

    token_NS: which token is in each cell; None: strip n is of token n alone. again_N: whether an
    earlier strip of the same program has the place.
    """

    token_NS: jax.Array | None
    page_N: jax.Array
    offset_N: jax.Array  # of a strip's first cell in its page
    low_N: jax.Array
    high_N: jax.Array
    again_N: jax.Array


def strips(page_T: jax.Array, offset_T: jax.Array, run: int, S: int, W: int) -> Strips:
    """Returns all strips of S cells of all runs, whole programs of them; some have nothing new."""
    if run == 1:
        low_T = offset_T % S
        fields = [page_T, offset_T - low_T, low_T, jnp.where(page_T > 0, low_T + 1, low_T)]
        return whole_programs(None, fields)
    runs, M = len(page_T) // run, strips_of(run, S)
    first_R = offset_T.reshape(runs, run)[:, 0]
    index_MS = jnp.arange(M * S, dtype=jnp.int32).reshape(M, S)
    token_RMS = index_MS[None] - (first_R % S)[:, None, None]
    is_token = (token_RMS >= 0) & (token_RMS < run)
    begin_R = jnp.arange(runs, dtype=jnp.int32) * run
    flat_RMS = jnp.clip(token_RMS, 0, run - 1) + begin_R[:, None, None]
    page_RMS = jnp.where(is_token, page_T[flat_RMS], 0)
    is_kept, index_11S = page_RMS > 0, index_MS[:1][None]
    offset_RM = (first_R // S * S)[:, None] + jnp.arange(M, dtype=jnp.int32)[None] * S
    fields = [
        page_RMS.max(axis=-1),
        offset_RM % W,
        jnp.where(is_kept, index_11S, S).min(axis=-1),
        jnp.where(is_kept, index_11S + 1, 0).max(axis=-1),
    ]
    return whole_programs(flat_RMS.reshape(runs * M, S), [f.reshape(-1) for f in fields])


def whole_programs(token_NS: jax.Array | None, fields: list[jax.Array]) -> Strips:
    """Returns strips, filled up with such as have nothing new."""
    spare = -len(fields[0]) % STRIPS
    if token_NS is not None:
        token_NS = jnp.pad(token_NS, ((0, spare), (0, 0)))
    page_N, offset_N, low_N, high_N = (jnp.pad(field, (0, spare)) for field in fields)
    # Of the strips of a program, one before the other.
    page_IX, offset_IX, any_IX = (
        field.reshape(-1, STRIPS) for field in (page_N, offset_N, high_N > low_N)
    )
    is_same = (page_IX[:, :, None] == page_IX[:, None]) & any_IX[:, None]
    is_same &= offset_IX[:, :, None] == offset_IX[:, None]
    again_IX = (is_same & np.tri(STRIPS, k=-1, dtype=bool)[None]).any(axis=-1)
    again_N = again_IX.reshape(-1).astype(jnp.int32)
    return Strips(token_NS, page_N, offset_N, low_N, high_N, again_N)


def write(
    pool: jax.Array, new: jax.Array, where: Strips, backend: Backend, need: int, *, lanes: bool
) -> jax.Array:
    """Returns `pool` with strips written. Cells lie along `lanes`, or along the axis before."""
    strip = (STRIPS, *new.shape[1:])
    cells = pool.shape[-1] if lanes else strip_cells(pool.dtype)
    axis = new.ndim - (1 if lanes else 2)
    buffer = tuple(cells if a == axis else size for a, size in enumerate(strip))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    spec = pl.BlockSpec(strip, lambda i, *_: (i, *(0,) * (new.ndim - 1)))
    gates = pltpu.SemaphoreType.DMA((STRIPS,))
    scratch = [pltpu.VMEM(buffer, pool.dtype), gates, gates]
    scalars = where[1:]
    assert len(scalars) == SCALARS, "as the memory is reckoned"
    return pl.pallas_call(
        functools.partial(_kernel, lanes=lanes),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(len(new) // STRIPS,),
            in_specs=[spec, anywhere],
            out_specs=anywhere,
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=limit(need, backend, [(spec, new)], scratch),
            has_side_effects=True,
        ),
        # What is new is read, its strips are read, and written.
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=(new.size + 2 * len(new) * math.prod(buffer[1:])) * pool.dtype.itemsize,
        ),
        interpret=backend.interpret,
        name="kv_write",
    )(*scalars, new, pool)


def _kernel(
    page, offset, low, high, again, new, pool_in, pool, buffer, arrived, gone, *, lanes: bool
) -> None:
    del pool_in  # the same memory as `pool`
    first, axis = pl.program_id(0) * STRIPS, buffer.ndim - (1 if lanes else 2)
    cells = buffer.shape[axis]

    def place(n):
        if lanes:
            return pool.at[page[first + n]]
        start = pl.multiple_of(offset[first + n], cells)
        return pool.at[page[first + n], :, pl.ds(start, cells), :]

    def reading(n):
        return pltpu.make_async_copy(place(n), buffer.at[n], arrived.at[n])

    def writing(n):
        return pltpu.make_async_copy(buffer.at[n], place(n), gone.at[n])

    def is_any(n):
        return high[first + n] > low[first + n]

    def is_whole(n):
        return high[first + n] - low[first + n] == cells

    def begin(n):
        @pl.when(jnp.logical_not(is_whole(n)))
        def _():
            reading(n).start()

    def change(n):
        @pl.when(jnp.logical_not(is_whole(n)))
        def _():
            reading(n).wait()
            shape = tuple(cells if a == axis else 1 for a in range(1, buffer.ndim))
            index = jax.lax.broadcasted_iota(jnp.int32, shape, axis - 1)
            is_new = (index >= low[first + n]) & (index < high[first + n])
            kept, came = buffer[n].astype(jnp.float32), new[n].astype(jnp.float32)
            buffer[n] = jnp.where(is_new, came, kept).astype(buffer.dtype)

        @pl.when(is_whole(n))
        def _():
            buffer[n] = jnp.broadcast_to(new[n], buffer.shape[1:])

        writing(n).start()

    def end(n):
        writing(n).wait()

    def alone(n):
        for each in (begin, change, end):
            each(n)

    def each_strip(act, is_again):
        def one(n, nothing):
            pl.when(is_any(n) & (again[first + n] == is_again))(lambda: act(n))
            return nothing

        jax.lax.fori_loop(0, STRIPS, one, 0)

    for act in (begin, change, end):
        each_strip(act, 0)
    each_strip(alone, 1)

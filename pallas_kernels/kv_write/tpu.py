# SPDX-License-Identifier: Apache-2.0
"""New cells into pages for TPU: strips of cells are read, changed and written back.

Tiling. A TPU's memory is written in strips: as many cells of a page as a register has rows of the
type (8 of float32, 16 of bfloat16, 32 of a byte), all heads. A run of tokens falls into a known
number of strips at most; XLA brings the new cells into their places in them, which are few numbers.

Pipeline. A program has `STRIPS` strips: it starts to read all of them (but those that are new
whole), and as they come puts the new cells in and starts to write them. No two strips are the same
place, since rows never share a page that is written, so their order is free. What stands beside the
cells of a page (scales, bias) is one strip, cells along lanes, and is written likewise.

Memory. `vmem_bytes` is the formula.

Letters: M strips of a run, N of all, S cells of a strip.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import Backend
from pallas_kernels.pages import Pages

LANES, SUBLANES = 128, 8
STRIPS = 16  # of a program: their reads hide each other's wait


def strip_cells(dtype) -> int:
    """Returns the cells of a strip."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def vmem_bytes(pages: Pages) -> int:
    """Returns what a program takes at most: new cells twice, those read, and as much to merge."""
    _, K, W, C = pages.cells.shape
    cells = K * strip_cells(pages.cells.dtype) * C * 4
    sides = K * SUBLANES * W * 4 if pages.scale_PK2W is not None else 0
    return 5 * STRIPS * max(cells, sides)


def declines(pages: Pages, run: int, backend: Backend) -> str | None:
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
    if vmem_bytes(pages) > backend.vmem_bytes * 3 // 4:
        return f"{vmem_bytes(pages)} bytes of vector memory; {backend.vmem_bytes} are there"
    return None


def store(
    pages: Pages, new: Pages, page_T: jax.Array, offset_T: jax.Array, run: int, backend: Backend
) -> Pages:
    """Returns the pages with what is new of each token stored, zeros behind cells."""
    W, C = pages.cells.shape[2:]
    S = strip_cells(pages.cells.dtype)
    limit = max(16 * 2**20, vmem_bytes(pages))
    where = strips(page_T, offset_T, run, S, W)
    cell_TKC = jnp.pad(new.cells, ((0, 0), (0, 0), (0, C - new.cells.shape[-1])))
    cell_NKSC = cell_TKC[where.token_NS].transpose(0, 2, 1, 3)
    cells = write(pages.cells, cell_NKSC, where, backend, limit, lanes=False)
    scale_PK2W, bias_PKW = pages.scale_PK2W, pages.bias_PKW
    if scale_PK2W is not None or bias_PKW is not None:
        where = strips(page_T, offset_T, run, W, W)  # a page's are one strip, cells along lanes
    if scale_PK2W is not None and new.scale_PK2W is not None:
        scale_NK2S = new.scale_PK2W[where.token_NS].transpose(0, 2, 3, 1)
        scale_PK2W = write(scale_PK2W, scale_NK2S, where, backend, limit, lanes=True)
    if bias_PKW is not None and new.bias_PKW is not None:
        bias_NKS = new.bias_PKW[where.token_NS].transpose(0, 2, 1)
        bias_PKW = write(bias_PKW, bias_NKS, where, backend, limit, lanes=True)
    return Pages(cells, scale_PK2W, bias_PKW)


class Strips(NamedTuple):
    """Where strips are, and which of their cells are new: [low, high) of each."""

    token_NS: jax.Array
    page_N: jax.Array
    offset_N: jax.Array  # of a strip's first cell in its page
    low_N: jax.Array
    high_N: jax.Array


def strips(page_T: jax.Array, offset_T: jax.Array, run: int, S: int, W: int) -> Strips:
    """Returns all strips of S cells of all runs, whole programs of them; some have nothing new."""
    runs, M = len(page_T) // run, (run - 1 + S - 1) // S + 1
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
    spare = -runs * M % STRIPS
    token_NS = jnp.pad(flat_RMS.reshape(runs * M, S), ((0, spare), (0, 0)))
    return Strips(token_NS, *(jnp.pad(field.reshape(-1), (0, spare)) for field in fields))


def write(
    pool: jax.Array, new: jax.Array, where: Strips, backend: Backend, limit: int, *, lanes: bool
) -> jax.Array:
    """Returns `pool` with strips written. Cells lie along `lanes`, or along the axis before."""
    strip = (STRIPS, *new.shape[1:])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    scalars = where[1:]
    return pl.pallas_call(
        functools.partial(_kernel, lanes=lanes),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(len(new) // STRIPS,),
            in_specs=[
                pl.BlockSpec(strip, lambda i, *_: (i, *(0,) * (new.ndim - 1))),
                anywhere,
            ],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM(strip, pool.dtype),
                pltpu.SemaphoreType.DMA((STRIPS,)),
                pltpu.SemaphoreType.DMA((STRIPS,)),
            ],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=limit, has_side_effects=True
        ),
        # What is new is read, its strips are read, and written.
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=3 * new.size * pool.dtype.itemsize
        ),
        interpret=backend.interpret,
        name="kv_write",
    )(*scalars, new, pool)


def _kernel(
    page, offset, low, high, new, pool_in, pool, buffer, arrived, gone, *, lanes: bool
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

    def begin(n, nothing):
        @pl.when(is_any(n) & jnp.logical_not(is_whole(n)))
        def _():
            reading(n).start()

        return nothing

    def change(n, nothing):
        @pl.when(is_any(n) & jnp.logical_not(is_whole(n)))
        def _():
            reading(n).wait()
            shape = tuple(cells if a == axis else 1 for a in range(1, buffer.ndim))
            index = jax.lax.broadcasted_iota(jnp.int32, shape, axis - 1)
            is_new = (index >= low[first + n]) & (index < high[first + n])
            kept, came = buffer[n].astype(jnp.float32), new[n].astype(jnp.float32)
            buffer[n] = jnp.where(is_new, came, kept).astype(buffer.dtype)

        @pl.when(is_whole(n))
        def _():
            buffer[n] = new[n]

        @pl.when(is_any(n))
        def _():
            writing(n).start()

        return nothing

    def end(n, nothing):
        @pl.when(is_any(n))
        def _():
            writing(n).wait()

        return nothing

    for each in (begin, change, end):
        jax.lax.fori_loop(0, STRIPS, each, 0)

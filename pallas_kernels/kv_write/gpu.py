# SPDX-License-Identifier: Apache-2.0
"""New cells into pages for GPUs (Triton): a program a token stores its cells of all heads.

A cell of a head is a run of numbers in memory, so a program is as many stores as there are heads,
and reads nothing of the pages. Nothing is shared: a program's numbers are in registers, at most
`REGISTER_NUMBERS` of them at a time, for which heads are taken in turn.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.backends import Backend
from pallas_kernels.gpu_tiles import cannot_number
from pallas_kernels.kv_write.xla import store_sides
from pallas_kernels.pages import Pages

REGISTER_NUMBERS = 16384


def lanes(pool: jax.Array) -> int:
    """Returns a cell's numbers, filled up to a power of two."""
    return pl.next_power_of_2(pool.shape[3])


def declines(pages: Pages, tokens: int, run: int, backend: Backend) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    if lanes(pages.cells) > REGISTER_NUMBERS:
        width = pages.cells.shape[3]
        return f"cells of {width} numbers; {REGISTER_NUMBERS} fit a program's registers"
    return cannot_number(pages.cells)


def store(
    pages: Pages, new: Pages, page_T: jax.Array, offset_T: jax.Array, run: int, backend: Backend
) -> Pages:
    """Returns the pages with what is new stored; XLA does what stands beside cells."""
    cells = store_cells(pages.cells, new.cells, page_T, offset_T, backend)
    return store_sides(pages, new, page_T, offset_T)._replace(cells=cells)


def store_cells(
    pool: jax.Array,
    cell_TKC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    backend: Backend,
) -> jax.Array:
    """Returns `pool` [P, K, W, C] with the cells stored, zeros behind them."""
    P, K, W, C = pool.shape
    cell_TKC = jnp.pad(cell_TKC, ((0, 0), (0, 0), (0, lanes(pool) - cell_TKC.shape[-1])))
    flat = pl.pallas_call(
        functools.partial(_kernel, heads=K, page_size=W, width=C),
        out_shape=jax.ShapeDtypeStruct((P * K * W, C), pool.dtype),
        grid=(len(page_T),),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=pl.no_block_spec,
        input_output_aliases={3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * cell_TKC.size * pool.dtype.itemsize
        ),
        interpret=bool(backend.interpret),
        name="kv_write",
    )(page_T, offset_T, cell_TKC, pool.reshape(P * K * W, C))
    return flat.reshape(pool.shape)


def _kernel(page, offset, cells, pool_in, pool, *, heads: int, page_size: int, width: int) -> None:
    del pool_in  # the same memory as `pool`
    t = pl.program_id(0)
    index_C = jnp.arange(cells.shape[-1], dtype=jnp.int32)
    number = page[t]

    def one(head, nothing):
        row = (number * heads + head) * page_size + offset[t]
        mask = (index_C < width) & (number > 0)
        plgpu.store(pool.at[row, index_C], cells[t, head], mask=mask)
        return nothing

    jax.lax.fori_loop(0, heads, one, 0)

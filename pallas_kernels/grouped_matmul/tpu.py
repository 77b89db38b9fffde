# SPDX-License-Identifier: Apache-2.0
"""The grouped product for TPU: the matrices of experts that are hit stream by, each once.

Tiling. The grid is (tiles of F, visits, tiles of D); a visit is one expert's part of a tile of C
rows (`visits`). How many there are is data, and the grid ends with them: what is not hit costs
nothing. A tile of rows that experts share stays in vector memory from visit to visit, and each
stores its own rows of the result. Where D is one tile, as the rule has it while memory lasts, the
block of a matrix stays too for all tiles of its expert: each matrix is read once, rows once a tile
of F. All blocks are found by the scalars that are fetched ahead, the layer among them, so that a
stack of layers is read in place.

Pipeline. Pallas fetches the blocks of the next visit during this one. A block's product is taken in
steps of D, so that what the compiler unrolls is bounded; codes become numbers a step at a time, and
the scales of a group multiply its partial sums, not its matrix. A last tile of D that is not whole
is multiplied by its real length: nothing behind the end is ever read.

Cores. Tiles of F are independent and two at least where F allows it: v5p shares them out to its two
cores.

Memory. `vmem_bytes` is the formula; the rule makes tiles smaller until they fit, and a call that
would not fit even so is declined.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import MIB, Backend
from pallas_kernels.grouped_matmul.visits import most_visits, visits_of
from pallas_kernels.grouped_matmul.weights import Stack, cost
from pallas_kernels.tpu_tiles import LANES, SUBLANES, dot, lacking, limit, room, up
from pallas_kernels.tuning import block_sizes

LEAST_ROWS, MOST_ROWS = 128, 512  # of a tile: the matrix unit takes 128 in the time of one
BLOCK_BYTES = 4 * MIB  # of a matrix: large enough that a copy's start does not show
STEP = 1024  # of D
SCALAR_BYTES = 512 * 1024  # of visits; a core has 1 MiB of scalar memory


class Tile(NamedTuple):
    """The sizes of a call; all static.

    rows, width, depth: of a tile, of S, F and D. step: of D, what is multiplied at once. groups:
    of scales, 0 where there are none.
    """

    rows: int
    width: int
    depth: int
    step: int
    S: int
    E: int
    D: int
    F: int
    groups: int
    dtype: Any
    code_dtype: Any

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0 where a scale is the whole output's, or there is none."""
        return self.D // self.groups if self.groups > 1 else 0

    @property
    def widths(self) -> int:
        """Tiles of F."""
        return -(-self.F // self.width)

    @property
    def depths(self) -> int:
        """Tiles of D."""
        return -(-self.D // self.depth)

    def vmem_bytes(self) -> int:
        """What a program takes of the vector memory, temporaries included."""
        rows, width, depth = up(self.rows, 16), up(self.width, LANES), up(self.depth, LANES)
        item, code_item = (jnp.dtype(dtype).itemsize for dtype in (self.dtype, self.code_dtype))
        blocks = rows * depth * item + up(self.depth, 32) * width * code_item + rows * width * 4
        scales = up(self.groups, SUBLANES) * width * 4
        sums = 3 * rows * width * 4  # those of the program, and a product's before and after scales
        step = up(min(self.step, self.depth), LANES)
        numbers = step * width * (4 + item) if self.groups else 0
        # A product of float32 is one of several parts of both sides.
        parts = (rows + width) * step * 4 if item == 4 else 0
        return 2 * (blocks + scales) + sums + numbers + parts


def rule(tile: Tile, room: int) -> dict[str, int]:
    """Returns the sizes for shapes that nobody measured, of such as fit `room` bytes.

    `tile` has the shapes; its sizes are not looked at.
    """
    mean = -(-tile.S // tile.E)
    rows = min(tile.S, max(LEAST_ROWS, min(MOST_ROWS, 1 << (mean - 1).bit_length())))
    step = up(STEP, tile.group) if tile.group else STEP
    matrix_bytes = tile.D * tile.F * jnp.dtype(tile.code_dtype).itemsize
    widths = max(2, -(-matrix_bytes // BLOCK_BYTES))
    width = tile.F if tile.F <= LANES else up(-(-tile.F // widths), LANES)
    depth = tile.D
    while True:
        sizes = {"rows": rows, "width": width, "depth": depth, "step": step}
        if tile._replace(**sizes).vmem_bytes() <= room:
            return sizes
        if width > LANES and width * tile.D > rows * depth:
            width = up(width // 2, LANES)
        elif rows > LEAST_ROWS:
            rows //= 2
        elif depth > step:
            depth = up(depth // 2, step)
        else:
            return sizes


def tile_of(x_SD: jax.Array, stack: Stack, backend: Backend) -> Tile:
    """Returns the sizes of a call."""
    (S, D), (_, E, _, F) = x_SD.shape, stack.codes_LEDF.shape
    shapes = Tile(0, 0, 0, 0, S, E, D, F, stack.groups, x_SD.dtype, stack.codes_LEDF.dtype)
    shape = {"S": S, "E": E, "D": D, "F": F, "G": stack.groups}
    dtype = f"{jnp.dtype(x_SD.dtype).name}/{jnp.dtype(stack.codes_LEDF.dtype).name}"
    fallback = rule(shapes, room(backend))
    return shapes._replace(**block_sizes("grouped_matmul", backend.chip, shape, dtype, fallback))


def declines(x_SD: jax.Array, stack: Stack, backend: Backend) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    if x_SD.dtype not in (jnp.float32, jnp.bfloat16):
        return f"rows of {x_SD.dtype}; float32 or bfloat16 is needed"
    tile = tile_of(x_SD, stack, backend)
    if tile.group and (tile.step % tile.group or tile.depth % tile.group):
        return f"groups of {tile.group} inputs in steps of {tile.step}"
    scalars = 4 * 4 * most_visits(tile.S, tile.E, tile.rows)
    if scalars > SCALAR_BYTES:
        return f"{scalars} bytes of visits; {SCALAR_BYTES} of scalar memory are to be had"
    if backend.interpret:
        return None
    if tile.group % LANES:
        return f"groups of {tile.group} inputs; a multiple of {LANES} is needed"
    return lacking(tile.vmem_bytes(), backend)


def multiply(x_SD: jax.Array, stack: Stack, sizes_E: jax.Array, backend: Backend) -> jax.Array:
    """Returns float32 y_SF. See `grouped_matmul`."""
    tile = tile_of(x_SD, stack, backend)
    visits = visits_of(sizes_E, tile.S, tile.rows, aligned=True)
    scalars = [
        stack.layer.astype(jnp.int32).reshape(1),
        visits.expert_V,
        visits.start_V // tile.rows,
        visits.begin_V,
        visits.end_V,
    ]
    block = (None, None, tile.depth, tile.width)
    in_specs = [
        pl.BlockSpec((tile.rows, tile.depth), lambda f, v, d, at, e, t, *_: (t[v], d)),
        pl.BlockSpec(block, lambda f, v, d, at, e, *_: (at[0], e[v], d, f)),
    ]
    inputs = [x_SD, stack.codes_LEDF]
    if stack.scales_LEGF is not None:
        block = (None, None, tile.groups, tile.width)
        in_specs.append(pl.BlockSpec(block, lambda f, v, d, at, e, *_: (at[0], e[v], 0, f)))
        inputs.append(stack.scales_LEGF)
    out_shape = jax.ShapeDtypeStruct((tile.S, tile.F), jnp.float32)
    out_specs = pl.BlockSpec((tile.rows, tile.width), lambda f, v, d, at, e, t, *_: (t[v], f))
    scratch = [pltpu.VMEM((tile.rows, tile.width), jnp.float32)]
    blocks = [*zip(in_specs, inputs, strict=True), (out_specs, out_shape)]
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            # Where no row has an expert, one idle visit: a grid always has a first program.
            grid=(tile.widths, jnp.maximum(visits.total, 1), tile.depths),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=limit(tile.vmem_bytes(), backend, blocks, scratch),
        ),
        cost_estimate=cost(x_SD, stack, tile.widths),
        interpret=backend.interpret,
        name="grouped_matmul",
    )(*scalars, *inputs)


def _kernel(layer, expert_V, tile_V, begin_V, end_V, x_ref, codes_ref, *refs, tile: Tile):
    """Adds a tile of D to a visit's sums, and stores the visit's rows after the last.

    Scalars: see `Visits`. x_ref: VMEM [C, depth]. codes_ref: VMEM [depth, width]. refs: the scales,
    VMEM [G, width], where there are some; y_ref and the sums, VMEM [C, width].
    """
    *scales, y_ref, sums_ref = refs
    v, d = pl.program_id(1), pl.program_id(2)

    @pl.when(d == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    rest = tile.D - (tile.depths - 1) * tile.depth
    add = functools.partial(_add, d, x_ref, codes_ref, scales, sums_ref, tile)
    if tile.depths > 1:
        pl.when(d < tile.depths - 1)(functools.partial(add, tile.depth))

    @pl.when(d == tile.depths - 1)
    def _():
        add(rest)
        y_CF = sums_ref[...]
        if tile.groups == 1:
            y_CF = y_CF * scales[0][...]
        index_C1 = jax.lax.broadcasted_iota(jnp.int32, (tile.rows, 1), 0)
        row_C1 = tile_V[v] * tile.rows + index_C1
        own_C1 = (row_C1 >= begin_V[v]) & (row_C1 < end_V[v])
        # Other rows are of the visits before and behind, or nobody's.
        y_ref[...] = jnp.where(own_C1, y_CF, y_ref[...])


def _add(d, x_ref, codes_ref, scales, sums_ref, tile: Tile, depth: int) -> None:
    """Adds the product of the first `depth` inputs of a tile of D to the sums."""

    def some(start, size: int, first_group) -> None:
        each = tile.group or size
        for at in range(0, size, each):
            inputs = pl.ds(start + at, each)
            numbers_DF = numbers_of(codes_ref[inputs, :], x_ref.dtype)
            product_CF = dot(x_ref[:, inputs], numbers_DF, contract=0)
            if tile.group:
                product_CF = product_CF * scales[0][pl.ds(first_group + at // each, 1), :]
            sums_ref[...] += product_CF

    whole = depth // tile.step
    of_step, before = (
        (tile.step // tile.group, d * (tile.depth // tile.group)) if tile.group else (0, 0)
    )
    if whole == 1:
        some(0, tile.step, before)
    elif whole:

        def one(i, carry):
            some(pl.multiple_of(i * tile.step, tile.step), tile.step, before + i * of_step)
            return carry

        jax.lax.fori_loop(0, whole, one, 0)
    if depth % tile.step:
        some(whole * tile.step, depth % tile.step, before + whole * of_step)


def numbers_of(codes_DF: jax.Array, dtype: Any) -> jax.Array:
    """Returns codes as numbers of a dtype, which holds them all."""
    if codes_DF.dtype == dtype:
        return codes_DF
    return codes_DF.astype(jnp.float32).astype(dtype)

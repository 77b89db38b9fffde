# SPDX-License-Identifier: Apache-2.0
"""The grouped product for GPU: a program a visit and tile of F, in a loop over D.

Tiling. A visit is a tile of C rows of one expert (`visits`), from where the expert's rows start:
nobody shares it, so that an expert of few rows is one visit, and its matrix is read once. Programs
of one tile of F and successive visits are neighbours, so that visits of one expert find its tiles
in the cache that all cores share. How many visits there are is data: those that are idle, at the
end, neither read nor write.

Pipeline. Triton fetches the tiles of `stages` turns of the loop ahead into shared memory. Codes
become numbers in registers, and the scales of a group multiply its partial sums.

Edges. Loads are masked where D, F or an expert's rows end within a tile, so that nothing from
outside reaches a sum; no mask is made where a length is whole.

Memory. `shared_bytes` is the formula; the rule takes fewer stages until they fit, and a call that
would not fit even so is declined.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.backends import Backend
from pallas_kernels.gpu_tiles import (
    LEAST,
    across,
    along,
    as_numbers,
    cannot_read,
    compiler_params,
    dot,
    lacking,
    load,
)
from pallas_kernels.grouped_matmul.visits import most_visits, visits_of
from pallas_kernels.grouped_matmul.weights import Stack, cost
from pallas_kernels.tuning import block_sizes

MOST_ROWS = 128  # of a tile, what registers hold
MOST_DEPTH = 64
PROGRAMS = 128  # about as many as a GPU has cores
LEAST_READ = 64  # bytes in a row of a matrix's tile


class Tile(NamedTuple):
    """The sizes of a call; all static.

    rows, width, depth: of a tile, of S, F and D, powers of two. groups: of scales, 0 where there
    are none.
    """

    rows: int
    width: int
    depth: int
    stages: int
    warps: int
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

    def shared_bytes(self) -> int:
        """What a block of threads shares: tiles that were fetched ahead, and codes' numbers."""
        item, code_item = (jnp.dtype(dtype).itemsize for dtype in (self.dtype, self.code_dtype))
        turn = self.rows * self.depth * item + self.depth * self.width * code_item
        numbers = self.depth * self.width * item if self.groups else 0
        return self.stages * turn + numbers


def rule(tile: Tile, room: int) -> dict[str, int]:
    """Returns the sizes for shapes that nobody measured, of such as fit `room` bytes.

    `tile` has the shapes; its sizes are not looked at.
    """
    mean = -(-tile.S // tile.E)
    most = MOST_ROWS if jnp.dtype(tile.dtype).itemsize < 4 else MOST_ROWS // 2
    rows = max(LEAST, min(most, 1 << (mean - 1).bit_length()))
    # Where rows are few, time is the bytes of matrices: more and smaller programs read them.
    width = 64 if rows < 64 else most
    visits = max(min(tile.S, tile.E), tile.S // rows)
    least = LEAST_READ // jnp.dtype(tile.code_dtype).itemsize
    while width > least and visits * -(-tile.F // width) < PROGRAMS:
        width //= 2
    depth = min(MOST_DEPTH, max(LEAST, 1 << (tile.D - 1).bit_length()))
    if tile.group:
        depth = min(depth, tile.group & -tile.group)  # the largest power of two that divides it
    sizes = {"rows": rows, "width": width, "depth": depth, "stages": 4}
    sizes["warps"] = 8 if rows * width >= 128 * 128 else 4
    while sizes["stages"] > 1 and tile._replace(**sizes).shared_bytes() > room:
        sizes["stages"] -= 1
    return sizes


def tile_of(x_SD: jax.Array, stack: Stack, backend: Backend) -> Tile:
    """Returns the sizes of a call."""
    (S, D), (_, E, _, F) = x_SD.shape, stack.codes_LEDF.shape
    shapes = Tile(0, 0, 0, 0, 0, S, E, D, F, stack.groups, x_SD.dtype, stack.codes_LEDF.dtype)
    shape = {"S": S, "E": E, "D": D, "F": F, "G": stack.groups}
    dtype = f"{jnp.dtype(x_SD.dtype).name}/{jnp.dtype(stack.codes_LEDF.dtype).name}"
    fallback = rule(shapes, backend.shared_bytes)
    return shapes._replace(**block_sizes("grouped_matmul", backend.chip, shape, dtype, fallback))


def declines(x_SD: jax.Array, stack: Stack, backend: Backend) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    codes = stack.codes_LEDF
    if x_SD.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"rows of {x_SD.dtype}; float32, bfloat16 or float16 is needed"
    tile = tile_of(x_SD, stack, backend)
    if tile.group % tile.depth:
        return f"groups of {tile.group} inputs in tiles of {tile.depth}"
    if backend.interpret:
        return None
    if tile.depth < LEAST:
        return f"groups of {tile.group} inputs; a multiple of {LEAST} is needed"
    return lacking(tile.shared_bytes(), backend) or cannot_read(codes, backend)


def multiply(x_SD: jax.Array, stack: Stack, sizes_E: jax.Array, backend: Backend) -> jax.Array:
    """Returns float32 y_SF. See `grouped_matmul`."""
    tile = tile_of(x_SD, stack, backend)
    visits = visits_of(sizes_E, tile.S, tile.rows, aligned=False)
    inputs = [
        stack.layer.astype(jnp.int32).reshape(1),
        visits.expert_V,
        visits.begin_V,
        visits.end_V,
        x_SD,
        stack.codes_LEDF,
    ]
    if stack.scales_LEGF is not None:
        inputs.append(stack.scales_LEGF)
    widths = pl.cdiv(tile.F, tile.width)
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        out_shape=jax.ShapeDtypeStruct((tile.S, tile.F), jnp.float32),
        grid=(most_visits(tile.S, tile.E, tile.rows), widths),
        compiler_params=compiler_params(tile.warps, tile.stages, tile.shared_bytes(), backend),
        cost_estimate=cost(x_SD, stack, widths),
        interpret=bool(backend.interpret),
        name="grouped_matmul",
    )(*inputs)


def _kernel(layer, expert_V, begin_V, end_V, x_ref, codes_ref, *refs, tile: Tile):
    """Stores a visit's rows of a tile of F.

    All refs are whole arrays in global memory; refs: the scales where there are some, and y_ref.
    """
    *scales, y_ref = refs
    v, f = pl.program_id(0), pl.program_id(1)
    begin, end = begin_V[v], end_V[v]
    outputs = pl.ds(f * tile.width, tile.width)
    index_F = jnp.arange(tile.width, dtype=jnp.int32)
    in_1F = (f * tile.width + index_F < tile.F)[None] if tile.F % tile.width else None
    index_C = jnp.arange(tile.rows, dtype=jnp.int32)
    own_C1 = (begin + index_C < end)[:, None]

    @pl.when(begin < end)
    def _():
        matrix = layer[0], expert_V[v]
        rows = pl.ds(begin, tile.rows)

        def one(i, sums_CF):
            inputs = pl.ds(i * tile.depth, tile.depth)
            index_D = i * tile.depth + jnp.arange(tile.depth, dtype=jnp.int32)
            in_D = index_D < tile.D if tile.D % tile.depth else None
            x_CD = load(x_ref.at[rows, inputs], own_C1, along(in_D))
            codes_DF = load(
                codes_ref.at[*matrix, inputs, outputs],
                across(in_D),
                in_1F,
            )
            product_CF = dot(x_CD, as_numbers(codes_DF, tile.dtype))
            if tile.group:
                product_CF *= scale_of(i * tile.depth // tile.group)
            return sums_CF + product_CF

        def scale_of(group):
            in_F = None if in_1F is None else in_1F[0]
            return load(scales[0].at[*matrix, group, outputs], in_F)[None]

        sums_CF = jnp.zeros((tile.rows, tile.width), jnp.float32)
        sums_CF = jax.lax.fori_loop(0, pl.cdiv(tile.D, tile.depth), one, sums_CF)
        if tile.groups == 1:
            sums_CF *= scale_of(jnp.int32(0))
        mask_CF = own_C1 if in_1F is None else own_C1 & in_1F
        mask_CF = jnp.broadcast_to(mask_CF, sums_CF.shape)
        plgpu.store(y_ref.at[rows, outputs], sums_CF, mask=mask_CF)

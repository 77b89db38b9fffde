# SPDX-License-Identifier: Apache-2.0
"""The quantized product for GPU: a program a tile of rows and of F, in a loop over columns.

Tiling. Programs of one tile of F and successive tiles of rows are neighbours, so that they find its
codes in the cache that all cores share. Where rows are few (decode), time is the bytes of codes:
tiles of F are then as narrow as it takes to keep all cores reading.

Pipeline. Triton fetches the tiles of `stages` turns of the loop ahead into shared memory. Codes
become numbers in registers: of a byte of two codes there are two products, with the columns of x
that its halves are of (`paired`), which are apart and each in a row. A scale of an output
multiplies its sums at the end, those of groups the products of a turn, which never crosses from one
group to the next. Zeros are taken off by the sums of x's tiles.

Edges. Loads are masked where D, F or T end within a tile, so that nothing from outside reaches a
sum; no mask is made where a length is whole.

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
    both,
    cannot_read,
    compiler_params,
    dot,
    lacking,
    load,
)
from pallas_kernels.quantized_matmul.weights import CENTER, PACK, QuantizedWeight, quantize_rows
from pallas_kernels.tuning import block_sizes

MOST_ROWS = 128  # of a tile, what registers hold
LEAST_INT8 = 32  # inputs of a product of int8
MOST_DEPTH = 128  # columns
PROGRAMS = 128  # about as many as a GPU has cores


class Tile(NamedTuple):
    """The sizes of a call; all static.

    rows, width, depth: of a tile, of T, F and columns, powers of two. dtype: of rows as they are
    multiplied. parts: codes of a column. groups: of scales, 1 where a scale is an output's. zeros:
    as many, or 0.
    """

    rows: int
    width: int
    depth: int
    stages: int
    warps: int
    T: int
    D: int
    F: int
    parts: int
    groups: int
    zeros: int
    dtype: Any
    code_dtype: Any

    @property
    def columns(self) -> int:
        """Of codes, as they are kept."""
        return self.D // self.parts

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0 where a scale is the whole output's."""
        return self.D // self.groups if self.groups > 1 else 0

    @property
    def whole(self) -> int:
        """Columns of whole blocks of bytes; all, if a column is one code."""
        return self.columns // PACK * PACK if self.parts == 2 else self.columns

    def shared_bytes(self) -> int:
        """What a block of threads shares: tiles that were fetched ahead, and codes' numbers."""
        item = jnp.dtype(self.dtype).itemsize
        turn = self.parts * self.rows * self.depth * item + self.width * self.depth
        return self.stages * turn + self.parts * self.width * self.depth * item


def rule(tile: Tile, room: int) -> dict[str, int]:
    """Returns the sizes for shapes that nobody measured, of such as fit `room` bytes.

    `tile` has the shapes; its sizes are not looked at.
    """
    most = MOST_ROWS if jnp.dtype(tile.dtype).itemsize < 4 else MOST_ROWS // 2
    rows = max(LEAST, min(most, 1 << (tile.T - 1).bit_length()))
    width = 64 if rows < 64 else most
    while width > LEAST and pl.cdiv(tile.T, rows) * pl.cdiv(tile.F, width) < PROGRAMS:
        width //= 2
    item = jnp.dtype(tile.dtype).itemsize
    most = MOST_DEPTH // 2 if item > 1 and rows >= 64 else MOST_DEPTH
    least = LEAST_INT8 if item == 1 else LEAST
    depth = min(most, max(least, 1 << (tile.columns - 1).bit_length()))
    if tile.group:
        # Neither half of the last bytes may begin within a tile of another group's.
        rest = tile.columns - tile.whole
        depth = min(depth, tile.group & -tile.group, rest & -rest if rest else depth)
    sizes = {"rows": rows, "width": width, "depth": depth, "stages": 4}
    sizes["warps"] = 8 if rows * width >= 128 * 128 else 4
    while sizes["stages"] > 1 and tile._replace(**sizes).shared_bytes() > room:
        sizes["stages"] -= 1
    return sizes


def tile_of(x_TD: jax.Array, weight: QuantizedWeight, activations: str, backend: Backend) -> Tile:
    """Returns the sizes of a call."""
    (T, D), F = x_TD.shape, weight.codes.shape[0]
    dtype = jnp.dtype(jnp.int8 if activations == "int8" else x_TD.dtype)
    code_dtype, zeros = weight.codes.dtype, 0 if weight.zeros is None else weight.groups
    shapes = Tile(0, 0, 0, 0, 0, T, D, F, weight.parts, weight.groups, zeros, dtype, code_dtype)
    shape = {"T": T, "D": D, "F": F, "G": weight.groups}
    named = f"{dtype.name}/{code_dtype.name}"
    fallback = rule(shapes, backend.shared_bytes)
    return shapes._replace(**block_sizes("quantized_matmul", backend.chip, shape, named, fallback))


def declines(
    x_TD: jax.Array, weight: QuantizedWeight, activations: str, backend: Backend
) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    if x_TD.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"rows of {x_TD.dtype}; float32, bfloat16 or float16 is needed"
    tile = tile_of(x_TD, weight, activations, backend)
    rest = tile.columns - tile.whole
    if tile.group and (tile.group % tile.depth or rest % tile.depth):
        return f"groups of {tile.group} inputs in tiles of {tile.depth}"
    if backend.interpret:
        return None
    least = LEAST_INT8 if activations == "int8" else LEAST
    if tile.depth < least:
        return f"{tile.D} inputs in groups of {tile.group}; tiles of {least} must divide them"
    return lacking(tile.shared_bytes(), backend) or cannot_read(weight.codes, backend)


def multiply(
    x_TD: jax.Array, weight: QuantizedWeight, activations: str, backend: Backend
) -> jax.Array:
    """Returns float32 y_TF. See `quantized_matmul`."""
    tile = tile_of(x_TD, weight, activations, backend)
    arrays = {"codes": weight.codes, "scales": weight.scales}
    if activations == "int8":
        arrays["x"], arrays["row_scale"] = quantize_rows(x_TD)
    else:
        arrays["x"] = x_TD
    if weight.zeros is not None:
        arrays["zeros"] = weight.zeros
    tiles, widths = pl.cdiv(tile.T, tile.rows), pl.cdiv(tile.F, tile.width)
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        out_shape=jax.ShapeDtypeStruct((tile.T, tile.F), jnp.float32),
        grid=(tiles, widths),
        compiler_params=compiler_params(tile.warps, tile.stages, tile.shared_bytes(), backend),
        cost_estimate=pl.CostEstimate(
            flops=2 * tile.T * tile.D * tile.F,
            transcendentals=0,
            bytes_accessed=tile.F * tile.columns
            + widths * tile.T * tile.D * jnp.dtype(tile.dtype).itemsize
            + 4 * tile.F * (tile.groups + tile.zeros + tile.T),
        ),
        interpret=bool(backend.interpret),
        name="quantized_matmul",
    )(arrays)


def _kernel(refs, y_ref, *, tile: Tile):
    """Stores a tile of rows and of F.

    All refs are whole arrays in global memory: x [T, D]; codes [F, X]; scales and zeros, where
    there are some, [F, G]; row_scale [T, 1] of int8 rows; y_ref [T, F].
    """
    t, f = pl.program_id(0), pl.program_id(1)
    rows, outputs = pl.ds(t * tile.rows, tile.rows), pl.ds(f * tile.width, tile.width)
    in_T = within(t * tile.rows, tile.rows, tile.T)
    in_F = within(f * tile.width, tile.width, tile.F)

    def of_group(name, group):
        return load(refs[name].at[outputs, group], in_F)[None]

    def add(i, sums_TF):
        start = i * tile.depth
        in_X = within(start, tile.depth, tile.columns)
        kept_FX = load(
            refs["codes"].at[outputs, pl.ds(start, tile.depth)], across(in_F), along(in_X)
        )
        for first, codes_FX in zip(inputs_of(start, tile), codes_of(kept_FX), strict=True):
            x_TX = load(refs["x"].at[rows, pl.ds(first, tile.depth)], across(in_T), along(in_X))
            product_TF = dot(x_TX, as_numbers(codes_FX, x_TX.dtype), contract=1)
            if tile.group:
                group = jax.lax.div(first, jnp.int32(tile.group))
                product_TF = product_TF.astype(jnp.float32)
                if tile.zeros:
                    product_TF -= row_sums(x_TX) * zeros_of(group)
                product_TF *= of_group("scales", group)
            elif tile.zeros:
                product_TF = product_TF.astype(jnp.float32) - row_sums(x_TX) * zeros_of(
                    jnp.int32(0)
                )
            sums_TF += product_TF
        return sums_TF

    def zeros_of(group):
        return of_group("zeros", group) - (CENTER if tile.parts == 2 else 0)

    integers = tile.dtype == jnp.int8 and not tile.group and not tile.zeros
    sums_TF = jnp.zeros((tile.rows, tile.width), jnp.int32 if integers else jnp.float32)
    sums_TF = jax.lax.fori_loop(0, pl.cdiv(tile.columns, tile.depth), add, sums_TF)
    y_TF = sums_TF.astype(jnp.float32)
    if not tile.group:
        y_TF *= of_group("scales", jnp.int32(0))
    if tile.dtype == jnp.int8:
        y_TF *= load(refs["row_scale"].at[rows, jnp.int32(0)], in_T)[:, None]
    mask = both(y_TF.shape, across(in_T), along(in_F))
    plgpu.store(y_ref.at[rows, outputs], y_TF, mask=mask)


def inputs_of(start, tile: Tile) -> list[jax.Array]:
    """Returns the inputs that a tile of columns begins with, by parts. See `paired`."""
    if tile.parts == 1:
        return [start]
    block = jax.lax.div(start, jnp.int32(PACK))
    # Of two plain numbers, a choice by `where` would not compile.
    is_last = (start >= tile.whole).astype(jnp.int32)
    half = PACK - is_last * (PACK - (tile.columns - tile.whole))
    first = start + block * PACK
    return [first, first + half]


def codes_of(kept_FX: jax.Array) -> list[jax.Array]:
    """Returns the codes that columns have, by parts; of 4 bits as int8 of -8..7."""
    if kept_FX.dtype != jnp.uint8:
        return [kept_FX]
    low, high = kept_FX & jnp.uint8(15), kept_FX >> jnp.uint8(4)
    return [half.astype(jnp.int8) - jnp.int8(CENTER) for half in (low, high)]


def row_sums(x_TX: jax.Array) -> jax.Array:
    """Returns sums_T1 of a tile, float32."""
    total = jnp.int32 if x_TX.dtype == jnp.int8 else jnp.float32
    return x_TX.astype(total).sum(axis=1).astype(jnp.float32)[:, None]


def within(start, size: int, length: int) -> jax.Array | None:
    """Returns which of `size` successive places are within an array; None if all always are."""
    if length % size == 0:
        return None
    return start + jnp.arange(size, dtype=jnp.int32) < length

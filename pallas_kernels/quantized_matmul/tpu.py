# SPDX-License-Identifier: Apache-2.0
"""The quantized product for TPU: codes stream by, and become numbers in registers.

Tiling. The grid is (tiles of rows, tiles of F, tiles of columns). As few tiles of rows as can be:
one while rows are few (decode), for which time is the bytes of the codes, each read once; of up to
512 rows where there are more (prefill), for which it is the products. Columns are one tile while
memory lasts, and the rows' block then stays for all tiles of F.

Pipeline. Pallas fetches the codes of the next tile during this one. A tile is multiplied in steps
of inputs, so that what the compiler unrolls is bounded. Bytes of two codes become two registers of
int8 by shifts of 32-bit words; no code moves, for one has 128 successive inputs, the other the next
128 (`paired`).

Scales. One of an output multiplies its sums at the end. Those of groups of 128 multiply the product
of their 128 inputs. Of smaller groups, few rows are multiplied in copies, each with the inputs of
one group and zeros beside them: the matrix unit takes all copies for one pass over the codes, and
gives the products of the groups one below the other. Many rows are not copied, but the numbers
scaled first; only int8 rows, which no scale may meet, are copied then too. Zeros are taken off at
the end, times the rows' sums by group. The kernel needs a group's scales as a row. XLA keeps [F, G]
by columns unless G is a multiple of 128, so that transposing it outside costs nothing; what it
keeps by rows is transposed within, at the first tile of columns.

Layout. Likewise XLA keeps codes by columns where a row of them is no multiple of 128, and copies
them for this kernel at every call. Who loads such matrices should lay them out by rows.

Edges. The last inputs are multiplied by their real number, so that nothing behind the end is read.

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
from pallas_kernels.quantized_matmul.weights import (
    CENTER,
    QuantizedWeight,
    group_sums,
    quantize_rows,
)
from pallas_kernels.tpu_tiles import LANES, SUBLANES, dot, lacking, limit, room, up
from pallas_kernels.tuning import block_sizes

MOST_ROWS = 512  # of a tile
MOST_COPIED_ROWS = 256  # of which some are copies: beyond it, scaling the numbers is less work
BLOCK_BYTES = 4 * MIB  # of codes: large enough that a copy's start does not show
MOST_WIDTH = 1024  # what is unrolled grows with it, and so does the time to compile
STEP = 8 * LANES  # inputs that are multiplied at once
# Of a word of four bytes, each with its own half and its sign.
LOW_HALVES, SIGNS, CENTERS = 0x0F0F0F0F, -0x7F7F7F80, CENTER * 0x01010101


class Tile(NamedTuple):
    """The sizes of a call; all static.

    rows, width, depth: of a tile, of T, F and columns. dtype: of rows as they are multiplied.
    parts: codes of a column. groups: of scales, 1 where a scale is an output's. zeros: as many,
    or 0.
    """

    rows: int
    width: int
    depth: int
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
    def counts(self) -> tuple[int, int, int]:
        """Tiles of rows, of F and of columns."""
        return (
            pl.cdiv(self.T, self.rows),
            pl.cdiv(self.F, self.width),
            pl.cdiv(self.columns, self.depth),
        )

    @property
    def in_lanes(self) -> int:
        """Groups that 128 inputs have, if more than one."""
        return LANES // self.group if 0 < self.group < LANES else 1

    @property
    def is_turned_within(self) -> bool:
        """Whether scales of groups come as [F, G], not as [G, F]."""
        return self.group > 0 and self.groups % LANES == 0

    @property
    def copies(self) -> int:
        """Of each row: one for each group that 128 inputs have, or only one."""
        if self.dtype == jnp.int8 or self.in_lanes * self.rows <= MOST_COPIED_ROWS:
            return self.in_lanes
        return 1

    @property
    def scaled(self) -> bool:
        """Whether the numbers are scaled, not their products."""
        return self.in_lanes > self.copies

    def vmem_bytes(self) -> int:
        """What a program takes of the vector memory, temporaries included."""
        item = jnp.dtype(self.dtype).itemsize
        rows, many = up(self.rows, 32), up(self.copies * self.rows, 32)
        depth = up(self.depth, LANES)
        inputs, step = self.parts * depth, min(STEP, self.parts * depth)
        blocks = many * inputs * item + self.width * depth + rows * self.width * 4
        scales = self.width * up(self.groups, SUBLANES) * 4
        turned = 2 * scales if self.is_turned_within else 0  # and a temporary
        sums = rows * up(self.groups, LANES) * 4
        blocks += scales * (2 if self.zeros else 1) + (sums if self.zeros else 0)
        blocks += rows * LANES * 4 if item == 1 else 0  # the rows' scales
        # Sums, and a product before and after its scales.
        sums = (rows + 2 * many) * self.width * 4
        numbers = step * self.width * (1 + 4 + item)
        # A product of float32 is one of several parts of both sides.
        parts = (many + self.width) * step * 4 if item == 4 else 0
        return 2 * blocks + turned + sums + numbers + parts


def rule(tile: Tile, room: int) -> dict[str, int]:
    """Returns the sizes for shapes that nobody measured, of such as fit `room` bytes.

    `tile` has the shapes; its sizes are not looked at.
    """
    most = MOST_ROWS // (tile.in_lanes if tile.dtype == jnp.int8 else 1)
    widths = max(2, -(-tile.columns * tile.F // BLOCK_BYTES))
    width = max(LANES, min(MOST_WIDTH, up(-(-tile.F // widths), LANES)))
    depth = tile.columns
    while True:
        tiles = -(-tile.T // most)
        rows = up(tile.T, SUBLANES) if tiles == 1 else up(-(-tile.T // tiles), 32)
        sizes = {"rows": rows, "width": width, "depth": depth}
        if tile._replace(**sizes).vmem_bytes() <= room:
            return sizes
        if width > LANES and width > 2 * rows:
            width = up(width // 2, LANES)
        elif most > 64:
            most //= 2
        elif depth * tile.parts > STEP:
            depth = up(depth // 2, STEP // tile.parts)
        else:
            return sizes


def tile_of(x_TD: jax.Array, weight: QuantizedWeight, activations: str, backend: Backend) -> Tile:
    """Returns the sizes of a call."""
    (T, D), F = x_TD.shape, weight.codes.shape[0]
    dtype = jnp.int8 if activations == "int8" else x_TD.dtype
    code_dtype, zeros = weight.codes.dtype, 0 if weight.zeros is None else weight.groups
    shapes = Tile(
        0, 0, 0, T, D, F, weight.parts, weight.groups, zeros, jnp.dtype(dtype), code_dtype
    )
    shape = {"T": T, "D": D, "F": F, "G": weight.groups}
    named = f"{jnp.dtype(dtype).name}/{code_dtype.name}"
    fallback = rule(shapes, room(backend))
    return shapes._replace(**block_sizes("quantized_matmul", backend.chip, shape, named, fallback))


def declines(
    x_TD: jax.Array, weight: QuantizedWeight, activations: str, backend: Backend
) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    if x_TD.dtype not in (jnp.float32, jnp.bfloat16):
        return f"rows of {x_TD.dtype}; float32 or bfloat16 is needed"
    tile = tile_of(x_TD, weight, activations, backend)
    if tile.group and (tile.group < SUBLANES or (LANES % tile.group and tile.group % LANES)):
        return f"groups of {tile.group} inputs; 8, 16, 32, 64 or a multiple of 128 is needed"
    return lacking(tile.vmem_bytes(), backend)


def multiply(
    x_TD: jax.Array, weight: QuantizedWeight, activations: str, backend: Backend
) -> jax.Array:
    """Returns float32 y_TF. See `quantized_matmul`."""
    tile = tile_of(x_TD, weight, activations, backend)
    rows, width, depth = tile.rows, tile.width, tile.depth
    many = tile.copies * rows
    x_TD = jnp.pad(x_TD, ((0, tile.counts[0] * rows - tile.T), (0, 0)))
    row_scale_T1 = None
    if activations == "int8":
        x_TD, row_scale_T1 = quantize_rows(x_TD)

    arrays = {"x": copied(x_TD, tile), "codes": weight.codes, "scales": weight.scales}
    specs = {
        "x": pl.BlockSpec((many, tile.parts * depth), lambda t, f, d: (t, d)),
        "codes": pl.BlockSpec((width, depth), lambda t, f, d: (f, d)),
        "scales": pl.BlockSpec((tile.groups, width), lambda t, f, d: (0, f)),
    }
    if tile.is_turned_within:
        specs["scales"] = pl.BlockSpec((width, tile.groups), lambda t, f, d: (f, 0))
    if weight.zeros is not None:
        arrays["zeros"], specs["zeros"] = weight.zeros, specs["scales"]
        arrays["sums"] = group_sums(x_TD, tile.groups)
        specs["sums"] = pl.BlockSpec((rows, tile.groups), lambda t, f, d: (t, 0))
    if not tile.is_turned_within:
        arrays |= {name: arrays[name].T for name in ("scales", "zeros") if name in arrays}
    if row_scale_T1 is not None:
        arrays["row_scale"] = row_scale_T1
        specs["row_scale"] = pl.BlockSpec((rows, 1), lambda t, f, d: (t, 0))
    whole_sums = tile.dtype == jnp.int8 and not tile.group
    scratch = [pltpu.VMEM((rows, width), jnp.int32 if whole_sums else jnp.float32)]
    if tile.is_turned_within:
        scratch.append(pltpu.VMEM((tile.groups, width), jnp.float32))
    out_shape = jax.ShapeDtypeStruct((tile.T, tile.F), jnp.float32)
    out_specs = pl.BlockSpec((rows, width), lambda t, f, d: (t, f))
    blocks = [(specs[name], arrays[name]) for name in arrays] + [(out_specs, out_shape)]
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        out_shape=out_shape,
        grid=tile.counts,
        in_specs=[specs],
        out_specs=out_specs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=limit(tile.vmem_bytes(), backend, blocks, scratch),
        ),
        cost_estimate=cost(tile),
        interpret=backend.interpret,
        name="quantized_matmul",
    )(arrays)


def cost(tile: Tile) -> pl.CostEstimate:
    """Returns the estimate of a call."""
    tiles, widths, depths = tile.counts
    item = jnp.dtype(tile.dtype).itemsize
    codes = tile.F * tile.columns
    scales = 4 * tile.F * (tile.groups + tile.zeros)
    rows = tile.copies * tile.T * tile.D * item
    return pl.CostEstimate(
        flops=2 * tile.copies * tile.T * tile.D * tile.F,
        transcendentals=0,
        bytes_accessed=tiles * (codes + scales)
        + (rows if depths == 1 else widths * rows)
        + 4 * tile.T * tile.F,
    )


def copied(x_TD: jax.Array, tile: Tile) -> jax.Array:
    """Returns x_RD: each tile of rows in copies, with zeros in what is not of a copy's group."""
    if tile.copies == 1:
        return x_TD
    copy_of_input = jnp.arange(tile.D, dtype=jnp.int32) % LANES // tile.group
    copies = jnp.arange(tile.copies, dtype=jnp.int32)
    own = copies[None, :, None, None] == copy_of_input[None, None, None]
    each = x_TD.reshape(tile.counts[0], 1, tile.rows, tile.D)
    return jnp.where(own, each, jnp.zeros((), each.dtype)).reshape(-1, tile.D)


def _kernel(refs, y_ref, sums_ref, *turned, tile: Tile):
    """Adds a tile of columns to the sums, and stores a tile of the result after the last.

    refs, in VMEM: x [copies * rows, P * depth]; codes [width, depth]; scales [G, width], or
    [width, G] if they are turned within; zeros, alike, with sums [rows, G], where there are some;
    row_scale [rows, 1] of int8 rows. y_ref, sums_ref: [rows, width]. turned: a place for scales,
    [G, width], if they are turned within.
    """
    d, depths = pl.program_id(2), tile.counts[2]
    scales_ref = turned[0] if tile.is_turned_within else refs["scales"]

    @pl.when(d == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        if tile.is_turned_within:
            scales_ref[...] = refs["scales"][...].T

    def add(inputs: int) -> None:
        """Adds the products of the first inputs of this tile."""

        def some(i, size: int) -> None:
            start, column = (i * step for step in (STEP, STEP // tile.parts))
            if not isinstance(i, int):
                start, column = pl.multiple_of(start, STEP), pl.multiple_of(column, LANES)
            x_ref = refs["x"].at[:, pl.ds(start, size)]
            kept_FX = refs["codes"][:, pl.ds(column, size // tile.parts)]
            if tile.group:
                first = d * (tile.parts * tile.depth) + start
                _add_groups(x_ref, codes_of(kept_FX), first, scales_ref, sums_ref, tile)
            else:
                sums_ref[...] += dot(x_ref[...], codes_of(kept_FX).astype(tile.dtype))

        whole = inputs // STEP
        if whole == 1:
            some(0, STEP)
        elif whole:

            @pl.loop(0, whole)
            def _(i):
                some(i, STEP)

        if inputs % STEP:
            some(whole, inputs % STEP)

    last = tile.parts * (tile.columns - (depths - 1) * tile.depth)
    if depths > 1:
        pl.when(d < depths - 1)(functools.partial(add, tile.parts * tile.depth))

    @pl.when(d == depths - 1)
    def _():
        add(last)
        y_TF = sums_ref[...].astype(jnp.float32)
        if tile.zeros:
            zeros_GF = refs["zeros"][...].T if tile.is_turned_within else refs["zeros"][...]
            zeros_GF = zeros_GF - (CENTER if tile.parts == 2 else 0)
            if tile.group:
                y_TF = y_TF - dot(refs["sums"][...], zeros_GF * scales_ref[...], contract=0)
            else:
                y_TF = y_TF - refs["sums"][...] * zeros_GF
        if not tile.group:
            y_TF = y_TF * scales_ref[...]
        if tile.dtype == jnp.int8:
            y_TF = y_TF * refs["row_scale"][...]
        y_ref[...] = y_TF


def _add_groups(x_ref, codes_FD: jax.Array, first, scales_ref, sums_ref, tile: Tile) -> None:
    """Adds the product of some inputs, from `first` on, times their groups' scales.

    x_ref: [copies * rows, D]; `codes_FD` of the same inputs.
    """
    for at in range(0, codes_FD.shape[1], LANES):
        inputs = slice(at, min(at + LANES, codes_FD.shape[1]))
        codes_FX, x_RX = codes_FD[:, inputs], x_ref[:, inputs]
        length = min(tile.group, LANES)
        group = jax.lax.div(jnp.int32(first + at), jnp.int32(tile.group))
        scales = [scales_ref[pl.ds(group + i, 1), :] for i in range(pl.cdiv(x_RX.shape[1], length))]
        if tile.scaled:
            each = [jnp.broadcast_to(row, (length, tile.width)) for row in scales]
            numbers_FX = codes_FX.astype(jnp.float32) * jnp.concatenate(each).T
            sums_ref[...] += dot(x_RX, numbers_FX.astype(tile.dtype))
            continue
        product_RF = dot(x_RX, codes_FX.astype(tile.dtype)).astype(jnp.float32)
        for i, row in enumerate(scales):
            sums_ref[...] += product_RF[i * tile.rows : (i + 1) * tile.rows] * row


def codes_of(kept_FX: jax.Array) -> jax.Array:
    """Returns the codes of columns in the order of inputs; of 4 bits as int8 of -8..7."""
    if kept_FX.dtype != jnp.uint8:
        return kept_FX
    words = pltpu.bitcast(kept_FX, jnp.int32)

    def low_halves(words: jax.Array) -> jax.Array:
        # The sign bit lends to the difference what it needs, so that no byte touches the next.
        return pltpu.bitcast((((words & LOW_HALVES) | SIGNS) - CENTERS) ^ SIGNS, jnp.int8)

    halves = low_halves(words), low_halves(jax.lax.shift_right_logical(words, jnp.int32(4)))
    blocks = [
        half[:, at : at + LANES] for at in range(0, kept_FX.shape[1], LANES) for half in halves
    ]
    return jnp.concatenate(blocks, axis=1)

# SPDX-License-Identifier: Apache-2.0
"""Paged attention for GPUs (Triton): a program a row, KV head, tile of queries and share of keys.

Tiling. A program has the X queries of one KV head in a tile (heads of its group, up to 64 queries
in all, and at least 16: what tensor cores take) and goes over blocks of S cells with an online
softmax (FlashAttention-2, arXiv 2307.08691). A block's cells may lie in several pages: each cell's
place in memory is reckoned from the table, so that nothing is gathered into memory first.

Split. A decode has few programs for the many processors of a GPU, so a row's keys are shared out
over `splits` programs, whose outputs XLA merges by their log-sum-exps (flash-decoding, PyTorch
blog, October 2023). Blocks outside a row's context and window are nobody's.

Widths. Triton's blocks are powers of two: a head of 96 is 64 and 32 beside each other, a latent
cell of 576 is 512 and 64, and only what is left below 16 is filled up.

Memory. `shared_bytes` is the formula: what the pipeline's stages hold of a block, and the operands
of products. Of sizes that do not fit, fewer stages and then fewer cells are taken.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.backends import Backend, too_many_to_number
from pallas_kernels.paged_attention.rows import Call, Rows
from pallas_kernels.pages import Pages
from pallas_kernels.softmax import LOWEST
from pallas_kernels.tuning import block_sizes

Piece = tuple[int, int, int]  # of some lanes: the first, a power of two, how many are real
LEAST = 16  # of each axis of a product
SPLIT_CELLS = 256  # that a split has at least
PROGRAMS = 264  # two a processor of an H100
MOST_QUERIES = 64  # of a program


class Tile(NamedTuple):
    """The sizes of a call; all static."""

    queries: int  # of a row in a tile
    tiles: int  # of a row
    group: int  # query heads of a program
    parts: int  # programs that share out the query heads of a KV head
    X: int  # queries of a KV head in a tile, filled up
    kv_heads: int
    page: int
    cell: int
    table: int
    cells: int  # of a block
    splits: int
    warps: int
    stages: int
    keys: tuple[Piece, ...]
    values: tuple[Piece, ...]
    latent: int | None
    page_dtype: Any
    dtype: Any
    scaled: bool
    biased: bool
    tree: bool
    ways: int
    scale: float
    softcap: float | None

    @property
    def heads(self) -> int:
        """Programs that share out all query heads."""
        return self.kv_heads * self.parts

    @property
    def width(self) -> int:
        """Numbers of the output, pieces filled up."""
        return sum(width for _, width, _ in self.values)

    def shared_bytes(self) -> int:
        """What a program takes of shared memory."""
        size = jnp.dtype(self.page_dtype).itemsize
        lanes = sum(width for _, width, _ in self.keys) + (self.latent is None) * self.width
        operands = self.X * (sum(width for _, width, _ in self.keys) + self.cells)
        if self.page_dtype != self.dtype:  # what is made of a block's codes, for both products
            operands += 2 * self.cells * lanes
        return self.stages * self.cells * lanes * size + operands * jnp.dtype(self.dtype).itemsize


def cut(first: int, last: int) -> tuple[Piece, ...]:
    """Returns the pieces of some lanes."""
    found = []
    while first < last:
        left = last - first
        width = max(LEAST, 1 << (left.bit_length() - 1))
        found.append((first, width, min(width, left)))
        first += width
    return tuple(found)


def power(number: int) -> int:
    """Returns the least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def rule(B: int, T: int, N: int, K: int, W: int, J: int) -> dict[str, int]:
    """Returns the block sizes of shapes that nobody measured."""
    heads = max(d for d in range(1, MOST_QUERIES + 1) if N // K % d == 0)
    queries = max(1, min(T, MOST_QUERIES // heads))
    programs = B * (N // heads) * -(-T // queries)
    most = max(1, J * W // SPLIT_CELLS)
    sizes = {"queries": queries, "heads": heads, "cells": 64, "warps": 4, "stages": 3}
    return sizes | {"splits": max(1, min(most, -(-PROGRAMS // programs), 64))}


def declines(
    q_BTNH: jax.Array, pages: Pages, rows: Rows, call: Call, backend: Backend
) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    W = pages.cells.shape[2]
    if W & (W - 1):
        return f"page_size={W} is no power of two"
    tile = tile_of(q_BTNH, pages, rows, call, backend)
    if tile.group * tile.parts * tile.kv_heads != q_BTNH.shape[2]:
        return f"{tile.group} query heads a program, which share out no KV head's evenly"
    need = tile.shared_bytes()
    if need > backend.shared_bytes:
        return f"{need} bytes of shared memory; there are {backend.shared_bytes}"
    return too_many_to_number(pages.cells)


def tile_of(q_BTNH: jax.Array, pages: Pages, rows: Rows, call: Call, backend: Backend) -> Tile:
    """Returns the sizes of a call: those that it names, that were measured, or of the rule."""
    B, T, N, H = q_BTNH.shape
    _, K, W, C = pages.cells.shape
    J, latent = rows.table_BJ.shape[1], call.latent
    sizes = call.blocks
    if sizes is None:
        shape = {"B": B, "T": T, "N": N, "K": K, "H": H, "W": W, "J": J}
        dtype = f"{jnp.dtype(q_BTNH.dtype).name}/{jnp.dtype(pages.cells.dtype).name}"
        sizes = block_sizes(call.operation, backend.chip, shape, dtype, rule(B, T, N, K, W, J))
    tree = rows.ancestors_BT is not None
    queries = T if tree else min(T, sizes["queries"])
    keys = cut(0, H) if latent is None else (*cut(0, latent), *cut(latent, H))
    heads = sizes["heads"]
    tile = Tile(
        queries=queries,
        tiles=-(-T // queries),
        group=heads,
        parts=N // K // heads,
        X=max(LEAST, power(queries * heads)),
        kv_heads=K,
        page=W,
        cell=C,
        table=J,
        cells=sizes["cells"],
        splits=sizes["splits"],
        warps=sizes["warps"],
        stages=sizes["stages"],
        keys=keys,
        values=cut(*call.values),
        latent=latent,
        page_dtype=pages.cells.dtype,
        dtype=q_BTNH.dtype,
        scaled=pages.scale_PK2W is not None,
        biased=pages.bias_PKW is not None,
        tree=tree,
        ways=call.ways,
        scale=call.scale,
        softcap=call.softcap,
    )
    while tile.shared_bytes() > backend.shared_bytes and tile.stages > 1:
        tile = tile._replace(stages=tile.stages - 1)
    while tile.shared_bytes() > backend.shared_bytes and tile.cells > LEAST:
        tile = tile._replace(cells=tile.cells // 2)
    return tile


def attend(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    stripe: jax.Array | int,
    call: Call,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BTNV, lse_BTN), float32: over the pages of this device, without sinks.

    The log-sum-exp of a query that sees nothing is LOWEST, and its output 0.
    """
    tile = tile_of(q_BTNH, pages, rows, call, backend)
    B, T, _, _ = q_BTNH.shape
    programs = (tile.splits, B, tile.tiles, tile.heads, tile.X)
    shapes = [(*programs, tile.width), programs]
    out, lse = _call(q_BTNH, pages, rows, window, stripe, tile, backend, shapes)
    high = lse.max(axis=0)
    share = jnp.where(lse > LOWEST / 2, jnp.exp(lse - high[None]), 0.0)
    total = share.sum(axis=0)
    out = (out * share[..., None]).sum(axis=0) / jnp.maximum(total, 1e-30)[..., None]
    lse = jnp.where(total > 0, high + jnp.log(jnp.maximum(total, 1e-30)), LOWEST)
    places = [width for _, width, _ in tile.values]
    starts = [sum(places[:index]) for index in range(len(places))]
    real = [out[..., s : s + r] for s, (_, _, r) in zip(starts, tile.values, strict=True)]
    out_BTNV = by_token(jnp.concatenate(real, axis=-1), tile, T)
    return out_BTNV, by_token(lse[..., None], tile, T)[..., 0]


def mass(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    stripe: jax.Array | int,
    lse_BTN: jax.Array,
    call: Call,
    backend: Backend,
) -> jax.Array:
    """Returns mass_BKS, float32: the weights that each cell of a row's table gets in all."""
    tile = tile_of(q_BTNH, pages, rows, call, backend)
    B, S = q_BTNH.shape[0], tile.table * tile.page
    shapes = [(tile.tiles, B, tile.heads, -(-S // tile.cells) * tile.cells)]
    [found] = _call(q_BTNH, pages, rows, window, stripe, tile, backend, shapes, lse_BTN)
    found = found.sum(axis=0).reshape(B, tile.kv_heads, tile.parts, -1)
    return found.sum(axis=2)[..., :S]


def _call(q_BTNH, pages, rows, window, stripe, tile: Tile, backend: Backend, shapes, lse_BTN=None):
    """Returns what the kernel writes into arrays of these shapes."""
    B, _, _, H = q_BTNH.shape
    P, K, W, C = pages.cells.shape
    scalars = [rows.table_BJ, rows.start_B, rows.count_B, rows.ends()]
    scalars.append(jnp.stack([jnp.asarray(window, jnp.int32), jnp.asarray(stripe, jnp.int32)]))
    if tile.tree:
        pad = ((0, 0), (0, power(tile.queries) - tile.queries))
        assert rows.depth_BT is not None and rows.ancestors_BT is not None, "trees have both"
        scalars += [jnp.pad(field, pad) for field in (rows.depth_BT, rows.ancestors_BT)]
    inputs = [*scalars, by_program(q_BTNH, tile, tile.keys)]
    if lse_BTN is not None:
        inputs.append(by_program(lse_BTN[..., None], tile, ((0, 1, 1),))[..., 0])
    inputs.append(pages.cells.reshape(P * K * W, C))
    if tile.scaled:
        inputs.append(pages.scale_PK2W)
    if tile.biased:
        inputs.append(pages.bias_PKW)
    pairs = B * tile.tiles * tile.queries * tile.group * tile.heads * tile.table * W
    # What it writes into is zeros: programs write where they have been.
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    zeros = [jnp.zeros(shape, jnp.float32) for shape in shapes] if lse_BTN is not None else []
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile, gives_mass=lse_BTN is not None, inputs=len(inputs)),
        out_shape=outputs,
        grid=(B, tile.heads * tile.splits, tile.tiles),
        in_specs=[pl.no_block_spec] * (len(inputs) + len(zeros)),
        out_specs=[pl.no_block_spec] * len(outputs),
        input_output_aliases={len(inputs): 0} if zeros else {},
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (H + tile.width),
            transcendentals=pairs,
            bytes_accessed=B * tile.tiles * tile.table * K * W * C * pages.cells.dtype.itemsize,
        ),
        interpret=bool(backend.interpret),
        name="attention_mass" if lse_BTN is not None else "paged_attention",
    )(*inputs, *zeros)


def by_program(x_BTNY: jax.Array, tile: Tile, pieces) -> jax.Array:
    """Returns [B, tiles, heads, X, Y]: the queries of a program, pieces filled up."""
    B, T, N, _ = x_BTNY.shape
    queries, tiles, heads = tile.queries, tile.tiles, tile.heads
    parts = [
        jnp.pad(x_BTNY[..., lane : lane + real], ((0, 0), (0, 0), (0, 0), (0, width - real)))
        for lane, width, real in pieces
    ]
    x = jnp.concatenate(parts, axis=-1)
    x = jnp.pad(x, ((0, 0), (0, tiles * queries - T), (0, 0), (0, 0)))
    x = x.reshape(B, tiles, queries, heads, N // heads, -1).transpose(0, 1, 3, 4, 2, 5)
    x = x.reshape(B, tiles, heads, queries * (N // heads), -1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, tile.X - x.shape[3]), (0, 0)))


def by_token(x_BIKXV: jax.Array, tile: Tile, T: int) -> jax.Array:
    """Returns [B, T, N, V] of what is by program."""
    B, tiles, heads, _, V = x_BIKXV.shape
    x = x_BIKXV[:, :, :, : tile.queries * tile.group]
    x = x.reshape(B, tiles, heads, tile.group, tile.queries, V).transpose(0, 1, 4, 2, 3, 5)
    return x.reshape(B, tiles * tile.queries, heads * tile.group, V)[:, :T]


def _kernel(*refs, tile: Tile, gives_mass: bool, inputs: int) -> None:
    table, start_ref, count_ref, end_ref, settings, *refs_ = refs[:inputs]
    outs = refs[inputs + gives_mass :]
    tree, refs_ = (refs_[:2], refs_[2:]) if tile.tree else ([], refs_)
    q_ref, *refs_ = refs_
    lse_ref, refs_ = (refs_[0], refs_[1:]) if gives_mass else (None, refs_)
    cells_ref, *sides = refs_
    b, i = pl.program_id(0), pl.program_id(2)
    part, split = pl.program_id(1) // tile.splits, pl.program_id(1) % tile.splits
    head = part // tile.parts
    start, count, end = start_ref[b], count_ref[b], end_ref[b]
    window, stripe = settings[0], settings[1]
    done = 0 if tile.tree else i * tile.queries
    tile_end = jnp.minimum(start + done + tile.queries, end)
    least = jnp.maximum(start + done - window + 1, 0)
    ways, shift = tile.ways, tile.page.bit_length() - 1
    # In places of this device's own table, cell by cell: what it holds of [least, end).
    first = (((least >> shift) - stripe + ways - 1) // ways) << shift
    last = ((((tile_end + tile.page - 1) >> shift) - stripe + ways - 1) // ways) << shift
    last = jnp.maximum(jnp.minimum(last, tile.table * tile.page), first)
    last = jnp.where(count > done, last, first)
    begin, stop = first // tile.cells, (last + tile.cells - 1) // tile.cells
    share = (stop - begin + tile.splits - 1) // tile.splits
    begin = begin + split * share
    stop = jnp.minimum(begin + share, stop)
    index_S = jnp.arange(tile.cells, dtype=jnp.int32)
    index_X = jnp.arange(tile.X, dtype=jnp.int32)
    token_X = index_X % tile.queries + done
    pieces = [sum(w for _, w, _ in tile.keys[:n]) for n in range(len(tile.keys))]
    q_pieces = [
        q_ref[b, i, part, :, lane : lane + width]
        for lane, (_, width, _) in zip(pieces, tile.keys, strict=True)
    ]
    if tile.tree:
        depth_X, bits_X = (ref[b, index_X % tile.queries] for ref in tree)

    def block(turn):
        """Returns (place_S, page_S, offset_S, logits_XS, value pieces, scales)."""
        place_S = turn * tile.cells + index_S  # in this device's table
        inside_S = (place_S >= first) & (place_S < last)
        page_S = plgpu.load(table.at[b, place_S >> shift], mask=inside_S, other=0)
        offset_S = place_S & (tile.page - 1)
        cell_S = ((((place_S >> shift) * ways + stripe) << shift) + offset_S).astype(jnp.int32)
        used_S = inside_S & (cell_S >= least) & (cell_S < end)
        row_S = (page_S * tile.kv_heads + head) * tile.page + offset_S

        def numbers(lane, width, real):
            index_Y = lane + jnp.arange(width, dtype=jnp.int32)
            mask = used_S[:, None] & (index_Y < lane + real)[None]
            where = cells_ref.at[row_S[:, None], index_Y[None]]
            if tile.page_dtype == tile.dtype:
                return plgpu.load(where, mask=mask, other=0)
            codes = plgpu.load(where, mask=mask)  # Triton has no zeros of 8-bit floats
            return jnp.where(mask, codes.astype(jnp.float32), 0.0).astype(tile.dtype)

        def side(ref, *where):
            return plgpu.load(ref.at[page_S, head, *where, offset_S], mask=used_S, other=0.0)

        scales = [side(sides[0], 0), side(sides[0], 1)] if tile.scaled else []
        logits_XS, kept = jnp.zeros((tile.X, tile.cells), jnp.float32), []
        for q_XY, piece in zip(q_pieces, tile.keys, strict=True):
            key_SY = numbers(*piece)
            product = dot(q_XY, key_SY.T)
            if tile.scaled:
                behind = tile.latent is not None and piece[0] >= tile.latent
                product = product * scales[1 if behind else 0][None]
            logits_XS += product
            kept.append(key_SY)
        logits_XS *= tile.scale
        if tile.softcap is not None:
            logits_XS = tile.softcap * tanh(logits_XS / tile.softcap)
        if tile.biased:
            logits_XS += jnp.maximum(side(sides[-1]), LOWEST)[None]
        own_S = cell_S - start
        if tile.tree:
            token_S = jnp.clip(own_S, 0, tile.queries - 1)
            depth_S = jnp.where(own_S >= 0, tree[0][b, token_S], own_S)
            bit_XS = (bits_X[:, None] >> token_S[None]) & 1
            seen_XS = (depth_X[:, None] - depth_S[None] < window) & (
                (own_S < 0)[None] | (bit_XS == 1)
            )
        else:
            distance_XS = token_X[:, None] - own_S[None]
            seen_XS = (distance_XS >= 0) & (distance_XS < window)
        logits_XS = jnp.where(used_S[None] & seen_XS, logits_XS, LOWEST)
        if gives_mass:
            return place_S, logits_XS, (), scales
        # A latent's value is what its key begins with.
        is_same = tile.latent is not None and tile.values == tile.keys[: len(tile.values)]
        value_pieces = (
            kept[: len(tile.values)] if is_same else [numbers(*piece) for piece in tile.values]
        )
        return place_S, logits_XS, tuple(value_pieces), scales

    if lse_ref is not None:
        lse_X = lse_ref[b, i, part]
        real_X = (token_X < count) & (index_X < tile.queries * tile.group)

        def add_mass(turn, nothing):
            place_S, logits_XS, _, _ = block(turn)
            weight_XS = jnp.exp(logits_XS - lse_X[:, None])
            weight_XS = jnp.where(real_X[:, None] & (logits_XS > LOWEST / 2), weight_XS, 0.0)
            outs[0][i, b, part, place_S] = jnp.sum(weight_XS, axis=0)
            return nothing

        jax.lax.fori_loop(begin, stop, add_mass, 0)
        return

    def one(turn, carry):
        high_X, total_X, sums = carry
        _, logits_XS, value_pieces, scales = block(turn)
        now_X = jnp.maximum(high_X, jnp.max(logits_XS, axis=1))
        weight_XS = jnp.where(logits_XS > LOWEST / 2, jnp.exp(logits_XS - now_X[:, None]), 0.0)
        keep_X = jnp.exp(high_X - now_X)
        total_X = total_X * keep_X + jnp.sum(weight_XS, axis=1)
        if tile.scaled:
            weight_XS = weight_XS * scales[1 if tile.latent is None else 0][None]
        weight_XS = weight_XS.astype(tile.dtype)
        sums = tuple(
            sum_XV * keep_X[:, None] + dot(weight_XS, value_SV)
            for sum_XV, value_SV in zip(sums, value_pieces, strict=True)
        )
        return now_X, total_X, sums

    zeros_X = jnp.zeros(tile.X, jnp.float32)
    sums = tuple(jnp.zeros((tile.X, width), jnp.float32) for _, width, _ in tile.values)
    high_X, total_X, sums = jax.lax.fori_loop(begin, stop, one, (zeros_X + LOWEST, zeros_X, sums))
    out_ref, lse_out = outs
    lane = 0
    for sum_XV, (_, width, _) in zip(sums, tile.values, strict=True):
        out_XV = sum_XV / jnp.maximum(total_X, 1e-30)[:, None]
        out_ref[split, b, i, part, :, lane : lane + width] = out_XV
        lane += width
    logs_X = high_X + jnp.log(jnp.maximum(total_X, 1e-30))
    lse_out[split, b, i, part] = jnp.where(total_X > 0, logs_X, LOWEST)


def dot(a, b):
    """Returns a product of two matrices, accumulated in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def tanh(x):
    """Returns tanh(x), which Triton has no operation for: of exponentials that do not overflow."""
    small = jnp.exp(-2.0 * jnp.abs(x))
    return jnp.sign(x) * (1.0 - small) / (1.0 + small)

# SPDX-License-Identifier: Apache-2.0
"""Paged attention for GPUs (Triton): a program a row, KV head, tile of queries and share of keys.

Tiling. A program has the X queries of one KV head in a tile (heads of its group, up to 64 queries
in all, and at least 16: what tensor cores take) and goes over blocks of S cells with an online
softmax (FlashAttention-2, arXiv 2307.08691). A block's cells may lie in several pages: each cell's
place in memory is reckoned from the table, so that nothing is gathered into memory first.

Split. A decode has few programs for the many processors of a GPU, so a row's keys are shared out
over `splits` programs, whose outputs XLA merges by their log-sum-exps (flash-decoding, PyTorch
blog, October 2023). Blocks outside a row's context and window are nobody's.

Widths are cut into powers of two: see `pallas_kernels.gpu_tiles`.

Memory. `shared_bytes` is the formula: what the pipeline's stages hold of a block, and the operands
of products. Of sizes that do not fit, fewer stages and then fewer cells are taken.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends import Backend
from pallas_kernels.gpu_tiles import (
    LEAST,
    Piece,
    across,
    along,
    as_numbers,
    cannot_read,
    compiler_params,
    cut,
    dot,
    index_of,
    lacking,
    load,
    power,
    tanh,
    total_width,
)
from pallas_kernels.paged_attention.rows import Call, Rows
from pallas_kernels.pages import Pages
from pallas_kernels.softmax import LOWEST, softmax_end, softmax_step
from pallas_kernels.tuning import block_sizes

SPLIT_CELLS = 256  # that a split has at least
PROGRAMS = 264  # two a processor of an H100
MOST_QUERIES = 64  # of a program
MOST_SUMS = 64 * 256  # numbers of a program's output that the registers of four warps hold


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
        return total_width(self.values)

    def shared_bytes(self) -> int:
        """What a program takes of shared memory."""
        size = jnp.dtype(self.page_dtype).itemsize
        keys = total_width(self.keys)
        lanes = keys + (self.latent is None) * self.width
        operands = self.X * (keys + self.cells)
        if self.page_dtype != self.dtype:  # what is made of a block's codes, for both products
            operands += 2 * self.cells * lanes
        return self.stages * self.cells * lanes * size + operands * jnp.dtype(self.dtype).itemsize


def rule(B: int, T: int, N: int, K: int, W: int, J: int, V: int, tree: bool) -> dict[str, int]:
    """Returns the block sizes of shapes that nobody measured.

    All queries of a tree are one program's. Sums of very many numbers need the registers of more
    warps.
    """
    most = max(1, MOST_QUERIES // T) if tree else MOST_QUERIES
    heads = max(d for d in range(1, most + 1) if N // K % d == 0)
    queries = T if tree else max(1, min(T, MOST_QUERIES // heads))
    programs = B * (N // heads) * -(-T // queries)
    most_splits = max(1, J * W // SPLIT_CELLS)
    splits = max(1, min(most_splits, -(-PROGRAMS // programs), 64))
    warps = 8 if power(heads * queries) * V > MOST_SUMS else 4
    sizes = {"queries": queries, "heads": heads, "cells": 64, "warps": warps, "stages": 3}
    return sizes | {"splits": splits}


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
    reason = lacking(tile.shared_bytes(), backend)
    return reason if backend.interpret else reason or cannot_read(pages.cells, backend)


def tile_of(q_BTNH: jax.Array, pages: Pages, rows: Rows, call: Call, backend: Backend) -> Tile:
    """Returns the sizes of a call: those that it names, that were measured, or of the rule."""
    B, T, N, H = q_BTNH.shape
    _, K, W, C = pages.cells.shape
    J, latent = rows.table_BJ.shape[1], call.latent
    sizes, tree = call.blocks, rows.ancestors_BT is not None
    if sizes is None:
        shape = {"B": B, "T": T, "N": N, "K": K, "H": H, "W": W, "J": J}
        dtype = f"{jnp.dtype(q_BTNH.dtype).name}/{jnp.dtype(pages.cells.dtype).name}"
        fallback = rule(B, T, N, K, W, J, call.values[1] - call.values[0], tree)
        sizes = block_sizes(call.operation, backend.chip, shape, dtype, fallback)
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
    out, lse = (out[0], lse[0]) if tile.splits == 1 else merged(out, lse)
    starts = itertools.accumulate((piece.width for piece in tile.values), initial=0)
    real = [out[..., s : s + piece.real] for s, piece in zip(starts, tile.values, strict=False)]
    out_BTNV = by_token(jnp.concatenate(real, axis=-1), tile, T)
    return out_BTNV, by_token(lse[..., None], tile, T)[..., 0]


def merged(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs and log-sum-exps of all splits, the first axis, together."""
    high = lse.max(axis=0)
    share = jnp.where(lse > LOWEST / 2, jnp.exp(lse - high[None]), 0.0)
    total = share.sum(axis=0)
    out = (out * share[..., None]).sum(axis=0) / jnp.maximum(total, 1e-30)[..., None]
    return out, jnp.where(total > 0, high + jnp.log(jnp.maximum(total, 1e-30)), LOWEST)


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
    settings = jnp.stack([jnp.asarray(window, jnp.int32), jnp.asarray(stripe, jnp.int32)])
    inputs = {
        "table": rows.table_BJ,
        "start": rows.start_B,
        "count": rows.count_B,
        "end": rows.ends(),
        "settings": settings,
        "q": q_BTNH,
        "cells": pages.cells.reshape(P * K * W, C),
        "scale": pages.scale_PK2W,
        "bias": pages.bias_PKW,
        "depth": rows.depth_BT,
        "ancestors": rows.ancestors_BT,
        "lse": lse_BTN,
    }
    inputs = {name: array for name, array in inputs.items() if array is not None}
    pairs = B * tile.tiles * tile.queries * tile.group * tile.heads * tile.table * W
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    # What masses are written into is zeros: programs write where they have been.
    zeros = [jnp.zeros(shape, jnp.float32) for shape in shapes] if lse_BTN is not None else []
    kernel = functools.partial(_kernel, tile=tile, names=tuple(inputs), filled=len(zeros))
    return pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid=(B, tile.heads * tile.splits, tile.tiles),
        in_specs=[pl.no_block_spec] * (len(inputs) + len(zeros)),
        out_specs=[pl.no_block_spec] * len(outputs),
        input_output_aliases={len(inputs): 0} if zeros else {},
        compiler_params=compiler_params(tile.warps, tile.stages, tile.shared_bytes(), backend),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (H + tile.width),
            transcendentals=pairs,
            bytes_accessed=B * tile.tiles * tile.table * K * W * C * pages.cells.dtype.itemsize,
        ),
        interpret=bool(backend.interpret),
        name="attention_mass" if lse_BTN is not None else "paged_attention",
    )(*inputs.values(), *zeros)


def by_token(x_BIKXV: jax.Array, tile: Tile, T: int) -> jax.Array:
    """Returns [B, T, N, V] of what is by program."""
    B, tiles, heads, _, V = x_BIKXV.shape
    x = x_BIKXV[:, :, :, : tile.queries * tile.group]
    x = x.reshape(B, tiles, heads, tile.group, tile.queries, V).transpose(0, 1, 4, 2, 3, 5)
    return x.reshape(B, tiles * tile.queries, heads * tile.group, V)[:, :T]


class _Program(NamedTuple):
    """What a program reads, which part of the work is its own, and its queries.

    first, last: of the cells of its row in the order of this device's table, those that it looks
    into. token_X, query_X: which token and query head each query is; real_X: whether it is one.
    """

    tile: Tile
    refs: Mapping[str, Any]
    b: Any
    head: Any
    start: Any
    end: Any
    window: Any
    stripe: Any
    least: Any
    first: Any
    last: Any
    token_X: jax.Array
    query_X: jax.Array
    real_X: jax.Array


class _Block(NamedTuple):
    """The cells of a block: their places in the table, their numbers, where they lie, who is used.

    The cell that a place is, counted over all devices, and its row in the pool.
    """

    place_S: jax.Array
    cell_S: jax.Array
    page_S: jax.Array
    offset_S: jax.Array
    row_S: jax.Array
    used_S: jax.Array


def _kernel(*refs, tile: Tile, names: tuple[str, ...], filled: int) -> None:
    named, outs = dict(zip(names, refs, strict=False)), refs[len(names) + filled :]
    b, i = pl.program_id(0), pl.program_id(2)
    part, split = pl.program_id(1) // tile.splits, pl.program_id(1) % tile.splits
    at = _program(named, tile, b, part, i)
    begin, stop = at.first // tile.cells, (at.last + tile.cells - 1) // tile.cells
    share = (stop - begin + tile.splits - 1) // tile.splits
    begin = begin + split * share
    stop = jnp.minimum(begin + share, stop)
    queries = [_queries(at, piece) for piece in tile.keys]
    if "lse" in named:
        _add_masses(at, queries, begin, stop, outs[0], (i, b, part))
        return

    def one(turn, carry):
        high_X1, total_X1, sums = carry
        block = _block(at, turn)
        logits_XS, keys = _logits(at, block, queries)
        high_X1, total_X1, keep_X1, weight_XS = softmax_step(high_X1, total_X1, logits_XS)
        if tile.scaled:
            weight_XS = weight_XS * _scale(at, block, 1 if tile.latent is None else 0)[None]
        weight_XS = weight_XS.astype(tile.dtype)
        # A latent's value is what its key begins with.
        is_same = tile.latent is not None and tile.values == tile.keys[: len(tile.values)]
        values = keys if is_same else [_numbers(at, block, piece) for piece in tile.values]
        sums = tuple(
            sum_XV * keep_X1 + dot(weight_XS, value_SV)
            for sum_XV, value_SV in zip(sums, values, strict=False)
        )
        return high_X1, total_X1, sums

    zeros_X1 = jnp.zeros((tile.X, 1), jnp.float32)
    sums = tuple(jnp.zeros((tile.X, piece.width), jnp.float32) for piece in tile.values)
    carry = zeros_X1 + LOWEST, zeros_X1, sums
    high_X1, total_X1, sums = jax.lax.fori_loop(begin, stop, one, carry)
    out_ref, lse_ref = outs
    lane = 0
    for sum_XV, piece in zip(sums, tile.values, strict=True):
        out_XV, lse_X1 = softmax_end(sum_XV, high_X1, total_X1)
        out_ref[split, b, i, part, :, lane : lane + piece.width] = out_XV
        lane += piece.width
    lse_ref[split, b, i, part] = lse_X1.reshape(tile.X)


def _program(refs: Mapping[str, Any], tile: Tile, b, part, i) -> _Program:
    """Returns the work of a tile of queries of a share of a KV head's query heads."""
    head = part // tile.parts
    start, count, end = (refs[name][b] for name in ("start", "count", "end"))
    window, stripe = refs["settings"][0], refs["settings"][1]
    done = 0 if tile.tree else i * tile.queries
    tile_end = jnp.minimum(start + done + tile.queries, end)
    least = jnp.maximum(start + done - window + 1, 0)
    ways, shift = tile.ways, tile.page.bit_length() - 1
    # In places of this device's own table, cell by cell: what it holds of [least, tile_end).
    first = (((least >> shift) - stripe + ways - 1) // ways) << shift
    last = ((((tile_end + tile.page - 1) >> shift) - stripe + ways - 1) // ways) << shift
    last = jnp.maximum(jnp.minimum(last, tile.table * tile.page), first)
    last = jnp.where(count > done, last, first)
    index_X = jnp.arange(tile.X, dtype=jnp.int32)
    token_X = index_X % tile.queries + done
    query_X = part * tile.group + index_X // tile.queries
    real_X = (token_X < count) & (index_X < tile.queries * tile.group)
    place = first, last, token_X, query_X, real_X
    return _Program(tile, refs, b, head, start, end, window, stripe, least, *place)


def _queries(at: _Program, piece: Piece) -> jax.Array:
    """Returns a piece of a program's queries, zeros where there is none."""
    q_ref = at.refs["q"]
    index_Y, is_real = index_of(piece)
    token_X1 = jnp.minimum(at.token_X, q_ref.shape[1] - 1)[:, None]
    query_X1 = jnp.minimum(at.query_X, q_ref.shape[2] - 1)[:, None]
    where = q_ref.at[at.b, token_X1, query_X1, index_Y[None]]
    return load(where, across(at.real_X), along(is_real))


def _block(at: _Program, turn) -> _Block:
    """Returns the cells of a block."""
    tile, shift = at.tile, at.tile.page.bit_length() - 1
    place_S = turn * tile.cells + jnp.arange(tile.cells, dtype=jnp.int32)
    inside_S = (place_S >= at.first) & (place_S < at.last)
    page_S = load(at.refs["table"].at[at.b, place_S >> shift], inside_S)
    offset_S = place_S & (tile.page - 1)
    cell_S = ((((place_S >> shift) * tile.ways + at.stripe) << shift) + offset_S).astype(jnp.int32)
    used_S = inside_S & (cell_S >= at.least) & (cell_S < at.end)
    row_S = (page_S * tile.kv_heads + at.head) * tile.page + offset_S
    return _Block(place_S, cell_S, page_S, offset_S, row_S, used_S)


def _numbers(at: _Program, block: _Block, piece: Piece) -> jax.Array:
    """Returns a piece of a block's cells as numbers; what nobody uses is not read."""
    index_Y, is_real = index_of(piece)
    where = at.refs["cells"].at[block.row_S[:, None], index_Y[None]]
    return as_numbers(load(where, across(block.used_S), along(is_real)), at.tile.dtype)


def _scale(at: _Program, block: _Block, side: int) -> jax.Array:
    """Returns one of the scales of each cell of a block."""
    where = at.refs["scale"].at[block.page_S, at.head, side, block.offset_S]
    return load(where, block.used_S)


def _logits(at: _Program, block: _Block, queries) -> tuple[jax.Array, list[jax.Array]]:
    """Returns (the logits of a program's queries over a block's cells, the pieces of the keys)."""
    tile, keys = at.tile, []
    logits_XS = jnp.zeros((tile.X, tile.cells), jnp.float32)
    for q_XY, piece in zip(queries, tile.keys, strict=True):
        key_SY = _numbers(at, block, piece)
        product_XS = dot(q_XY, key_SY.T)
        if tile.scaled:
            behind = tile.latent is not None and piece.first >= tile.latent
            product_XS = product_XS * _scale(at, block, 1 if behind else 0)[None]
        logits_XS += product_XS
        keys.append(key_SY)
    logits_XS *= tile.scale
    if tile.softcap is not None:
        logits_XS = tile.softcap * tanh(logits_XS / tile.softcap)
    if tile.biased:
        bias_S = load(at.refs["bias"].at[block.page_S, at.head, block.offset_S], block.used_S)
        logits_XS += jnp.maximum(bias_S, LOWEST)[None]
    return jnp.where(_seen(at, block), logits_XS, LOWEST), keys


def _seen(at: _Program, block: _Block) -> jax.Array:
    """Returns whether each query sees each cell of a block, by the rule of `Rows`."""
    tile, own_S = at.tile, block.cell_S - at.start
    if not tile.tree:
        distance_XS = at.token_X[:, None] - own_S[None]
        return block.used_S[None] & (distance_XS >= 0) & (distance_XS < at.window)
    depth, ancestors = at.refs["depth"], at.refs["ancestors"]
    token_X = jnp.minimum(at.token_X, tile.queries - 1)
    token_S = jnp.clip(own_S, 0, tile.queries - 1)
    depth_S = jnp.where(own_S >= 0, depth[at.b, token_S], own_S)
    is_near_XS = depth[at.b, token_X][:, None] - depth_S[None] < at.window
    bit_XS = (ancestors[at.b, token_X][:, None] >> token_S[None]) & 1
    return block.used_S[None] & is_near_XS & ((own_S < 0)[None] | (bit_XS == 1))


def _add_masses(at: _Program, queries, begin, stop, mass_ref, where) -> None:
    """Stores the weights that each cell gets from a program's queries together, at its place."""
    lse_ref = at.refs["lse"]
    token_X = jnp.minimum(at.token_X, lse_ref.shape[1] - 1)
    query_X = jnp.minimum(at.query_X, lse_ref.shape[2] - 1)
    lse_X1 = load(lse_ref.at[at.b, token_X, query_X], at.real_X)[:, None]

    def one(turn, nothing):
        block = _block(at, turn)
        logits_XS, _ = _logits(at, block, queries)
        is_any_XS = at.real_X[:, None] & (logits_XS > LOWEST / 2)
        weight_XS = jnp.where(is_any_XS, jnp.exp(logits_XS - lse_X1), 0.0)
        mass_ref[*where, block.place_S] = jnp.sum(weight_XS, axis=0)
        return nothing

    jax.lax.fori_loop(begin, stop, one, 0)

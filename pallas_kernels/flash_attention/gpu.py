# SPDX-License-Identifier: Apache-2.0
"""Attention over a run of cells for GPUs (Triton): a program a KV head and block of queries.

Tiling. A program has the X queries of one KV head in its block (all heads of its group, filled up
to a power of two of at least 16) and goes over the blocks of keys that it sees, which are reckoned
before, with an online softmax (FlashAttention-2, arXiv 2307.08691). Widths are cut into powers of
two: see `pallas_kernels.gpu_tiles`.

Memory. `shared_bytes` is the formula: what the pipeline's stages hold of a block, and the queries.
Of sizes that do not fit, fewer stages and then fewer cells are taken.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends import Backend
from pallas_kernels.flash_attention.xla import NOWHERE, blocks_seen, padded
from pallas_kernels.gpu_tiles import (
    LEAST,
    Piece,
    across,
    along,
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
from pallas_kernels.paged_attention.rows import Call
from pallas_kernels.softmax import LOWEST, softmax_end, softmax_step
from pallas_kernels.tuning import block_sizes

MOST_QUERIES, MOST_SUMS = 128, 128 * 256  # of a program, and the numbers of its output


class Tile(NamedTuple):
    """The sizes of a call; all static."""

    heads: int  # KV heads
    group: int  # query heads of one
    queries: int  # tokens of a block of queries
    X: int  # queries of a KV head in a block, filled up
    cells: int  # of a block of keys
    warps: int
    stages: int
    keys: tuple[Piece, ...]
    values: tuple[Piece, ...]
    latent: int | None
    scale: float
    softcap: float | None

    @property
    def width(self) -> int:
        """Numbers of the output, pieces filled up."""
        return total_width(self.values)

    def shared_bytes(self, itemsize: int) -> int:
        """What a program takes of shared memory; by it sums change hands between threads too.

        The highest logit and the sum of each query do, beside all the rest.
        """
        keys = total_width(self.keys)
        lanes = keys + (self.latent is None) * self.width
        sums = 4 * self.X * max(piece.width for piece in self.values)
        operands = itemsize * (self.stages * self.cells * lanes + self.X * keys)
        return max(sums, operands) + 2 * 4 * self.X


def rule(T: int, G: int, V: int) -> dict[str, int]:
    """Returns the block sizes of shapes that nobody measured: sums fit the registers of 8 warps."""
    most = MOST_QUERIES if V <= MOST_SUMS // MOST_QUERIES else MOST_SUMS // power(V)
    return {"queries": min(T, max(1, most // G)), "cells": 64, "warps": 8, "stages": 2}


def tile_of(q_TNH: jax.Array, cell_SKC: jax.Array, call: Call, backend: Backend) -> Tile:
    """Returns the sizes of a call: those that it names, that were measured, or of the rule."""
    (T, N, H), (S, K, _), latent = q_TNH.shape, cell_SKC.shape, call.latent
    sizes = call.blocks
    if sizes is None:
        shape = {"T": T, "S": S, "N": N, "K": K, "H": H}
        dtype = jnp.dtype(cell_SKC.dtype).name
        fallback = rule(T, N // K, call.values[1] - call.values[0])
        sizes = block_sizes(call.operation, backend.chip, shape, dtype, fallback)
    keys = cut(0, H) if latent is None else (*cut(0, latent), *cut(latent, H))
    queries = sizes["queries"]
    tile = Tile(
        heads=K,
        group=N // K,
        queries=queries,
        X=max(LEAST, power(queries * (N // K))),
        cells=sizes["cells"],
        warps=sizes["warps"],
        stages=sizes["stages"],
        keys=keys,
        values=cut(*call.values),
        latent=latent,
        scale=call.scale,
        softcap=call.softcap,
    )
    itemsize = cell_SKC.dtype.itemsize
    while tile.shared_bytes(itemsize) > backend.shared_bytes and tile.stages > 1:
        tile = tile._replace(stages=tile.stages - 1)
    while tile.shared_bytes(itemsize) > backend.shared_bytes and tile.cells > LEAST:
        tile = tile._replace(cells=tile.cells // 2)
    return tile


def declines(q_TNH: jax.Array, cell_SKC: jax.Array, call: Call, backend: Backend) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    need = tile_of(q_TNH, cell_SKC, call, backend).shared_bytes(cell_SKC.dtype.itemsize)
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
    T, N, H = q_TNH.shape
    tile = tile_of(q_TNH, cell_SKC, call, backend)
    K, G, W = tile.heads, tile.group, tile.queries
    q_TNH, place_T = padded(q_TNH, place_T, W, -1)
    cell_SKC, place_S = padded(cell_SKC, place_S, tile.cells, NOWHERE)
    R, S = len(place_T) // W, len(place_S)
    own_RW = place_T.reshape(R, W)
    start_R, stop_R = blocks_seen(own_RW, place_S.reshape(-1, tile.cells), window, first)
    settings = jnp.stack([jnp.asarray(window, jnp.int32), first])
    inputs = [start_R, stop_R, settings, q_TNH, place_T, cell_SKC, place_S]
    pairs = K * R * tile.X * S
    out, lse = pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        out_shape=[
            jax.ShapeDtypeStruct((K, R, tile.X, tile.width), jnp.float32),
            jax.ShapeDtypeStruct((K, R, tile.X), jnp.float32),
        ],
        grid=(R, K),
        in_specs=[pl.no_block_spec] * len(inputs),
        out_specs=[pl.no_block_spec] * 2,
        compiler_params=compiler_params(
            tile.warps, tile.stages, tile.shared_bytes(cell_SKC.dtype.itemsize), backend
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (H + tile.width),
            transcendentals=pairs,
            bytes_accessed=(q_TNH.size + R * cell_SKC.size) * cell_SKC.dtype.itemsize,
        ),
        interpret=bool(backend.interpret),
        name="flash_attention",
    )(*inputs)

    def by_token(x_KRXV):
        x = x_KRXV[:, :, : G * W].reshape(K, R, G, W, -1).transpose(1, 3, 0, 2, 4)
        return x.reshape(R * W, N, -1)[:T]

    starts = itertools.accumulate((piece.width for piece in tile.values), initial=0)
    real = [out[..., s : s + piece.real] for s, piece in zip(starts, tile.values, strict=False)]
    return by_token(jnp.concatenate(real, axis=-1)), by_token(lse[..., None])[..., 0]


def _kernel(
    start, stop, settings, q_ref, own_ref, cell_ref, place_ref, out_ref, lse_ref, *, tile: Tile
) -> None:
    r, head = pl.program_id(0), pl.program_id(1)
    index_X = jnp.arange(tile.X, dtype=jnp.int32)
    real_X = index_X < tile.queries * tile.group
    token_X = r * tile.queries + index_X % tile.queries
    query_X = head * tile.group + jnp.minimum(index_X // tile.queries, tile.group - 1)
    own_X1 = jnp.where(real_X, own_ref[token_X], -1)[:, None]
    queries = [_queries(q_ref, token_X, query_X, real_X, piece) for piece in tile.keys]

    def one(block, carry):
        high_X1, total_X1, sums = carry
        row_S = block * tile.cells + jnp.arange(tile.cells, dtype=jnp.int32)
        keys = [_numbers(cell_ref, row_S, head, piece) for piece in tile.keys]
        logits_XS = jnp.zeros((tile.X, tile.cells), jnp.float32)
        for q_XY, key_SY in zip(queries, keys, strict=True):
            logits_XS += dot(q_XY, key_SY.T)
        logits_XS *= tile.scale
        if tile.softcap is not None:
            logits_XS = tile.softcap * tanh(logits_XS / tile.softcap)
        place_1S = place_ref[row_S][None]
        distance_XS = own_X1 - place_1S
        seen_XS = (distance_XS >= 0) & (distance_XS < settings[0]) & (place_1S >= settings[1])
        logits_XS = jnp.where(seen_XS, logits_XS, LOWEST)
        high_X1, total_X1, keep_X1, weight_XS = softmax_step(high_X1, total_X1, logits_XS)
        # A latent's value is what its key begins with.
        is_same = tile.latent is not None and tile.values == tile.keys[: len(tile.values)]
        values = keys if is_same else [_numbers(cell_ref, row_S, head, p) for p in tile.values]
        weight_XS = weight_XS.astype(cell_ref.dtype)
        sums = tuple(
            sum_XV * keep_X1 + dot(weight_XS, value_SV)
            for sum_XV, value_SV in zip(sums, values, strict=False)
        )
        return high_X1, total_X1, sums

    zeros_X1 = jnp.zeros((tile.X, 1), jnp.float32)
    sums = tuple(jnp.zeros((tile.X, piece.width), jnp.float32) for piece in tile.values)
    carry = zeros_X1 + LOWEST, zeros_X1, sums
    high_X1, total_X1, sums = jax.lax.fori_loop(start[r], stop[r], one, carry)
    lane = 0
    for sum_XV, piece in zip(sums, tile.values, strict=True):
        out_XV, lse_X1 = softmax_end(sum_XV, high_X1, total_X1)
        out_ref[head, r, :, lane : lane + piece.width] = out_XV
        lane += piece.width
    lse_ref[head, r] = lse_X1.reshape(tile.X)


def _queries(q_ref, token_X, query_X, real_X, piece: Piece) -> jax.Array:
    """Returns a piece of a program's queries."""
    index_Y, is_real = index_of(piece)
    where = q_ref.at[token_X[:, None], query_X[:, None], index_Y[None]]
    return load(where, across(real_X), along(is_real))


def _numbers(cell_ref, row_S, head, piece: Piece) -> jax.Array:
    """Returns a piece of the cells of a block."""
    index_Y, is_real = index_of(piece)
    return load(cell_ref.at[row_S[:, None], head, index_Y[None]], along(is_real))

# SPDX-License-Identifier: Apache-2.0
"""Attention over a run of cells for GPUs (Triton): a program a KV head and block of queries.

Tiling. A program has the X queries of one KV head in its block (all heads of its group, filled up
to a power of two of at least 16) and goes over the blocks of keys that it sees, which are reckoned
before, with an online softmax (FlashAttention-2, arXiv 2307.08691). Heads' widths are cut into
powers of two as in `pallas_kernels.paged_attention.gpu`.

Memory. `shared_bytes` is the formula: what the pipeline's stages hold of a block, and the queries.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.backends import Backend
from pallas_kernels.flash_attention.xla import NOWHERE, blocks_seen, padded
from pallas_kernels.paged_attention.gpu import LEAST, Piece, cut, dot, power, tanh
from pallas_kernels.paged_attention.rows import Call
from pallas_kernels.softmax import LOWEST
from pallas_kernels.tuning import block_sizes


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
        return sum(width for _, width, _ in self.values)

    def shared_bytes(self, itemsize: int) -> int:
        """What a program takes of shared memory."""
        keys = sum(width for _, width, _ in self.keys)
        lanes = keys + (self.latent is None) * self.width
        return itemsize * (self.stages * self.cells * lanes + self.X * keys)


def rule(T: int, G: int) -> dict[str, int]:
    """Returns the block sizes of shapes that nobody measured."""
    return {"queries": min(T, max(1, 128 // G)), "cells": 64, "warps": 8, "stages": 2}


def tile_of(q_TNH: jax.Array, cell_SKC: jax.Array, call: Call, backend: Backend) -> Tile:
    """Returns the sizes of a call: those that it names, that were measured, or of the rule."""
    (T, N, H), (S, K, _), latent = q_TNH.shape, cell_SKC.shape, call.latent
    sizes = call.blocks
    if sizes is None:
        shape = {"T": T, "S": S, "N": N, "K": K, "H": H}
        dtype = jnp.dtype(cell_SKC.dtype).name
        sizes = block_sizes(call.operation, backend.chip, shape, dtype, rule(T, N // K))
    keys = cut(0, H) if latent is None else (*cut(0, latent), *cut(latent, H))
    queries = sizes["queries"]
    return Tile(
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


def declines(q_TNH: jax.Array, cell_SKC: jax.Array, call: Call, backend: Backend) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    need = tile_of(q_TNH, cell_SKC, call, backend).shared_bytes(cell_SKC.dtype.itemsize)
    if need > backend.shared_bytes:
        return f"{need} bytes of shared memory; there are {backend.shared_bytes}"
    return None


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
    pieces = [
        jnp.pad(q_TNH[..., lane : lane + real], ((0, 0), (0, 0), (0, width - real)))
        for lane, width, real in tile.keys
    ]
    q_RWKGY = jnp.concatenate(pieces, axis=-1).reshape(R, W, K, G, -1)
    q_KRXY = q_RWKGY.transpose(2, 0, 3, 1, 4).reshape(K, R, G * W, -1)
    q_KRXY = jnp.pad(q_KRXY, ((0, 0), (0, 0), (0, tile.X - G * W), (0, 0)))
    own_RX = jnp.broadcast_to(own_RW[:, None], (R, G, W)).reshape(R, G * W)
    own_RX = jnp.pad(own_RX, ((0, 0), (0, tile.X - G * W)), constant_values=-1)
    inputs = [start_R, stop_R, settings, q_KRXY, own_RX, cell_SKC, place_S]
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
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (H + tile.width),
            transcendentals=pairs,
            bytes_accessed=(q_KRXY.size + R * cell_SKC.size) * cell_SKC.dtype.itemsize,
        ),
        interpret=bool(backend.interpret),
        name="flash_attention",
    )(*inputs)

    def by_token(x_KRXV):
        x = x_KRXV[:, :, : G * W].reshape(K, R, G, W, -1).transpose(1, 3, 0, 2, 4)
        return x.reshape(R * W, N, -1)[:T]

    real, lane = [], 0
    for _, width, used in tile.values:
        real.append(out[..., lane : lane + used])
        lane += width
    return by_token(jnp.concatenate(real, axis=-1)), by_token(lse[..., None])[..., 0]


def _kernel(
    start, stop, settings, q_ref, own_ref, cell_ref, place_ref, out_ref, lse_ref, *, tile: Tile
) -> None:
    r, head = pl.program_id(0), pl.program_id(1)
    own_X, index_S = own_ref[r], jnp.arange(tile.cells, dtype=jnp.int32)
    q_pieces, lane = [], 0
    for _, width, _ in tile.keys:
        q_pieces.append(q_ref[head, r, :, lane : lane + width])
        lane += width

    def numbers(row_S, piece: Piece):
        first, width, real = piece
        index_Y = first + jnp.arange(width, dtype=jnp.int32)
        where = cell_ref.at[row_S[:, None], head, index_Y[None]]
        if real == width:
            return plgpu.load(where)
        return plgpu.load(where, mask=(index_Y < first + real)[None], other=0)

    def one(block, carry):
        high_X, total_X, sums = carry
        row_S = block * tile.cells + index_S
        place_S = place_ref[row_S]
        kept = [numbers(row_S, piece) for piece in tile.keys]
        logits_XS = sum(dot(q, key.T) for q, key in zip(q_pieces, kept, strict=True)) * tile.scale
        if tile.softcap is not None:
            logits_XS = tile.softcap * tanh(logits_XS / tile.softcap)
        distance_XS = own_X[:, None] - place_S[None]
        seen_XS = (distance_XS >= 0) & (distance_XS < settings[0])
        seen_XS &= (place_S >= settings[1])[None]
        logits_XS = jnp.where(seen_XS, logits_XS, LOWEST)
        now_X = jnp.maximum(high_X, jnp.max(logits_XS, axis=1))
        weight_XS = jnp.where(logits_XS > LOWEST / 2, jnp.exp(logits_XS - now_X[:, None]), 0.0)
        keep_X = jnp.exp(high_X - now_X)
        total_X = total_X * keep_X + jnp.sum(weight_XS, axis=1)
        # A latent's value is what its key begins with.
        is_same = tile.latent is not None and tile.values == tile.keys[: len(tile.values)]
        values = kept if is_same else [numbers(row_S, piece) for piece in tile.values]
        weight_XS = weight_XS.astype(cell_ref.dtype)
        sums = tuple(
            sum_XV * keep_X[:, None] + dot(weight_XS, value_SV)
            for sum_XV, value_SV in zip(sums, values, strict=False)
        )
        return now_X, total_X, sums

    zeros_X = jnp.zeros(tile.X, jnp.float32)
    sums = tuple(jnp.zeros((tile.X, width), jnp.float32) for _, width, _ in tile.values)
    carry = zeros_X + LOWEST, zeros_X, sums
    high_X, total_X, sums = jax.lax.fori_loop(start[r], stop[r], one, carry)
    lane = 0
    for sum_XV, (_, width, _) in zip(sums, tile.values, strict=True):
        out_XV = sum_XV / jnp.maximum(total_X, 1e-30)[:, None]
        out_ref[head, r, :, lane : lane + width] = out_XV
        lane += width
    logs_X = high_X + jnp.log(jnp.maximum(total_X, 1e-30))
    lse_ref[head, r] = jnp.where(total_X > 0, logs_X, LOWEST)

# SPDX-License-Identifier: Apache-2.0
"""Paged attention equals its reference, whatever lies in the cells that nobody sees.

Letters: J is pages of a row, X is query heads a KV head times tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import NO_WINDOW, Rows, paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference

# Five tokens: 0 is the root, 1 and 2 its children, 3 the child of 1, 4 that of 3. Bit j of entry t
# says that token j is t or above it.
TREE_DEPTHS = (0, 1, 1, 2, 3)
TREE_ANCESTORS = (0b00001, 0b00011, 0b00101, 0b01011, 0b11011)

PAGE = 4  # cells
SPAN = 32  # the longest row, in cells


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Rows, one a place of `starts` and `counts`, and everything static of a call."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    width: int = 1
    heads: tuple[int, int] = (2, 2)  # query, KV
    head_width: int = 16
    windows: tuple[int, ...] = (NO_WINDOW,)
    softcap: float | None = None
    block_cells: int = 8
    tree: bool = False
    sinks: bool = False
    latent: int | None = None  # the first numbers of a key that are its value
    table_pages: int = SPAN // PAGE


DECODE = {"starts": (0, 1, 7, 26), "counts": (1, 1, 1, 1)}
CHUNK = {"starts": (0, 3, 8, 22), "counts": (5, 4, 5, 1), "width": 5}
TREE = {"starts": (0, 3, 8, 26), "counts": (5, 5, 5, 5), "width": 5, "tree": True}
WIDE = {"heads": (6, 2), "head_width": 64, "softcap": 3.0, "windows": (5, NO_WINDOW)}
WINDOWS = (1, 3, 4, 9, 100, NO_WINDOW)  # cells: within a page, over some, more than there are

# Cases of equal static values share a program: compiling is nearly all of the time.
CASES = {
    "decode": Case(**DECODE, windows=WINDOWS),
    "decode beside idle rows": Case(starts=(0, 13, 0, 26), counts=(0, 1, 0, 0), windows=WINDOWS),
    "decode of idle rows only": Case(starts=(0, 13, 5, 26), counts=(0, 0, 0, 0)),
    "decode, wide heads, 3 to 1, capped": Case(**DECODE, **WIDE),
    "decode, one page a block": Case(**DECODE, block_cells=1, windows=WINDOWS),
    "decode, one block": Case(**DECODE, block_cells=128, windows=WINDOWS),
    "decode, table of no whole block": Case(
        starts=(27, 26, 8, 3), counts=(1, 1, 1, 0), block_cells=20, table_pages=7
    ),
    "chunk": Case(**CHUNK, windows=WINDOWS),
    "chunk beside idle rows": Case(starts=(0, 3, 24, 5), counts=(0, 5, 5, 0), width=5),
    "chunk, wide heads, 3 to 1, capped": Case(**CHUNK, **WIDE),
    "chunk, table of no whole block": Case(
        starts=(23, 1, 9, 2), counts=(5, 5, 5, 4), width=5, block_cells=12, table_pages=7
    ),
    "tree": Case(**TREE, windows=WINDOWS),
    "tree beside idle rows": Case(
        starts=(2, 9, 3, 0), counts=(5, 0, 3, 0), width=5, tree=True, windows=(3, NO_WINDOW)
    ),
    "tree, wide heads, 3 to 1, capped": Case(**TREE, **WIDE),
    "decode, sinks": Case(**DECODE, sinks=True, windows=(1, 5, NO_WINDOW)),
    "chunk, sinks, 3 to 1": Case(**CHUNK, sinks=True, heads=(6, 2), windows=(5, NO_WINDOW)),
    "decode, latent": Case(**DECODE, latent=12, heads=(4, 1)),
    "chunk, latent": Case(**CHUNK, latent=12, heads=(4, 1), windows=(5, NO_WINDOW)),
}
STATIC = ("scale", "softcap", "block_cells", "values")
JITTED = jax.jit(paged_attention, static_argnames=STATIC)
SCALE = 0.25
# Hostile leftovers, page by page.
GARBAGE = (np.nan, 1e30, np.inf, -np.inf)


def make_inputs(case, window=NO_WINDOW, dtype=np.float32):
    """Returns (q, pool, rows): pages in random order, and garbage in every cell nobody sees."""
    rng = np.random.default_rng(0)
    N, K = case.heads
    B, T, J, H = len(case.starts), case.width, case.table_pages, case.head_width
    P = B * J + 3
    q_BTNH = rng.standard_normal((B, T, N, H)).astype(dtype)
    cell = 2 * H if case.latent is None else H
    pool_PKWX = np.resize(GARBAGE, (P, 1, 1, 1)) * np.ones((1, K, PAGE, cell))
    free = list(rng.permutation(np.arange(1, P)))
    table_BJ = np.zeros((B, J), np.int32)
    for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        # As the engine does: pages wholly behind the window are given up, and read as page 0.
        first = max(0, start + 1 - window) if count else start
        for j in range(first // PAGE, -(-(start + count) // PAGE)):
            page = table_BJ[b, j] = free.pop()
            for w in range(PAGE):
                if first <= j * PAGE + w < start + count:
                    pool_PKWX[page, :, w] = rng.standard_normal((K, cell))
    depth_BT = ancestors_BT = None
    if case.tree:
        depth_BT = np.tile(np.int32(TREE_DEPTHS), (B, 1))
        ancestors_BT = np.tile(np.int32(TREE_ANCESTORS), (B, 1))
    rows = Rows(table_BJ, np.int32(case.starts), np.int32(case.counts), depth_BT, ancestors_BT)
    return q_BTNH, pool_PKWX.astype(dtype), rows


def extras(case):
    """Returns the sinks and the place of values, for the operation and for its reference."""
    sinks = np.linspace(-1, 2, case.heads[0], dtype=np.float32) if case.sinks else None
    return {"sinks_N": sinks, "values": None if case.latent is None else (0, case.latent)}


def run(case, q, pool, rows, window):
    static = {"scale": SCALE, "softcap": case.softcap, "block_cells": case.block_cells}
    return np.asarray(JITTED(q, pool, rows, jnp.int32(window), **static, **extras(case)))


def outputs(case, window, dtype=np.float32):
    """Returns (output, reference, bool [B, T]: which tokens are real)."""
    q, pool, rows = make_inputs(case, window, dtype)
    got = run(case, q, pool, rows, window)
    assert got.dtype == dtype
    want = paged_attention_reference(
        q, pool, rows, window, scale=SCALE, softcap=case.softcap, **extras(case)
    )
    real_BT = np.arange(case.width)[None] < np.array(case.counts)[:, None]
    return got.astype(np.float64), want, real_BT


@pytest.mark.parametrize("name", CASES)
def test_equals_reference_and_ignores_what_nobody_sees(name):
    case = CASES[name]
    for window in case.windows:
        got, want, real_BT = outputs(case, window)
        np.testing.assert_allclose(got[real_BT], want[real_BT], rtol=1e-5, atol=1e-5)
        assert np.isfinite(got).all(), "padding gives finite values"
        assert not got[np.array(case.counts) == 0].any(), "an idle row gives zeros"


def test_bfloat16_differs_by_its_rounding_only():
    got, want, real_BT = outputs(CASES["chunk"], NO_WINDOW, jnp.bfloat16)
    # Half a unit in the last place for each weight, and as much for the output; values below 5.
    assert np.abs(got - want)[real_BT].max() < 2 * 2**-9 * 5


@pytest.mark.parametrize("name", ["decode", "decode, latent", "chunk, latent"])
def test_what_fills_cells_up_is_not_read(name):
    case = CASES[name]
    q, pool, rows = make_inputs(case)
    filled = np.pad(pool, ((0, 0), (0, 0), (0, 0), (0, 5)), constant_values=1e30)
    wide, plain = (run(case, q, cells, rows, NO_WINDOW) for cells in (filled, pool))
    np.testing.assert_array_equal(wide, plain)


@pytest.mark.parametrize("window", [2, 5, NO_WINDOW])
def test_a_tree_that_is_a_chain_equals_a_chunk(window):
    case = CASES["chunk"]
    q, pool, rows = make_inputs(case)
    depth_BT = np.tile(np.arange(5, dtype=np.int32), (4, 1))
    chain = rows._replace(depth_BT=depth_BT, ancestors_BT=(2 << depth_BT) - 1)
    chunk, tree = (run(case, q, pool, each, window) for each in (rows, chain))
    for b, count in enumerate(case.counts):
        np.testing.assert_array_equal(tree[b, :count], chunk[b, :count])


def test_a_row_is_the_same_in_any_company_and_place():
    case = CASES["decode"]
    q, pool, rows = make_inputs(case)
    together = run(case, q, pool, rows, NO_WINDOW)
    order = np.array([2, 0, 3, 1])
    moved = Rows(*(np.asarray(field)[order] for field in rows[:3]))
    moved = moved._replace(count_B=np.array([1, 1, 0, 0], np.int32))
    other = run(case, np.asarray(q)[order], pool, moved, NO_WINDOW)
    np.testing.assert_array_equal(other[:2], together[order[:2]])


@pytest.mark.parametrize("name", ["chunk, wide heads, 3 to 1, capped", "tree"])
def test_names_state_the_shapes(name, shape_suffixes):
    case = CASES[name]
    # A fresh function is traced anew, so that there is something to check.
    traced = jax.eval_shape(
        lambda *inputs: paged_attention(*inputs, 5, scale=1), *make_inputs(case)
    )
    assert traced.shape == (4, case.width, case.heads[0], case.head_width)

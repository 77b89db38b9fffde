# SPDX-License-Identifier: Apache-2.0
"""Named cases of paged attention, which test, benchmark and tuner share, and real shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.backends import Backend
from pallas_kernels.inputs import Work, scales, scattered
from pallas_kernels.paged_attention.op import paged_attention
from pallas_kernels.paged_attention.rows import NO_WINDOW, Rows
from pallas_kernels.pages import Pages

PAGE = 16  # cells of a page of a case
SPAN = 8 * PAGE  # cells of the longest row of a case
SCALE = 0.25
# Five tokens: 0 is the root, 1 and 2 its children, 3 the child of 1, 4 that of 3. Bit j of entry t
# says that token j is t or above it.
TREE_DEPTHS = (0, 1, 1, 2, 3)
TREE_ANCESTORS = (0b00001, 0b00011, 0b00101, 0b01011, 0b11011)
# Hostile leftovers, page by page.
GARBAGE = (np.nan, 1e30, np.inf, -np.inf)
CODES = {"int8": np.int8, "float8": ml_dtypes.float8_e4m3fn}


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
    tree: bool = False
    sinks: bool = False
    bias: bool = False
    codes: str | None = None  # of CODES: what pages hold, with scales
    latent: int | None = None  # the first numbers of a key that are its value
    fill: int = 0  # numbers behind a cell that mean nothing
    table_pages: int = SPAN // PAGE
    page: int = PAGE
    past_only: bool = False  # nobody sees the cells of this step
    blocks: tuple[tuple[str, int], ...] = ()  # sizes of a kernel's blocks, where they matter

    @property
    def values(self) -> tuple[int, int] | None:
        """Where a cell's value is."""
        return None if self.latent is None else (0, self.latent)


DECODE: dict[str, Any] = {"starts": (0, 1, 28, 104), "counts": (1, 1, 1, 1)}
CHUNK: dict[str, Any] = {"starts": (0, 13, 32, 90), "counts": (5, 4, 5, 1), "width": 5}
TREE: dict[str, Any] = {"starts": (0, 13, 32, 104), "counts": (5,) * 4, "width": 5, "tree": True}
CAPPED: dict[str, Any] = {"heads": (6, 2), "head_width": 64, "softcap": 3.0}
# Cells: within a page, over some, more than there are.
WINDOWS = (1, 3, 16, 37, 400, NO_WINDOW)
TWO_WINDOWS = (21, NO_WINDOW)

CASES = {
    "decode": Case(**DECODE, windows=WINDOWS),
    "decode beside idle rows": Case(starts=(0, 53, 0, 104), counts=(0, 1, 0, 0), windows=WINDOWS),
    "decode of idle rows only": Case(starts=(0, 53, 20, 104), counts=(0, 0, 0, 0)),
    "decode of one row": Case(starts=(77,), counts=(1,)),
    "decode of nine rows": Case(starts=tuple(range(3, 120, 13)), counts=(1,) * 9),
    "decode, a full table": Case(starts=(127, 126), counts=(1, 1)),
    "decode, page borders": Case(starts=(15, 16, 31, 32), counts=(1, 1, 1, 1), windows=(16, 17)),
    "decode, one page a block": Case(**DECODE, blocks=(("pages", 1),), windows=TWO_WINDOWS),
    "decode, three pages a block": Case(**DECODE, blocks=(("pages", 3),), windows=TWO_WINDOWS),
    "decode, one block": Case(**DECODE, blocks=(("pages", 8),)),
    "decode, four splits": Case(**DECODE, blocks=(("splits", 4), ("cells", 16))),
    "decode, table of no whole block": Case(
        starts=(108, 104, 33, 3), counts=(1, 1, 1, 0), table_pages=7, blocks=(("pages", 2),)
    ),
    "decode, 3 to 1, capped": Case(**DECODE, **CAPPED, windows=TWO_WINDOWS),
    "decode, 4 to 1": Case(**DECODE, heads=(8, 2), head_width=32, blocks=(("heads", 4),)),
    "decode, 4 to 1, by two": Case(**DECODE, heads=(8, 2), head_width=32, blocks=(("heads", 2),)),
    "decode, 8 to 1": Case(**DECODE, heads=(8, 1), head_width=32),
    "decode, 5 heads alone": Case(**DECODE, heads=(5, 5)),
    "decode, pages of 32": Case(starts=(3, 100), counts=(1, 1), page=32, table_pages=4),
    "decode, pages of 64": Case(starts=(3, 100), counts=(1, 1), page=64, table_pages=2),
    "decode, head 64": Case(**DECODE, head_width=64),
    "decode, head 80": Case(**DECODE, head_width=80),
    "decode, head 96": Case(**DECODE, head_width=96, fill=64),
    "decode, head 112": Case(**DECODE, head_width=112),
    "decode, head 128": Case(**DECODE, head_width=128),
    "decode, head 160": Case(**DECODE, head_width=160),
    "decode, head 256": Case(**DECODE, head_width=256),
    "decode, sinks": Case(**DECODE, sinks=True, windows=(1, 21, NO_WINDOW)),
    "decode, bias": Case(**DECODE, bias=True, heads=(4, 2)),
    "decode, int8": Case(**DECODE, codes="int8", heads=(4, 2), windows=TWO_WINDOWS),
    "decode, float8": Case(**DECODE, codes="float8", heads=(4, 2), windows=TWO_WINDOWS),
    "decode, int8 and bias": Case(**DECODE, codes="int8", bias=True),
    "decode, int8, head 128, capped": Case(**DECODE, codes="int8", head_width=128, softcap=3.0),
    "decode, latent": Case(**DECODE, latent=16, head_width=24, heads=(4, 1)),
    "decode, latent, int8": Case(**DECODE, latent=16, head_width=24, heads=(4, 1), codes="int8"),
    "chunk": Case(**CHUNK, windows=WINDOWS),
    "chunk beside idle rows": Case(starts=(0, 13, 104, 20), counts=(0, 5, 5, 0), width=5),
    "chunk from nothing": Case(starts=(0, 0), counts=(5, 3), width=5, windows=(2, NO_WINDOW)),
    "chunk over pages": Case(starts=(0, 9, 50), counts=(40, 40, 17), width=40),
    "chunk in tiles": Case(
        starts=(0, 9, 50),
        counts=(40, 40, 17),
        width=40,
        heads=(4, 2),
        windows=TWO_WINDOWS,
        blocks=(("queries", 16), ("pages", 1), ("heads", 2)),
    ),
    "chunk, 3 to 1, capped": Case(**CHUNK, **CAPPED, windows=TWO_WINDOWS),
    "chunk, table of no whole block": Case(
        starts=(90, 1, 37, 2), counts=(5, 5, 5, 4), width=5, table_pages=7, blocks=(("pages", 2),)
    ),
    "chunk, sinks, 3 to 1": Case(**CHUNK, sinks=True, heads=(6, 2), windows=TWO_WINDOWS),
    "chunk, bias": Case(**CHUNK, bias=True, windows=TWO_WINDOWS),
    "chunk, int8": Case(**CHUNK, codes="int8", heads=(4, 2)),
    "chunk, float8, sinks": Case(**CHUNK, codes="float8", sinks=True),
    "chunk, latent": Case(**CHUNK, latent=16, head_width=24, heads=(4, 1), windows=TWO_WINDOWS),
    "chunk, the past only": Case(**CHUNK, past_only=True, windows=WINDOWS),
    "chunk in tiles, the past only": Case(
        starts=(0, 9, 50),
        counts=(40, 40, 17),
        width=40,
        past_only=True,
        windows=(7, 45, NO_WINDOW),
        blocks=(("queries", 16), ("pages", 1), ("cells", 16), ("splits", 3)),
    ),
    "tree": Case(**TREE, windows=WINDOWS),
    "tree beside idle rows": Case(
        starts=(2, 9, 35, 0), counts=(5, 0, 3, 0), width=5, tree=True, windows=(3, NO_WINDOW)
    ),
    "tree, 3 to 1, capped": Case(**TREE, **CAPPED, windows=TWO_WINDOWS),
    "tree, int8": Case(**TREE, codes="int8", heads=(4, 2)),
    "tree, sinks and bias": Case(**TREE, sinks=True, bias=True),
}


def make_inputs(case: Case, window: int = NO_WINDOW, dtype: Any = np.float32):
    """Returns (q, pages, rows): pages in random order, and garbage in every cell nobody sees."""
    rng = np.random.default_rng(0)
    N, K = case.heads
    B, T, J, H, W = len(case.starts), case.width, case.table_pages, case.head_width, case.page
    P = B * J + 3
    q_BTNH = rng.standard_normal((B, T, N, H)).astype(dtype)
    width = 2 * H if case.latent is None else H
    pool_PKWC = np.resize(GARBAGE, (P, 1, 1, 1)) * np.ones((1, K, W, width + case.fill))
    free = list(rng.permutation(np.arange(1, P)))
    table_BJ = np.zeros((B, J), np.int32)
    for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        # As the engine does: pages wholly behind the window are given up, and read as page 0.
        first = max(0, start + 1 - window) if count else start
        end = start + (0 if case.past_only else count)
        for j in range(first // W, -(-(start + count) // W)):
            page = table_BJ[b, j] = free.pop()
            cells = range(max(first, j * W) - j * W, min(end, (j + 1) * W) - j * W)
            pool_PKWC[page, :, cells, :width] = rng.standard_normal((len(cells), K, width))
            pool_PKWC[page, :, cells, width:] = 1e30
    depth_BT: Any = None
    ancestors_BT: Any = None
    if case.tree:
        depth_BT = np.tile(np.array(TREE_DEPTHS, np.int32), (B, 1))
        ancestors_BT = np.tile(np.array(TREE_ANCESTORS, np.int32), (B, 1))
    start_B, count_B = (jnp.array(row, jnp.int32) for row in (case.starts, case.counts))
    end_B = start_B if case.past_only else None
    rows = Rows(jnp.asarray(table_BJ), start_B, count_B, depth_BT, ancestors_BT, end_B)
    made = q_BTNH, make_pages(case, pool_PKWC, dtype, rng), rows
    return jax.tree.map(jnp.asarray, made)


def make_pages(case: Case, pool_PKWC: Any, dtype: Any, rng: np.random.Generator) -> Pages:
    """Returns the pages of a case, its cells as numbers or as codes with scales, and biases."""
    P, K, W, _ = pool_PKWC.shape
    scales: Any = None
    bias: Any = None
    if case.codes is None:
        cells = pool_PKWC.astype(dtype)
    else:
        scales = rng.uniform(0.01, 0.03, (P, K, 2, W)).astype(np.float32)
        integer = case.codes == "int8"
        codes = np.clip(pool_PKWC * 40, -127, 127)
        cells = (np.nan_to_num(codes) if integer else codes).astype(CODES[case.codes])
    if case.bias:
        bias = rng.standard_normal((P, K, W)).astype(np.float32)
        bias[rng.random((P, K, W)) < 0.2] = -np.inf  # unused cells
    return Pages(cells, scales, bias)


def extras(case: Case) -> dict[str, Any]:
    """Returns the sinks and the place of values, for the operation and for its reference."""
    sinks = np.linspace(-1, 2, case.heads[0], dtype=np.float32) if case.sinks else None
    return {"sinks_N": sinks, "values": case.values}


class Shape(NamedTuple):
    """A call of a model in service on one chip: rows of so many tokens over so many cells."""

    rows: int
    width: int
    heads: tuple[int, int]
    head_width: int
    context: int = 4096
    page: int = 64
    window: int = NO_WINDOW
    softcap: float | None = None
    codes: str | None = None
    tree: bool = False


LLAMA, QWEN, GEMMA, SMOL = (32, 8), (32, 4), (32, 16), (9, 3)
# Models by their published sizes, whole or over eight chips.
SHAPES = {
    "llama-3.1-8b, decode": Shape(64, 1, LLAMA, 128),
    "llama-3.1-8b, decode, long": Shape(8, 1, LLAMA, 128, context=131072),
    "llama-3.1-8b, chunk": Shape(16, 32, LLAMA, 128),
    "llama-3.1-8b, chunk of 512": Shape(1, 512, LLAMA, 128),
    "llama-3.1-8b over 8, decode": Shape(64, 1, (4, 1), 128),
    "llama-3.1-8b over 8, chunk": Shape(16, 32, (4, 1), 128),
    "llama-3.1-8b, decode, int8": Shape(64, 1, LLAMA, 128, page=128, codes="int8"),
    "llama-3.1-8b, decode, float8": Shape(64, 1, LLAMA, 128, page=128, codes="float8"),
    "llama-3.1-8b, tree": Shape(16, 8, LLAMA, 128, tree=True),
    "qwen3-30b-a3b, decode": Shape(64, 1, QWEN, 128),
    "qwen3-30b-a3b, chunk": Shape(16, 32, QWEN, 128),
    "gemma-3-27b, decode": Shape(64, 1, GEMMA, 128),
    "gemma-3-27b, decode, window": Shape(64, 1, GEMMA, 128, window=1024),
    "gemma-3-27b, chunk": Shape(16, 32, GEMMA, 128),
    "gemma-3-27b, chunk of 512": Shape(1, 512, GEMMA, 128),
    "gemma-2-9b, chunk of 512": Shape(2, 512, (16, 8), 256, softcap=50.0),
    "llama-2-7b, chunk of 512": Shape(1, 512, (32, 32), 128),
    "gemma-2-27b, chunk, capped": Shape(16, 32, GEMMA, 128, softcap=50.0),
    "smollm2-135m, decode": Shape(64, 1, SMOL, 64),
    "smollm2-135m, chunk": Shape(16, 32, SMOL, 64),
}


def abstract_inputs(shape: Shape, width: int):
    """Returns the abstract values of (q, pages, rows, window); cells have `width` numbers."""
    array = jax.ShapeDtypeStruct
    (N, K), J = shape.heads, shape.context // shape.page
    B, T, W = shape.rows, shape.width, shape.page
    dtype = jnp.dtype(CODES.get(shape.codes or "", jnp.bfloat16))
    scales = array((B * J + 1, K, 2, W), jnp.float32) if shape.codes else None
    pages: Any = Pages(array((B * J + 1, K, W, width), dtype), scales)  # type: ignore[arg-type]
    row, tree = array((B,), jnp.int32), array((B, T), jnp.int32) if shape.tree else None
    rows: Any = Rows(array((B, J), jnp.int32), row, row, tree, tree)  # type: ignore[arg-type]
    q = array((B, T, N, shape.head_width), jnp.bfloat16)
    return q, pages, rows, array((), jnp.int32)


def abstract_call(shape: Shape, backend: Backend):
    """Returns (function, abstract arguments) of a shape, as an engine on such a chip has it."""
    lanes = 128 if backend.kind == "tpu" else 1
    width = -(-2 * shape.head_width // lanes) * lanes

    def call(q, pages, rows, window):
        return paged_attention(
            q, pages, rows, window, scale=0.1, softcap=shape.softcap, backend=backend
        )

    return call, abstract_inputs(shape, width)


def concrete(shape: Shape, backend: Backend, rng: np.random.Generator):
    """Returns arguments of `abstract_call`, on the device: see `full_rows`."""
    return full_rows(shape, abstract_call(shape, backend)[1], rng)


def full_rows(shape: Shape, abstract: Any, rng: np.random.Generator):
    """Returns (q, pages, rows, window) of contexts that are full, their pages in random order.

    A tree is a chain: its queries see what a chunk's do.
    """
    q, pages, rows, _ = abstract
    B, T, J = shape.rows, shape.width, shape.context // shape.page
    seeds = [int(seed) for seed in rng.integers(2**31, size=3)]
    scale = None if pages.scale_PK2W is None else scales(pages.scale_PK2W, seeds[2])
    table_BJ = rng.permutation(np.arange(1, B * J + 1, dtype=np.int32)).reshape(B, J)
    depth_BT = ancestors_BT = None
    if rows.depth_BT is not None:
        depth_BT = jnp.tile(jnp.arange(T, dtype=jnp.int32), (B, 1))
        ancestors_BT = (2 << depth_BT) - 1
    start_B = jnp.full((B,), shape.context - T, jnp.int32)
    made = Rows(
        jnp.asarray(table_BJ), start_B, jnp.full((B,), T, jnp.int32), depth_BT, ancestors_BT
    )
    cells = scattered(pages.cells, seeds[1])
    return scattered(q, seeds[0]), Pages(cells, scale), made, jnp.int32(shape.window)


def work(shape: Shape) -> Work:
    """Returns the least that a call has to do: every cell that some query sees is read once."""
    return attention_work(shape, 2 * shape.head_width, shape.head_width)


def attention_work(shape: Shape, cell: int, value: int) -> Work:
    """Returns `work` for cells of `cell` numbers, whose values are `value` of them."""
    (N, K), B, T, C = shape.heads, shape.rows, shape.width, shape.context
    seen = min(C, shape.window + T - 1)
    pairs = sum(min(shape.window, C - T + t + 1) for t in range(T))
    item = jnp.dtype(CODES.get(shape.codes or "", jnp.bfloat16)).itemsize
    cell_bytes = cell * item + (8 if shape.codes else 0)
    ends = B * T * N * (2 * shape.head_width + 2 * value + 4)  # queries, outputs, log-sum-exps
    flops = 2 * B * N * pairs * (shape.head_width + value)
    return Work(B * K * seen * cell_bytes + ends, flops)


def small(shape: Shape) -> Shape:
    """Returns the shape at a size that any machine does at once."""
    return shape._replace(rows=2, width=min(shape.width, 8), context=4 * shape.page)

# SPDX-License-Identifier: Apache-2.0
"""Named cases of writing cells, which test, benchmark and tuner share, and real shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.backends import Backend
from pallas_kernels.inputs import Work, scales, scattered
from pallas_kernels.kv_write.op import kv_write
from pallas_kernels.pages import Pages

DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "float8": ml_dtypes.float8_e4m3fn,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Runs of tokens by their first cells and how many are kept."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    run: int = 1
    heads: int = 2
    width: int = 24  # of what comes
    cell: int = 32  # of pages
    page: int = 32
    dtype: str = "float32"
    bias: bool = False
    ways: int = 1  # devices that pages are dealt out to; those of the first are written
    split: int = 16
    pieces: bool = False  # all runs are of one row
    skipped: int = 0  # tokens of each run that are not kept, before those that are


DECODE: dict[str, Any] = {"starts": (0, 5, 31, 40), "counts": (1, 1, 1, 1)}
CHUNK: dict[str, Any] = {"starts": (0, 5, 31, 63), "counts": (9, 9, 9, 4), "run": 9}

CASES = {
    "decode": Case(**DECODE),
    "decode beside idle rows": Case(starts=(7, 5, 0, 40), counts=(0, 1, 0, 1)),
    "decode of idle rows only": Case(starts=(7, 0), counts=(0, 0)),
    "decode of one row": Case(starts=(17,), counts=(1,)),
    "decode of many rows": Case(starts=tuple(range(0, 80, 4)), counts=(1,) * 20),
    "decode, bfloat16": Case(**DECODE, dtype="bfloat16"),
    "decode, int8": Case(**DECODE, dtype="int8"),
    "decode, float8": Case(**DECODE, dtype="float8"),
    "decode, int8 and bias": Case(**DECODE, dtype="int8", bias=True),
    "decode, one head, whole cells": Case(**DECODE, heads=1, width=32),
    "chunk": Case(**CHUNK),
    "chunk, bfloat16": Case(**CHUNK, dtype="bfloat16"),
    "chunk, int8": Case(**CHUNK, dtype="int8"),
    "chunk, bias": Case(**CHUNK, bias=True),
    "chunk of whole strips": Case(starts=(0, 32, 16), counts=(32, 32, 32), run=32),
    "chunk over three pages": Case(starts=(20,), counts=(64,), run=64),
    "chunk, pages dealt out": Case(starts=(20, 3), counts=(64, 50), run=64, ways=2),
    "chunk beside idle rows": Case(starts=(20, 3, 9), counts=(0, 5, 0), run=7),
    "pieces that meet within a strip": Case(
        starts=(5, 14, 23, 32), counts=(9, 9, 9, 2), run=9, pieces=True
    ),
    "pieces that meet, bfloat16": Case(
        starts=(5, 13, 21, 29), counts=(8, 8, 8, 8), run=8, pieces=True, dtype="bfloat16"
    ),
    "pieces that meet, int8": Case(
        starts=(3, 10, 17), counts=(7, 7, 5), run=7, pieces=True, dtype="int8"
    ),
    "tokens of one strip": Case(starts=(3, 4, 5, 9), counts=(1, 1, 0, 1), pieces=True),
    "a run that begins within a strip": Case(
        starts=(0,), counts=(40,), run=40, skipped=5, bias=True
    ),
    "nothing to write": Case(starts=(), counts=()),
}


def make_inputs(case: Case):
    """Returns (pages, cell_TKC, page_T, offset_T): pages full, cells not all finite."""
    rng = np.random.default_rng(0)
    runs, W, dtype = len(case.starts), case.page, DTYPES[case.dtype]
    P = 5 * runs + 1
    cells = rng.standard_normal((P, case.heads, W, case.cell)) * 30
    coded = case.dtype in ("int8", "float8")
    scales: Any = rng.random((P, case.heads, 2, W)).astype(np.float32) if coded else None
    bias: Any = rng.random((P, case.heads, W)).astype(np.float32) if case.bias else None
    pages = Pages(jnp.asarray(cells.astype(dtype)), scales, bias)
    cell_TKC = rng.standard_normal((runs * case.run, case.heads, case.width)).astype(np.float32)
    cell_TKC[1::3, 0, 2] = np.nan
    cell_TKC[2::5, -1, 3] = np.inf
    page_T, offset_T = (np.zeros(runs * case.run, np.int32) for _ in range(2))
    table = rng.permutation(np.arange(1, P)).reshape(runs, -1) if runs else np.zeros((0, 5))
    for r, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        for t in range(case.run):
            place, offset_T[r * case.run + t] = divmod(start + t, W)
            if case.skipped <= t < count and place % case.ways == 0:
                page_T[r * case.run + t] = table[0 if case.pieces else r, place // case.ways]
    return jax.tree.map(jnp.asarray, (pages, cell_TKC, page_T, offset_T))


class Shape(NamedTuple):
    """Runs of a model in service on one chip."""

    runs: int
    run: int
    heads: int
    cell: int
    page: int = 64
    dtype: str = "bfloat16"
    pages: int = 1024


SHAPES = {
    "llama-3.1-8b, decode": Shape(64, 1, 8, 256),
    "llama-3.1-8b, chunk": Shape(16, 32, 8, 256),
    "llama-3.1-8b, chunk of 512": Shape(1, 512, 8, 256),
    "llama-3.1-8b over 8, decode": Shape(64, 1, 1, 256),
    "llama-3.1-8b, decode, int8": Shape(64, 1, 8, 256, 128, "int8"),
    "llama-3.1-8b, decode, float8": Shape(64, 1, 8, 256, 128, "float8"),
    "qwen3-30b-a3b, decode": Shape(64, 1, 4, 256),
    "gemma-3-27b, decode": Shape(64, 1, 16, 256),
    "deepseek-v3, decode": Shape(64, 1, 1, 640),
    "deepseek-v3, chunk": Shape(16, 32, 1, 640),
    "smollm2-135m, decode": Shape(64, 1, 3, 128),
}


def abstract_call(shape: Shape, backend: Backend):
    """Returns (function, abstract arguments) of a shape; its pages are the first."""
    array = jax.ShapeDtypeStruct
    T, K, W, P = shape.runs * shape.run, shape.heads, shape.page, shape.pages
    coded = shape.dtype in ("int8", "float8")
    scales = array((P, K, 2, W), jnp.float32) if coded else None
    dtype = jnp.dtype(DTYPES[shape.dtype])
    pages: Any = Pages(array((P, K, W, shape.cell), dtype), scales)  # type: ignore[arg-type]
    places = [array((T,), jnp.int32)] * 2

    def call(pages, cell_TKC, page_T, offset_T):
        return kv_write(
            pages,
            cell_TKC,
            page_T,
            offset_T,
            run=shape.run,
            split=shape.cell // 2,
            backend=backend,
        )

    return call, (pages, array((T, K, shape.cell), jnp.bfloat16), *places)


def concrete(shape: Shape, backend: Backend, rng: np.random.Generator):
    """Returns arguments of `abstract_call`, on the device: runs that begin anywhere in a page."""
    pages, cell_TKC, *_ = abstract_call(shape, backend)[1]
    seeds = [int(seed) for seed in rng.integers(2**31, size=3)]
    places = -(-shape.run // shape.page) + 1
    numbers = rng.permutation(np.arange(1, shape.pages))[: shape.runs * places]
    table = numbers.reshape(shape.runs, places).astype(np.int32)
    starts = rng.integers(shape.page, size=(shape.runs, 1))
    place, offset = np.divmod(starts + np.arange(shape.run), shape.page)
    page_T = np.take_along_axis(table, place, axis=1).reshape(-1)
    offset_T = offset.reshape(-1).astype(np.int32)
    scale = None if pages.scale_PK2W is None else scales(pages.scale_PK2W, seeds[2])
    made = Pages(scattered(pages.cells, seeds[0]), scale)
    new = scattered(cell_TKC, seeds[1])
    return made, new, jnp.asarray(page_T), jnp.asarray(offset_T)


def work(shape: Shape) -> Work:
    """Returns the least that a call has to do: cells are read, and stored."""
    T, K, coded = shape.runs * shape.run, shape.heads, shape.dtype in ("int8", "float8")
    stored = shape.cell * np.dtype(DTYPES[shape.dtype]).itemsize + (8 if coded else 0)
    return Work(T * K * (2 * shape.cell + stored) + 8 * T, 0)


def small(shape: Shape) -> Shape:
    """Returns the shape at a size that any machine does at once."""
    return shape._replace(runs=4, run=min(shape.run, shape.page), pages=16)

# SPDX-License-Identifier: Apache-2.0
"""Named cases of attention over a run, which test, benchmark and tuner share, and real shapes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import Backend
from pallas_kernels.flash_attention.op import flash_attention
from pallas_kernels.inputs import Work, scattered
from pallas_kernels.paged_attention.rows import NO_WINDOW

SCALE = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """So many queries over so many cells; they end at the same place if `places` is "end"."""

    queries: int
    cells: int
    heads: tuple[int, int] = (2, 2)
    head_width: int = 16
    windows: tuple[int, ...] = (NO_WINDOW,)
    softcap: float | None = None
    sinks: bool = False
    latent: int | None = None
    first: int = 0
    places: str = "end"  # or "striped": those of two devices of four, dealt out in turn by 8

    @property
    def values(self) -> tuple[int, int] | None:
        """Where a cell's value is."""
        return None if self.latent is None else (0, self.latent)


WINDOWS = (1, 7, 64, NO_WINDOW)
CASES = {
    "prompt": Case(queries=40, cells=40, windows=WINDOWS),
    "prompt of one block": Case(queries=16, cells=16),
    "prompt of one token": Case(queries=1, cells=1),
    "prompt of many blocks": Case(queries=200, cells=200, windows=WINDOWS),
    "prompt of no whole block": Case(queries=131, cells=131, windows=(50, NO_WINDOW)),
    "chunk behind others": Case(queries=30, cells=170, windows=(50, NO_WINDOW)),
    "one query": Case(queries=1, cells=90, windows=(8, NO_WINDOW)),
    "more queries than keys": Case(queries=90, cells=20),
    "3 to 1, capped": Case(queries=50, cells=90, heads=(6, 2), head_width=64, softcap=3.0),
    "8 to 1": Case(queries=33, cells=70, heads=(8, 1), head_width=32),
    "head 96": Case(queries=33, cells=70, head_width=96),
    "head 256": Case(queries=33, cells=70, head_width=256),
    "sinks": Case(queries=70, cells=70, heads=(4, 2), sinks=True, windows=(9, NO_WINDOW)),
    "latent": Case(queries=70, cells=70, heads=(4, 1), head_width=24, latent=16),
    "from a place on": Case(queries=70, cells=70, first=33, windows=(50, NO_WINDOW)),
    "striped": Case(queries=64, cells=64, places="striped", windows=(40, NO_WINDOW)),
    "striped, before the first": Case(queries=64, cells=64, places="striped", first=70),
}


def make_inputs(case: Case, dtype: Any = np.float32):
    """Returns (q_TNH, cell_SKC, place_T, place_S)."""
    rng = np.random.default_rng(0)
    (N, K), H, (T, S) = case.heads, case.head_width, (case.queries, case.cells)
    q_TNH = rng.standard_normal((T, N, H)).astype(dtype)
    width = 2 * H if case.latent is None else H
    cell_SKC = rng.standard_normal((S, K, width)).astype(dtype)
    if case.places == "striped":
        index = np.arange(T)
        place_T, place_S = ((index // 8 * 4 + device) * 8 + index % 8 for device in (1, 2))
    else:
        place_T, place_S = np.arange(T) + max(0, S - T), np.arange(S)
    made = q_TNH, cell_SKC, place_T.astype(np.int32), place_S.astype(np.int32)
    return jax.tree.map(jnp.asarray, made)


class Shape(NamedTuple):
    """A prompt of a model in service on one chip."""

    queries: int
    cells: int
    heads: tuple[int, int]
    head_width: int
    latent: int | None = None


SHAPES = {
    "llama-3.1-8b": Shape(4096, 4096, (32, 8), 128),
    "llama-3.1-8b over 8": Shape(4096, 4096, (4, 1), 128),
    "qwen3-30b-a3b": Shape(4096, 4096, (32, 4), 128),
    "gemma-3-27b": Shape(2048, 4096, (32, 16), 128),
    "smollm2-135m": Shape(2048, 2048, (9, 3), 64),
    "deepseek-v3": Shape(1024, 1024, (16, 1), 576, 512),
}


def abstract_call(shape: Shape, backend: Backend):
    """Returns (function, abstract arguments) of a shape, as an engine on such a chip has it."""
    array, H, (N, K) = jax.ShapeDtypeStruct, shape.head_width, shape.heads
    values = None if shape.latent is None else (0, shape.latent)
    width = 2 * H if shape.latent is None else H
    places = [array((count,), jnp.int32) for count in (shape.queries, shape.cells)]

    def call(q_TNH, cell_SKC, place_T, place_S, window):
        return flash_attention(
            q_TNH, cell_SKC, place_T, place_S, window, scale=0.1, values=values, backend=backend
        )

    q = array((shape.queries, N, H), jnp.bfloat16)
    return call, (
        q,
        array((shape.cells, K, width), jnp.bfloat16),
        *places,
        array((), jnp.int32),
    )


def concrete(shape: Shape, backend: Backend, rng: np.random.Generator):
    """Returns arguments of `abstract_call`, on the device: queries end where the cells do."""
    q, cells, *_ = abstract_call(shape, backend)[1]
    seeds = [int(seed) for seed in rng.integers(2**31, size=2)]
    T, S = shape.queries, shape.cells
    places = jnp.arange(S - T, S, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    return scattered(q, seeds[0]), scattered(cells, seeds[1]), *places, jnp.int32(NO_WINDOW)


def work(shape: Shape) -> Work:
    """Returns the least that a call has to do: half of a square of logits, and what is below it."""
    (N, K), H, (T, S) = shape.heads, shape.head_width, (shape.queries, shape.cells)
    value = H if shape.latent is None else shape.latent
    cell = 2 * H if shape.latent is None else H
    pairs = T * (S - T) + T * (T + 1) // 2
    ends = T * N * (2 * H + 2 * value + 4) + 4 * (T + S)
    return Work(2 * S * K * cell + ends, 2 * N * pairs * (H + value))


def small(shape: Shape) -> Shape:
    """Returns the shape at a size that any machine does at once."""
    return shape._replace(queries=64, cells=64)

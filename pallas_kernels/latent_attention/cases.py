# SPDX-License-Identifier: Apache-2.0
"""Named cases of latent attention, which test, benchmark and tuner share, and real shapes."""

from typing import Any

import numpy as np

from pallas_kernels.backends import Backend
from pallas_kernels.inputs import Work
from pallas_kernels.latent_attention.op import latent_attention
from pallas_kernels.paged_attention.cases import (
    TWO_WINDOWS,
    Case,
    Shape,
    abstract_inputs,
    attention_work,
    full_rows,
    small,
)

__all__ = ["CASES", "SHAPES", "abstract_call", "concrete", "small", "work"]

LATENT: dict[str, Any] = {"latent": 16, "head_width": 24, "heads": (4, 1)}
DECODE: dict[str, Any] = {"starts": (0, 1, 28, 104), "counts": (1, 1, 1, 1), **LATENT}
CHUNK: dict[str, Any] = {"starts": (0, 13, 32, 90), "counts": (5, 4, 5, 1), "width": 5, **LATENT}

CASES = {
    "decode": Case(**DECODE, windows=TWO_WINDOWS),
    "decode beside idle rows": Case(starts=(0, 53, 0), counts=(0, 1, 0), **LATENT),
    "decode of one row": Case(starts=(77,), counts=(1,), **LATENT),
    "decode, one head": Case(**DECODE | {"heads": (1, 1)}),
    "decode, 16 heads": Case(**DECODE | {"heads": (16, 1)}),
    "decode, cells filled up": Case(**DECODE, fill=8),
    "decode, wide": Case(**DECODE | {"latent": 128, "head_width": 144}),
    "decode, a latent of no whole piece": Case(**DECODE | {"latent": 40, "head_width": 56}),
    "decode, int8": Case(**DECODE, codes="int8"),
    "decode, float8": Case(**DECODE, codes="float8"),
    "decode, capped": Case(**DECODE, softcap=3.0),
    "decode, sinks": Case(**DECODE, sinks=True),
    "chunk": Case(**CHUNK, windows=TWO_WINDOWS),
    "chunk, int8": Case(**CHUNK, codes="int8"),
    "chunk in tiles": Case(
        starts=(0, 9, 50), counts=(40, 40, 17), width=40, blocks=(("queries", 16),), **LATENT
    ),
    "tree": Case(starts=(0, 13, 104), counts=(5, 5, 5), width=5, tree=True, **LATENT),
}

SHAPES = {
    "deepseek-v3, decode": Shape(64, 1, (128, 1), 576),
    "deepseek-v3, decode, long": Shape(8, 1, (128, 1), 576, context=131072),
    "deepseek-v3, chunk": Shape(16, 32, (128, 1), 576),
    "deepseek-v3 over 8, decode": Shape(64, 1, (16, 1), 576),
    "deepseek-v3, decode, int8": Shape(64, 1, (128, 1), 576, page=128, codes="int8"),
    "deepseek-v3, decode, float8": Shape(64, 1, (128, 1), 576, page=128, codes="float8"),
}
RANK, WIDTH = 512, 640  # of a DeepSeek-V3 cell; what it is filled up to


def abstract_call(shape: Shape, backend: Backend):
    """Returns (function, abstract arguments) of a shape, as an engine on such a chip has it."""

    def call(q, pages, rows, window):
        return latent_attention(q, pages, rows, window, rank=RANK, scale=0.1, backend=backend)

    return call, abstract_inputs(shape, WIDTH if backend.kind == "tpu" else shape.head_width)


def concrete(shape: Shape, backend: Backend, rng: np.random.Generator):
    """Returns arguments of `abstract_call`, on the device: contexts that are full."""
    return full_rows(shape, abstract_call(shape, backend)[1], rng)


def work(shape: Shape) -> Work:
    """Returns the least that a call has to do: every latent is read once, for all heads."""
    return attention_work(shape, shape.head_width, RANK)

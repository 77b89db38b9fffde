# SPDX-License-Identifier: Apache-2.0
"""Named cases that tests, benchmarks and the tuner share, and the shapes of real models."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.backends import Backend
from pallas_kernels.grouped_matmul.op import grouped_matmul
from pallas_kernels.grouped_matmul.weights import OfLayers, QuantizedExperts, Weight
from pallas_kernels.inputs import Work, scales, scattered

CODE_TYPES = {"int8": np.dtype(np.int8), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Rows by expert, `padding` behind them, and the matrices.

    codes: what they are quantized to, with a scale for every `group` inputs or, if None, for all.
    layer: the one that is meant of `layers`; None: there is one, without an axis of its own.
    """

    sizes: tuple[int, ...]
    inputs: int
    outputs: int
    padding: int = 0
    dtype: str = "float32"
    codes: str | None = None
    group: int | None = None
    layers: int = 1
    layer: int | None = None

    @property
    def rows(self) -> int:
        """All rows, those of no expert too."""
        return sum(self.sizes) + self.padding

    @property
    def groups(self) -> int:
        """The scales of an output."""
        return self.inputs // (self.group or self.inputs) if self.codes else 0


WHOLE: dict[str, Any] = {"inputs": 16, "outputs": 32}
RAGGED: dict[str, Any] = {"inputs": 21, "outputs": 37}
BY_128: dict[str, Any] = {"codes": "float8_e4m3fn", "group": 128}
# Of equal rows, experts, inputs and outputs: they share a program.
CASES = {
    "all whole": Case(sizes=(8, 8, 8, 8), **WHOLE),
    "nothing divides": Case(sizes=(3, 7, 1, 6, 5, 2, 4), padding=2, **RAGGED),
    "one row among padding": Case(sizes=(0, 0, 1, 0, 0, 0, 0), padding=29, **RAGGED),
    "a row each": Case(sizes=(1,) * 7, padding=23, **RAGGED),
    "empty experts at both ends and between": Case(
        sizes=(0, 0, 17, 0, 0, 13, 0), padding=0, **RAGGED
    ),
    "all rows to the last": Case(sizes=(0, 0, 0, 0, 0, 0, 27), padding=3, **RAGGED),
    "an expert ends with its tile": Case(sizes=(4, 8, 0, 4, 5, 0, 3), padding=6, **RAGGED),
    "only padding": Case(sizes=(0,) * 7, padding=30, **RAGGED),
    "one expert": Case(sizes=(19,), padding=1, **RAGGED),
    "one row of one input to one output": Case(sizes=(0, 1, 0), inputs=1, outputs=1),
    "few rows over many": Case(sizes=(0, 1) * 3 + (0,) * 120 + (2, 3), padding=2, **RAGGED),
    "wide": Case(sizes=(2, 9), inputs=9, outputs=300),
    "deep": Case(sizes=(5, 2), inputs=301, outputs=10),
    "first of many layers": Case(sizes=(4, 0, 6), padding=1, layers=3, layer=0, **RAGGED),
    "last of many layers": Case(sizes=(4, 0, 6), padding=1, layers=3, layer=2, **RAGGED),
    "bfloat16, many layers": Case(
        sizes=(3, 7, 0, 13), padding=2, dtype="bfloat16", layers=2, layer=1, **RAGGED
    ),
    "int8": Case(sizes=(3, 7, 0, 9), padding=2, codes="int8", **RAGGED),
    "int8, groups": Case(sizes=(5, 0, 8), padding=2, codes="int8", group=8, inputs=40, outputs=20),
    "int8, groups that tiles do not divide": Case(
        sizes=(5, 0, 8), codes="int8", group=12, inputs=60, outputs=20
    ),
    "int8, bfloat16, groups, many layers": Case(
        sizes=(3, 0, 7, 1),
        padding=3,
        dtype="bfloat16",
        codes="int8",
        group=8,
        layers=2,
        layer=1,
        inputs=24,
        outputs=20,
    ),
    "float8": Case(sizes=(6, 0, 5), padding=2, codes="float8_e4m3fn", **RAGGED),
    "float8, bfloat16, groups": Case(
        sizes=(6, 0, 5),
        padding=2,
        dtype="bfloat16",
        codes="float8_e4m3fn",
        group=16,
        inputs=32,
        outputs=17,
    ),
}


def make_inputs(
    case: Case, *, poisoned: bool = False, seed: int = 0
) -> tuple[np.ndarray, Weight, np.ndarray]:
    """Returns (x_SD, weight, sizes_E), NumPy.

    Poisoned: rows of no expert are NaN, and so are matrices of experts without rows and of other
    layers, or their scales.
    """
    rng = np.random.default_rng(seed)
    E, L = len(case.sizes), case.layers
    x_SD = rng.standard_normal((case.rows, case.inputs)).astype(DTYPES[case.dtype])
    matrices_LEDF = rng.standard_normal((L, E, case.inputs, case.outputs)).astype(np.float32)
    held: Any
    scales: Any = None
    if case.codes is None:
        held = matrices_LEDF.astype(DTYPES[case.dtype])
    else:
        grouped = matrices_LEDF.reshape(L, E, case.groups, -1, case.outputs)
        scales = np.abs(grouped).max(axis=3) / MOST[case.codes]
        codes = (grouped / scales[:, :, :, None]).reshape(matrices_LEDF.shape)
        held = (np.rint(codes) if case.codes == "int8" else codes).astype(CODE_TYPES[case.codes])
    if poisoned:
        x_SD[sum(case.sizes) :] = np.nan
        unread = np.ones((L, E), bool)
        unread[case.layer or 0] = np.array(case.sizes, np.int32) == 0
        if scales is not None:
            scales[unread] = np.nan
        if case.codes != "int8":
            held[unread] = np.nan
    weight: Any = held if scales is None else QuantizedExperts(held, scales)
    layer: Any = np.int32(case.layer or 0)
    if case.layer is None:
        weight = jax.tree.map(lambda array: array[0], weight)
    else:
        weight = OfLayers(weight, layer)
    return x_SD, weight, np.array(case.sizes, np.int32)


def real(rows: int, experts: int, inputs: int, outputs: int, **more: Any) -> Case:
    """Returns a case of so many rows, dealt out evenly, of which each expert has one at most more
    than another; in bfloat16, and of many layers."""
    sizes = tuple((rows + expert) // experts for expert in range(experts))
    assert sum(sizes) == rows, "floor sums of successive numbers"
    settings: dict[str, Any] = {"dtype": "bfloat16", "layers": 4, "layer": 1} | more
    return Case(sizes=sizes, inputs=inputs, outputs=outputs, **settings)


# Rows are tokens times experts a token; up and gate are alike. DeepSeek's are of 64 devices: in a
# round from each of them the least that is sent, or its share of 4096 tokens.
SHAPES = {
    "qwen3-30b-a3b up, 1 token": real(8, 128, 2048, 768),
    "qwen3-30b-a3b up, 64 tokens": real(512, 128, 2048, 768),
    "qwen3-30b-a3b down, 64 tokens": real(512, 128, 768, 2048),
    "qwen3-30b-a3b up, 512 tokens": real(4096, 128, 2048, 768),
    "qwen3-30b-a3b down, 512 tokens": real(4096, 128, 768, 2048),
    "qwen3-30b-a3b up, 64 tokens, int8": real(512, 128, 2048, 768, codes="int8"),
    "qwen3-30b-a3b up, 512 tokens, int8 by 128": real(
        4096, 128, 2048, 768, codes="int8", group=128
    ),
    "qwen3-30b-a3b up, 8 tokens, float32": real(64, 128, 2048, 768, dtype="float32"),
    "deepseek-v3 up, 4 of 256 experts, decode": real(512, 4, 7168, 2048),
    "deepseek-v3 down, 4 of 256 experts, decode": real(512, 4, 2048, 7168),
    "deepseek-v3 up, 4 of 256 experts, 512 tokens": real(4096, 4, 7168, 2048),
    "deepseek-v3 up, 4 of 256 experts, float8": real(512, 4, 7168, 2048, **BY_128),
    "deepseek-v3 down, 4 of 256 experts, float8": real(512, 4, 2048, 7168, **BY_128),
    "deepseek-v3 up, all experts, 1 token": real(8, 256, 7168, 2048, layers=1),
    "mixtral-8x7b up, 64 tokens": real(128, 8, 4096, 14336),
    "mixtral-8x7b down, 64 tokens": real(128, 8, 14336, 4096),
    "mixtral-8x7b up, 512 tokens": real(1024, 8, 4096, 14336),
    "mixtral-8x7b down, 512 tokens": real(1024, 8, 14336, 4096),
    "mixtral-8x7b up, 64 tokens, int8": real(128, 8, 4096, 14336, codes="int8"),
    "gpt-oss-20b up, 64 tokens": real(256, 32, 2880, 2880),
}


def abstract_call(case: Case, backend: Backend):
    """Returns (function, abstract arguments) of a case of many layers."""
    array, (E, D, F) = jax.ShapeDtypeStruct, (len(case.sizes), case.inputs, case.outputs)
    layers = (case.layers, E)
    dtype = jnp.dtype(case.dtype)
    weight: Any = array((*layers, D, F), dtype)
    if case.codes is not None:
        codes = array((*layers, D, F), CODE_TYPES[case.codes])
        groups = D // case.group if case.group else 1
        weight = QuantizedExperts(codes, array((*layers, groups, F), jnp.float32))  # type: ignore[arg-type]
    inputs = array((sum(case.sizes), D), dtype), weight, array((), jnp.int32)

    def call(x_SD, weight, layer, sizes_E):
        return grouped_matmul(x_SD, OfLayers(weight, layer), sizes_E, backend=backend)

    return call, (*inputs, array((E,), jnp.int32))


def concrete(case: Case, backend: Backend, rng: np.random.Generator):
    """Returns arguments of `abstract_call`, on the device: rows in the experts' order."""
    x_SD, weight, *_ = abstract_call(case, backend)[1]
    seeds = [int(seed) for seed in rng.integers(2**31, size=3)]
    made: Any
    if isinstance(weight, QuantizedExperts):
        codes = scattered(weight.codes, seeds[1])
        made = QuantizedExperts(codes, scales(weight.scales, seeds[2]))
    else:
        made = scattered(weight, seeds[1])
    sizes_E = jnp.asarray(np.array(case.sizes, np.int32))
    layer = min(case.layer or 0, case.layers - 1)
    return scattered(x_SD, seeds[0]), made, jnp.int32(layer), sizes_E


def work(case: Case) -> Work:
    """Returns the least that a call has to do: matrices of experts that have rows are read once."""
    S, D, F = sum(case.sizes), case.inputs, case.outputs
    item = DTYPES[case.dtype].itemsize
    matrix = D * F * (1 if case.codes else item) + 4 * F * case.groups
    used = sum(size > 0 for size in case.sizes)
    return Work(used * matrix + S * (D * item + 4 * F), 2 * S * D * F)


def small(case: Case) -> Case:
    """Returns the case at a size that any machine does at once."""
    less: dict[str, Any] = {"inputs": 256, "outputs": 384, "layers": 2, "layer": 1}
    return dataclasses.replace(case, sizes=(2, 0, 3, 3), **less)

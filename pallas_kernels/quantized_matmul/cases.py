# SPDX-License-Identifier: Apache-2.0
"""Named cases that tests, benchmarks and the tuner share, and the shapes of real models."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.backends import Backend
from pallas_kernels.inputs import Work, scales, scattered
from pallas_kernels.quantized_matmul.op import quantized_matmul
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, pack_int4

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
MOST = {"int8": 127.0, "int4": 7.0, "float8": 448.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Rows times a matrix.

    codes: "int8", "int4" (two to a byte) or "float8", with a scale for every `group` inputs or, if
    None, for all of an output. zeros: whether they are given, beside integers, as float32.
    """

    rows: int
    inputs: int
    outputs: int
    dtype: str = "float32"
    codes: str = "int8"
    group: int | None = None
    zeros: bool = False
    activations: str = "plain"

    @property
    def groups(self) -> int:
        """The scales of an output."""
        return self.inputs // self.group if self.group else 1


RAGGED: dict[str, Any] = {"inputs": 150, "outputs": 37}  # for two codes a byte: halves of 75
MANY: dict[str, Any] = {"inputs": 1408, "outputs": 20}  # 11 registers of columns
CASES = {
    "all whole": Case(rows=16, inputs=128, outputs=128),
    "nothing divides": Case(rows=13, inputs=77, outputs=37),
    "one row": Case(rows=1, **RAGGED),
    "one of each": Case(rows=1, inputs=1, outputs=1),
    "one output": Case(rows=5, inputs=150, outputs=1),
    "no rows": Case(rows=0, **RAGGED),
    "no inputs": Case(rows=3, inputs=0, outputs=4),
    "no outputs": Case(rows=3, inputs=8, outputs=0),
    "wide": Case(rows=3, inputs=40, outputs=600),
    "deep": Case(rows=3, inputs=2500, outputs=9),
    "many rows": Case(rows=600, inputs=40, outputs=24),
    "zeros": Case(rows=7, zeros=True, **RAGGED),
    "int8 by 32": Case(rows=5, inputs=160, outputs=37, group=32),
    "int8 by 64, zeros": Case(rows=5, inputs=192, outputs=37, group=64, zeros=True),
    "int8 by 128": Case(rows=5, group=128, **MANY),
    "int8 by 256": Case(rows=5, inputs=768, outputs=20, group=256),
    "int8 by 12, which kernels decline": Case(rows=5, inputs=60, outputs=20, group=12),
    "int8 by 32, many rows": Case(rows=70, inputs=160, outputs=37, group=32),
    "int8 by 32, many rows, bfloat16": Case(
        rows=70, inputs=160, outputs=37, group=32, dtype="bfloat16"
    ),
    "int4": Case(rows=5, codes="int4", **RAGGED),
    "int4, zeros": Case(rows=5, codes="int4", zeros=True, **RAGGED),
    "int4, two inputs": Case(rows=5, codes="int4", inputs=2, outputs=3),
    "int4 by 32": Case(rows=5, inputs=416, outputs=37, codes="int4", group=32),
    "int4 by 64, zeros": Case(rows=5, inputs=576, outputs=37, codes="int4", group=64, zeros=True),
    "int4 by 128, bfloat16": Case(rows=5, codes="int4", group=128, dtype="bfloat16", **MANY),
    "as many groups as lanes": Case(rows=5, inputs=4096, outputs=9, group=32, zeros=True),
    "int4 by 32, many rows": Case(
        rows=70, inputs=416, outputs=37, codes="int4", group=32, zeros=True
    ),
    "float8": Case(rows=5, codes="float8", **RAGGED),
    "float8 by 128, bfloat16": Case(rows=5, codes="float8", group=128, dtype="bfloat16", **MANY),
    "bfloat16": Case(rows=9, dtype="bfloat16", **RAGGED),
    "int8 rows": Case(rows=5, activations="int8", **RAGGED),
    "int8 rows, bfloat16, one": Case(rows=1, activations="int8", dtype="bfloat16", **RAGGED),
    "int8 rows, zeros": Case(rows=5, activations="int8", zeros=True, **RAGGED),
    "int8 rows by 32, zeros": Case(
        rows=5, activations="int8", inputs=160, outputs=37, group=32, zeros=True
    ),
    "int8 rows, int4 by 128": Case(rows=5, activations="int8", codes="int4", group=128, **MANY),
    "int8 rows, int4 by 32, many rows": Case(
        rows=150, activations="int8", codes="int4", inputs=96, outputs=37, group=32, zeros=True
    ),
}


def make_inputs(case: Case, *, seed: int = 0) -> tuple[np.ndarray, QuantizedWeight]:
    """Returns (x_TD, weight), NumPy."""
    rng = np.random.default_rng(seed)
    F, D, G = case.outputs, case.inputs, case.groups
    x_TD = rng.standard_normal((case.rows, D)).astype(DTYPES[case.dtype])
    grouped = rng.standard_normal((F, G, D // G)).astype(np.float32)
    # Neither all of a scale: what uses another's would not show.
    scales = np.abs(grouped).max(axis=2, initial=1e-3) / MOST[case.codes]
    codes_FD = (grouped / scales[:, :, None]).reshape(F, D)
    codes_FD = codes_FD.astype(FLOAT8) if case.codes == "float8" else np.rint(codes_FD)
    zeros: Any = rng.uniform(-3, 3, (F, G)).astype(np.float32) if case.zeros else None
    if case.codes == "int4":
        zeros = None if zeros is None else zeros + np.float32(8)
        return x_TD, QuantizedWeight(pack_int4(codes_FD + 8), scales, zeros)
    if case.codes == "int8":
        codes_FD = codes_FD.astype(np.int8)
    return x_TD, QuantizedWeight(codes_FD, scales, zeros)


def real(rows: int, inputs: int, outputs: int, codes: str, group: int | None, **more: Any) -> Case:
    """Returns a case in bfloat16."""
    settings = {"dtype": "bfloat16"} | more
    return Case(rows=rows, inputs=inputs, outputs=outputs, codes=codes, group=group, **settings)


W8A8: dict[str, Any] = {"activations": "int8"}
# q, k and v together, then the output's matrix; up and gate are alike.
SHAPES = {
    "llama-3.1-8b qkv, 8 rows, int8": real(8, 4096, 6144, "int8", None),
    "llama-3.1-8b up, 16 rows, int8": real(16, 4096, 14336, "int8", None),
    "llama-3.1-8b up, 64 rows, int8": real(64, 4096, 14336, "int8", None),
    "llama-3.1-8b down, 64 rows, int8": real(64, 14336, 4096, "int8", None),
    "llama-3.1-8b up, 64 rows, W8A8": real(64, 4096, 14336, "int8", None, **W8A8),
    "llama-3.1-8b down, 2048 rows, W8A8": real(2048, 14336, 4096, "int8", None, **W8A8),
    "llama-3.1-8b up, 1 row, int4 by 128": real(1, 4096, 14336, "int4", 128),
    "llama-3.1-8b down, 64 rows, int4 by 128": real(64, 14336, 4096, "int4", 128, zeros=True),
    "llama-3.1-8b up, 2048 rows, int4 by 128": real(2048, 4096, 14336, "int4", 128, zeros=True),
    "llama-3.1-8b up, 64 rows, int4 by 32": real(64, 4096, 14336, "int4", 32, zeros=True),
    "llama-3.1-8b down, 2048 rows, int4 by 32": real(2048, 14336, 4096, "int4", 32, zeros=True),
    "llama-3.1-8b up, 64 rows, int4 by 128, W4A8": real(64, 4096, 14336, "int4", 128, **W8A8),
    "llama-3.1-8b up, 64 rows, int4 by 32, W4A8": real(64, 4096, 14336, "int4", 32, **W8A8),
    "llama-3.1-8b up, 2048 rows, int8 by 64": real(2048, 4096, 14336, "int8", 64),
    "llama-3.1-8b head, 64 rows, int8": real(64, 4096, 128256, "int8", None),
    "llama-3.1-8b up, 64 rows, float8": real(64, 4096, 14336, "float8", None),
    "qwen3-30b-a3b qkv, 64 rows, int8": real(64, 2048, 5120, "int8", None),
    "qwen3-30b-a3b o, 512 rows, int4 by 128": real(512, 4096, 2048, "int4", 128),
    "gemma-3-27b up, 64 rows, int8": real(64, 5376, 21504, "int8", None),
    "gemma-3-27b down, 512 rows, int4 by 32": real(512, 21504, 5376, "int4", 32),
    "gemma-3-27b down, 8 rows, int8 by 128, float32": real(
        8, 21504, 5376, "int8", 128, dtype="float32"
    ),
    "deepseek-v3 q down, 64 rows, float8 by 128": real(64, 7168, 1536, "float8", 128),
    "deepseek-v3 o, 64 rows, float8 by 128": real(64, 16384, 7168, "float8", 128),
    "deepseek-v3 dense down, 2048 rows, float8 by 128": real(2048, 18432, 7168, "float8", 128),
    "smollm2-135m qkv, 1 row, int8": real(1, 576, 960, "int8", None),
    "smollm2-135m up, 32 rows, int4 by 32": real(32, 576, 1536, "int4", 32, zeros=True),
    "smollm2-135m down, 512 rows, int4 by 32": real(512, 1536, 576, "int4", 32, zeros=True),
    "smollm2-135m up, 8 rows, int4 by 64, W4A8": real(8, 576, 1536, "int4", 64, **W8A8),
    "smollm2-135m head, 8 rows, int8, float32": real(8, 576, 49152, "int8", None, dtype="float32"),
}


def abstract_call(case: Case, backend: Backend):
    """Returns (function, abstract arguments) of a case."""
    array, (F, D, G) = jax.ShapeDtypeStruct, (case.outputs, case.inputs, case.groups)
    kinds: dict[str, Any] = {"int8": jnp.int8, "int4": jnp.uint8, "float8": FLOAT8}
    columns = D // 2 if case.codes == "int4" else D
    codes = array((F, columns), jnp.dtype(kinds[case.codes]))
    scales = array((F, G), jnp.float32)
    weight: Any = QuantizedWeight(codes, scales, scales if case.zeros else None)  # type: ignore[arg-type]

    def call(x_TD, weight):
        return quantized_matmul(x_TD, weight, activations=case.activations, backend=backend)

    return call, (array((case.rows, D), jnp.dtype(case.dtype)), weight)


def concrete(case: Case, backend: Backend, rng: np.random.Generator):
    """Returns arguments of `abstract_call`, on the device."""
    x_TD, weight = abstract_call(case, backend)[1]
    seeds = [int(seed) for seed in rng.integers(2**31, size=3)]
    zeros: Any = None
    if case.zeros:
        center = 8.0 if case.codes == "int4" else 0.0
        zeros = jnp.full(weight.zeros.shape, center + 0.5, jnp.float32)
    codes = scattered(weight.codes, seeds[1])
    made = QuantizedWeight(codes, scales(weight.scales, seeds[2]), zeros)
    return scattered(x_TD, seeds[0]), made


def work(case: Case) -> Work:
    """Returns the least that a call has to do: codes and scales are read once."""
    T, D, F = case.rows, case.inputs, case.outputs
    code_bytes = F * D // 2 if case.codes == "int4" else F * D
    scale_bytes = 4 * F * case.groups * (2 if case.zeros else 1)
    ends = T * D * DTYPES[case.dtype].itemsize + 4 * T * F
    numbers = "int8" if case.activations == "int8" else "bfloat16"
    return Work(code_bytes + scale_bytes + ends, 2 * T * D * F, numbers)


def small(case: Case) -> Case:
    """Returns the case at a size that any machine does at once."""
    return dataclasses.replace(case, rows=min(case.rows, 8), inputs=512, outputs=384)

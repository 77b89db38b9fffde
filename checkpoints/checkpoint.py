# SPDX-License-Identifier: Apache-2.0
"""What every checkpoint format offers to the loader."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from checkpoints.tokenizer import Tokenizer

# Plain element types by the names that safetensors gives them; GGUF's agree where it has them.
DTYPES: Mapping[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """A tensor: its shape in row-major order (`[out, in]` for a matrix), and its stored type by
    its name in `DTYPES` ("F32", "BF16"), in GGUF ("Q4_1"), or "F8_E4M3", "F8_E5M2", "MXFP4"."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """An opened checkpoint whose headers have been checked; tensor data is read on demand.

    `config` is config.json as it is (Hugging Face, Orbax) or the metadata (GGUF:
    "llama.block_count").
    `generation_config` is empty where the checkpoint has none.
    """

    @property
    def kind(self) -> str:
        """ "gguf", "huggingface" or "orbax"."""

    @property
    def path(self) -> pathlib.Path: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def generation_config(self) -> dict[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor in its shape, as stored; float32 where it is stored quantized
        (bfloat16 for MXFP4, which that holds exactly).

        The array is the caller's own: no view of the file, and held by nobody else. Raises
        KeyError for an unknown name.
        """

    def read_part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns `read(name)[index]`, slices with steps of 1; as little is read as can be."""

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer stored beside the weights, or None where there is none."""


def num_bytes(info: TensorInfo) -> int:
    """Returns the bytes of a tensor of a plain type."""
    return math.prod(info.shape) * np.dtype(DTYPES[info.dtype]).itemsize


def total_bytes(checkpoint: Checkpoint) -> int:
    """Returns the bytes of all tensors of a checkpoint of plain types."""
    return sum(map(num_bytes, checkpoint.tensors.values()))

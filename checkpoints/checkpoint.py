# SPDX-License-Identifier: Apache-2.0
"""What every checkpoint format offers to the loader."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from checkpoints.tokenizer import Tokenizer


class TensorInfo(NamedTuple):
    """A stored tensor: its shape in row-major order (`[out, in]` for a matrix), and the stored
    type by the format's own name ("F32", "BF16", "Q4_1")."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """An opened checkpoint whose headers have been checked; tensor data is read on demand.

    `config` is config.json as it is (Hugging Face) or the metadata (GGUF: "llama.block_count").
    `generation_config` is empty where the checkpoint has none.
    """

    @property
    def kind(self) -> str:
        """ "gguf" or "huggingface"."""

    @property
    def path(self) -> pathlib.Path: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def generation_config(self) -> dict[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor in its shape; float32 where it is stored quantized, else as stored.

        The array is the caller's own: no view of the file, and held by nobody else. Raises
        KeyError for an unknown name.
        """

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer stored beside the weights, or None where there is none."""

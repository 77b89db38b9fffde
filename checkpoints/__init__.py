# SPDX-License-Identifier: Apache-2.0
"""Model checkpoints: GGUF files are read, Hugging Face and Orbax folders read and written; and
the store of named models.

This floor knows no model and no request. Parameters are loaded by name tables that the engine
hands to `checkpoints.load` (imported apart, since it alone needs jax).
"""

import pathlib

from checkpoints.checkpoint import Checkpoint, TensorInfo
from checkpoints.gguf import GGUFCheckpoint, is_gguf
from checkpoints.huggingface import PICKLE_HINT, PICKLES, HuggingFaceCheckpoint
from checkpoints.orbax import OrbaxCheckpoint, is_orbax
from checkpoints.quantized import decoded
from checkpoints.tokenizer import Tokenizer

__all__ = ["Checkpoint", "TensorInfo", "Tokenizer", "open_checkpoint"]


def open_checkpoint(path: str | pathlib.Path) -> Checkpoint:
    """Returns the checkpoint at `path`: a GGUF file, or a Hugging Face or Orbax folder.

    Only headers are read here; they are checked against the files, so that a truncated download
    fails now (the values of an Orbax folder are checked when they are read). Raises
    FileNotFoundError where nothing is there, and ValueError (one line, naming the file and the
    fault) where what is there cannot be loaded.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        if is_orbax(path):
            return OrbaxCheckpoint(path)
        return decoded(HuggingFaceCheckpoint(path))
    if path.is_file():
        if path.suffix in PICKLES and not is_gguf(path):
            raise ValueError(f"{path}: {PICKLE_HINT}")
        return GGUFCheckpoint(path)
    raise FileNotFoundError(f"{path}: no such file or folder; give a GGUF file or a model folder")

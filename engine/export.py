# SPDX-License-Identifier: Apache-2.0
"""A model from any checkpoint, seen as a Hugging Face folder of one type: what writers write."""

from typing import Any, NamedTuple

import jax
import numpy as np

from checkpoints.checkpoint import DTYPES, TensorInfo
from checkpoints.load import Source, Target, check_parameters, warn_of_unused
from checkpoints.tokenizer import Tokenizer
from engine.loading import Model, entry_of
from engine.models.family import Entry
from engine.models.tree import parameter_specs
from sharding import Spec

NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class Piece(NamedTuple):
    """Where rows of a tensor are stored now, and how a folder stores them."""

    stored: Entry
    written: Entry


class Origin(NamedTuple):
    """A tensor of the export."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # its rows, in order


class Export:
    """A model as a `Checkpoint` with the tensors and settings of a Hugging Face folder.

    Floating tensors are in `dtype`, and each is made when it is read. A folder keeps its tensors
    and its config.json but for the type; a GGUF file gets those of its family.
    """

    kind = "huggingface"

    def __init__(self, model: Model, dtype: np.dtype) -> None:
        """Raises ValueError naming every missing or mis-shaped tensor; no tensor is read."""
        self._model, self._dtype = model, np.dtype(dtype)
        self.path = model.checkpoint.path
        self._origins = origins_of(model)
        self.tensors = {
            name: TensorInfo(origin.shape, NAMES[self._dtype_of(origin)])
            for name, origin in self._origins.items()
        }
        if model.checkpoint.kind == "gguf":
            assert model.family.to_hf is not None, "families of GGUF files have it"
            config = model.family.to_hf(model.config)
            self.generation_config: dict[str, Any] = special_ids(model)
        else:
            config = model.checkpoint.config
            self.generation_config = model.checkpoint.generation_config
        # Older readers know the older key only.
        old = {"torch_dtype": self._dtype.name} if "torch_dtype" in config else {}
        self.config: dict[str, Any] = {**config, **old, "dtype": self._dtype.name}

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor; raises ValueError where a value is beyond the type's range."""
        origin = self._origins[name]
        rows = [self._read_piece(piece) for piece in origin.pieces]
        array = rows[0] if len(rows) == 1 else np.concatenate(rows)
        with np.errstate(over="ignore"):
            cast = array.astype(self._dtype_of(origin), copy=False)
        if not np.isfinite(cast).all():
            lost = array[np.isfinite(array) & ~np.isfinite(cast)]
            if lost.size:
                raise ValueError(
                    f"{self.path}: tensor {origin.pieces[0].stored.tensor!r} holds "
                    f"{float(lost[0]):g}, "
                    f"beyond the range of {self._dtype.name}; use bfloat16 or float32"
                )
        return cast

    def _read_piece(self, piece: Piece) -> np.ndarray:
        array = self._model.checkpoint.read(piece.stored.tensor)
        if piece.stored.rows is not None:
            array = array[slice(*piece.stored.rows)]
        for function in (piece.stored.transform, piece.written.inverse):
            array = array if function is None else function(array)
        return array

    def tokenizer(self) -> Tokenizer | None:
        """Returns the model's tokenizer."""
        return self._model.tokenizer

    def _dtype_of(self, origin: Origin) -> np.dtype:
        """Returns the type of a tensor of the export: integers keep theirs."""
        info = self._model.checkpoint.tensors[origin.pieces[0].stored.tensor]
        kept = info.dtype in DTYPES and np.dtype(DTYPES[info.dtype]).kind in "iub"
        return np.dtype(DTYPES[info.dtype]) if kept else self._dtype


def origins_of(model: Model) -> dict[str, Origin]:
    """Returns the tensors of the export by name.

    Raises ValueError unless the checkpoint has every parameter in its shape. A folder's other
    tensors come along; those of a GGUF file are left behind with a warning.
    """
    checkpoint, config = model.checkpoint, model.config
    specs = parameter_specs(config, np.dtype(np.float32), stacked=False)
    paths = jax.tree.leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, Spec))
    stored_names = model.family.names(checkpoint.kind, config)
    written_names = model.family.names("huggingface", config)
    sources, targets = {}, {}
    pieces: dict[str, list[tuple[tuple[int, ...], Piece]]] = {}
    for path, spec in paths:
        stored = entry_of(path, stored_names, config)
        written = entry_of(path, written_names, config)
        key = jax.tree_util.keystr(path)
        sources[key] = Source((stored.tensor,), stored.transform, 0, stored.rows, stored.share)
        targets[key] = Target(spec.shape, spec.dtype)
        pieces.setdefault(written.tensor, []).append((spec.shape, Piece(stored, written)))
    check_parameters(checkpoint, sources, targets)
    if checkpoint.kind == "gguf":
        warn_of_unused(checkpoint, sources)
        return {name: joined(parts) for name, parts in pieces.items()}
    return {
        name: Origin(info.shape, (Piece(Entry(name), Entry(name)),))
        for name, info in checkpoint.tensors.items()
    }


def joined(parts: list[tuple[tuple[int, ...], Piece]]) -> Origin:
    """Returns the tensor that is made of some parameters, one after the other."""
    if len(parts) == 1:
        [(shape, piece)] = parts
        return Origin(shape, (piece,))
    ordered = sorted(parts, key=lambda part: part[1].written.rows or (0, 0))
    rows = sum(shape[0] for shape, _ in ordered)
    return Origin((rows, *ordered[0][0][1:]), tuple(piece for _, piece in ordered))


def special_ids(model: Model) -> dict[str, Any]:
    """Returns generation_config.json of a model that has none: its BOS, and all its end ids."""
    settings: dict[str, Any] = {}
    if model.config.bos_id is not None:
        settings["bos_token_id"] = model.config.bos_id
    if model.eos_ids:
        settings["eos_token_id"] = list(model.eos_ids)
    return settings

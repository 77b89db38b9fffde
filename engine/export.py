# SPDX-License-Identifier: Apache-2.0
"""A model from any checkpoint, seen as a Hugging Face folder of one type: what writers write."""

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np

from checkpoints.checkpoint import DTYPES, TensorInfo
from checkpoints.load import check_parameters, warn_of_unused
from checkpoints.sources import Source, Target
from checkpoints.tokenizer import Tokenizer
from engine.loading import Model, entry_of, source_of
from engine.models.family import Transform
from engine.models.tree import parameter_specs
from sharding import Spec

NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class Piece(NamedTuple):
    """A parameter, or one expert of it, as a part of a tensor of a folder.

    `stored` is where the parameter stands now; `place` is the expert's on its first axis, and
    `inverse` makes of it what a folder stores.
    """

    stored: Source
    place: int | None = None
    inverse: Transform | None = None


class Origin(NamedTuple):
    """A tensor of the export."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # its rows, in order

    @property
    def stored(self) -> str:
        """The name of the tensor that the first of it comes from."""
        return self.pieces[0].stored.names[0]


class Export:
    """A model as a `Checkpoint` with the tensors and settings of a Hugging Face folder.

    Floating tensors are in `dtype`, and each is made when it is read. A folder keeps its tensors
    and its config.json but for the type; a GGUF file gets those of its family.
    """

    kind = "huggingface"

    def __init__(self, model: Model, dtype: np.dtype) -> None:
        """Raises ValueError naming every missing or mis-shaped tensor; no tensor is read.

        Also where config.json cannot say what a GGUF file says.
        """
        self._model, self._dtype = model, np.dtype(dtype)
        self.path = model.checkpoint.path
        self._origins = origins_of(model)
        pieces = [piece for origin in self._origins.values() for piece in origin.pieces]
        self._uses = Counter(piece.stored.names[0] for piece in pieces)
        self._kept: tuple[str, np.ndarray] | None = None
        self.tensors = {
            name: TensorInfo(origin.shape, NAMES[self._dtype_of(origin)])
            for name, origin in self._origins.items()
        }
        if model.checkpoint.kind == "gguf":
            config = written_config(model)
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
                    f"{self.path}: tensor {origin.stored!r} holds "
                    f"{float(lost[0]):g}, "
                    f"beyond the range of {self._dtype.name}; use bfloat16 or float32"
                )
        return cast

    def read_part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor, which is made whole."""
        return self.read(name)[index]

    def _read_piece(self, piece: Piece) -> np.ndarray:
        """Returns the piece in memory of its own."""
        array = self._read_stored(piece.stored.names[0])
        if piece.stored.rows is not None:
            array = array[slice(*piece.stored.rows)]
        if piece.stored.transform is not None:
            array = piece.stored.transform(array)
        if piece.place is not None:
            array = array[piece.place]
        if piece.inverse is not None:
            array = piece.inverse(array)
        return array if self._kept is None else array.copy()

    def _read_stored(self, name: str) -> np.ndarray:
        """Returns a stored tensor, kept as long as it is read again: pieces of one come in turn."""
        if self._kept is None or self._kept[0] != name:
            self._kept = None  # before memory is taken for another
            array = self._model.checkpoint.read(name)
            if self._uses[name] == 1:
                return array
            self._kept = (name, array)
        return self._kept[1]

    def tokenizer(self) -> Tokenizer | None:
        """Returns the model's tokenizer."""
        return self._model.tokenizer

    def _dtype_of(self, origin: Origin) -> np.dtype:
        """Returns the type of a tensor of the export: integers keep theirs."""
        info = self._model.checkpoint.tensors[origin.stored]
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
    names = model.family.names(checkpoint.kind, config)
    sources = {
        jax.tree_util.keystr(path): source_of(path, names, config, stacked=False)
        for path, _ in paths
    }
    targets = {jax.tree_util.keystr(path): Target(spec.shape, spec.dtype) for path, spec in paths}
    check_parameters(checkpoint, sources, targets)
    if checkpoint.kind != "gguf":
        return {
            name: Origin(info.shape, (Piece(Source((name,))),))
            for name, info in checkpoint.tensors.items()
        }
    warn_of_unused(checkpoint, sources)
    written_names = model.family.names("huggingface", config)
    parts: dict[str, list[Part]] = {}
    for path, spec in paths:
        stored = sources[jax.tree_util.keystr(path)]
        written = source_of(path, written_names, config, stacked=False)
        inverse = entry_of(path, written_names, config).inverse
        for place, name in enumerate(written.names):
            piece = Piece(stored, place if written.stack else None, inverse)
            shape = shape_after(inverse, spec.shape[written.stack :])
            parts.setdefault(name, []).append(Part(written.rows, shape, piece))
    return {name: joined(several) for name, several in parts.items()}


class Part(NamedTuple):
    """A piece of a tensor with its shape, and the rows that it is; None: all of them."""

    rows: tuple[int, int] | None
    shape: tuple[int, ...]
    piece: Piece


def shape_after(transform: Transform | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that a transform makes of a shape."""
    return shape if transform is None else transform(np.broadcast_to(np.float32(0), shape)).shape


def joined(parts: list[Part]) -> Origin:
    """Returns the tensor that is made of some parameters, one after the other."""
    ordered = sorted(parts, key=lambda part: part.rows or (0, 0))
    rows = sum(part.shape[0] for part in ordered)
    return Origin((rows, *ordered[0].shape[1:]), tuple(part.piece for part in ordered))


def written_config(model: Model) -> dict[str, Any]:
    """Returns config.json of a GGUF file's model.

    Raises ValueError naming the fields where it would be read as another model.
    """
    assert model.family.to_hf is not None, "families of GGUF files have it"
    written = model.family.to_hf(model.config)
    read = model.family.from_hf(written)
    fields = [field.name for field in dataclasses.fields(read)]
    lost = [name for name in fields if getattr(read, name) != getattr(model.config, name)]
    if lost:
        raise ValueError(
            f"{model.checkpoint.path}: config.json of a {written['model_type']} cannot say its "
            f"{', '.join(lost)}; use the GGUF file as it is"
        )
    return written


def special_ids(model: Model) -> dict[str, Any]:
    """Returns generation_config.json of a model that has none: its BOS, and all its end ids."""
    settings: dict[str, Any] = {}
    if model.config.bos_id is not None:
        settings["bos_token_id"] = model.config.bos_id
    if model.eos_ids:
        settings["eos_token_id"] = list(model.eos_ids)
    return settings

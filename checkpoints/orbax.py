# SPDX-License-Identifier: Apache-2.0
"""A whole model as a folder: its parameters as an Orbax checkpoint, its settings as plain files.

    headrace.json               {"format_version": 1, "dtype": "bfloat16"}
    parameters/                 an Orbax PyTree checkpoint: {tensor name: array}, one flat dict
    config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja

Tensor names and settings are those of the model's Hugging Face folder. The tensors are read by
TensorStore, in whose format Orbax stores them; `checkpoints.orbax_writer` writes them.
"""

import math
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.checkpoint import DTYPES, TensorInfo
from checkpoints.folder import CONFIG, GENERATION_CONFIG, inside, read_json, read_tokenizer
from checkpoints.tokenizer import Tokenizer

MANIFEST = "headrace.json"
PARAMETERS = "parameters"
METADATA = "_METADATA"  # Orbax's own
FORMAT_VERSION = 1
_MOST_PACKED = 16  # bytes of a tensor for each byte stored: weights barely compress

# What Orbax leaves at the top of a checkpoint.
_ORBAX_FILES = (METADATA, "_CHECKPOINT_METADATA", "manifest.ocdbt")
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def is_orbax(folder: pathlib.Path) -> bool:
    """Returns whether the folder holds a model with Orbax parameters, or a bare checkpoint."""
    return any((folder / name).exists() for name in (MANIFEST, PARAMETERS, *_ORBAX_FILES))


class OrbaxCheckpoint:
    """A model folder with Orbax parameters as a `Checkpoint`; a tensor is restored at a time."""

    kind = "orbax"

    def __init__(self, path: pathlib.Path) -> None:
        """Reads and checks settings and metadata. Raises ValueError naming the file and fault."""
        self.path = path
        dtype = _read_manifest(path)
        self.config: dict[str, Any] = read_json(path, CONFIG)
        self.generation_config: dict[str, Any] = read_json(path, GENERATION_CONFIG, optional=True)
        self._parameters = inside(path, PARAMETERS)
        self._stores = _open_stores(self._parameters)
        _check_sizes(self._parameters, self._stores)
        self.tensors: Mapping[str, TensorInfo] = {
            name: _info(self._parameters, name, store) for name, store in self._stores.items()
        }
        for name, info in self.tensors.items():
            stored = np.dtype(DTYPES[info.dtype])
            if stored != dtype and not _is_integer(stored):
                raise ValueError(
                    f"{path}: tensor {name!r} is {stored}, though {MANIFEST} says {dtype}; "
                    "convert the model again"
                )

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor in the type in which it is stored."""
        return self.read_part(name, ())

    def read_part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor; of the chunks that it is stored in those are read that have
        some of it."""
        try:
            return self._stores[name][(*index, ...)].read().result()
        except ValueError as error:
            raise ValueError(_damaged(self._parameters, name, error)) from None

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer in tokenizer.json, or None where the folder has none."""
        return read_tokenizer(self.path, self.config, self.generation_config)


def _read_manifest(folder: pathlib.Path) -> np.dtype:
    """Returns the type of the parameters, once the format's version is known to be ours."""
    if not (folder / MANIFEST).exists():
        raise ValueError(
            f"{folder}: {MANIFEST} is missing, which names the format's version; a whole model is "
            "needed, as scripts.convert writes it, not Orbax parameters alone"
        )
    manifest = read_json(folder, MANIFEST)
    version = manifest.get("format_version")
    if type(version) is not int or version < 1:
        raise ValueError(
            f"{folder / MANIFEST}: format_version is {reprlib.repr(version)}; an integer from 1 "
            "on is needed"
        )
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{folder / MANIFEST}: format_version is {version}, and this Headrace reads "
            f"{FORMAT_VERSION} at most; use a newer one, or convert the model again"
        )
    dtypes = {str(dtype): dtype for dtype in _NAMES if not _is_integer(dtype)}
    name = manifest.get("dtype")
    if not isinstance(name, str) or name not in dtypes:
        raise ValueError(
            f"{folder / MANIFEST}: dtype is {reprlib.repr(name)}; one of {', '.join(dtypes)} is "
            "needed"
        )
    return dtypes[name]


def _is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iub"


def _open_stores(parameters: pathlib.Path) -> dict[str, Any]:
    """Returns the TensorStore of each tensor of an Orbax checkpoint, by its metadata; no data.

    Orbax's own calls are not used to read: each restore parses the metadata of all tensors, and
    a damaged file makes them print tracebacks beside the error.
    """
    import tensorstore

    names, driver = _read_tree(parameters)
    files = {"driver": "file", "path": f"{parameters}/"}
    context = tensorstore.Context()
    opening = {}
    for name in names:
        store = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
        # A chunk that is not there must not read as zeros.
        spec = {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}
        opening[name] = tensorstore.open(spec, open=True, read=True, context=context)
    stores = {}
    for name, future in opening.items():
        try:
            stores[name] = future.result()
        except ValueError as error:
            raise ValueError(_damaged(parameters, name, error)) from None
    return stores


def _check_sizes(parameters: pathlib.Path, stores: Mapping[str, Any]) -> None:
    """Raises ValueError for a tensor that is far too large for what is stored.

    TensorStore takes the memory of a tensor, and of each chunk that it decodes, as the metadata
    says; the process ends where there is none.
    """
    stored = sum(file.stat().st_size for file in parameters.rglob("*") if file.is_file())
    for name, store in stores.items():
        elements = max(math.prod(store.shape), math.prod(store.chunk_layout.write_chunk.shape))
        num_bytes = elements * np.dtype(store.dtype.numpy_dtype).itemsize
        if num_bytes > _MOST_PACKED * stored:
            raise ValueError(
                f"{parameters}: tensor {name!r} of shape {tuple(store.shape)} takes {num_bytes} "
                f"bytes, but only {stored} are stored; the folder is damaged, convert the model "
                "again"
            )


def _read_tree(parameters: pathlib.Path) -> tuple[list[str], str]:
    """Returns the names of the tensors, and the driver that reads them, from Orbax's metadata."""
    if not (parameters / METADATA).is_file():
        raise ValueError(f"{parameters / METADATA}: is missing; convert the model again")
    metadata = read_json(parameters, METADATA)
    tree = metadata.get("tree_metadata")
    if not isinstance(tree, dict) or not tree:
        raise ValueError(f"{parameters / METADATA}: tree_metadata is missing or empty")
    names = []
    for path, leaf in tree.items():
        keys = leaf.get("key_metadata") if isinstance(leaf, dict) else None
        key = keys[0] if isinstance(keys, list) and len(keys) == 1 else None
        name = key.get("key") if isinstance(key, dict) else None
        if not isinstance(name, str) or not name.isprintable():
            shown = path if path.isprintable() else repr(path)
            raise ValueError(
                f"{parameters / METADATA}: {shown} is nested; one flat dict of tensors is needed"
            )
        names.append(name)
    return names, "zarr3" if metadata.get("use_zarr3") else "zarr"


def _info(parameters: pathlib.Path, name: str, store: Any) -> TensorInfo:
    dtype = np.dtype(store.dtype.numpy_dtype)
    if dtype not in _NAMES:
        raise ValueError(
            f"{parameters}: tensor {name!r} has type {dtype}, which is not supported; "
            f"supported: {', '.join(map(str, _NAMES))}"
        )
    return TensorInfo(tuple(store.shape), _NAMES[dtype])


def _damaged(parameters: pathlib.Path, name: str, error: ValueError) -> str:
    return (
        f"{parameters}: tensor {name!r} cannot be read: {first_line(error)}; "
        "the folder is damaged or truncated, convert the model again"
    )


def first_line(error: ValueError) -> str:
    """Returns TensorStore's message without the settings that it appends."""
    return str(error).partition(" [tensorstore_spec=")[0].partition("\n")[0]

# SPDX-License-Identifier: Apache-2.0
"""A reader of model folders in Hugging Face layout: JSON settings and safetensors weights.

Nothing in a folder is run: no pickle is opened, no Python file is imported.
"""

import json
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors

from checkpoints.buffers import read_array
from checkpoints.checkpoint import DTYPES, TensorInfo
from checkpoints.float_codes import FLOAT8
from checkpoints.folder import CONFIG, GENERATION_CONFIG, inside, read_json, read_tokenizer, unique
from checkpoints.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_STORED = {**DTYPES, **FLOAT8}
_MOST_HEADER_BYTES = 1 << 24  # some 100,000 tensors
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class HuggingFaceCheckpoint:
    """A model folder as a `Checkpoint`; no shard stays open, and a tensor is read at a time.

    Weights in 8 bits are codes here: `checkpoints.quantized` decodes them.
    Where the folder has an index, the index alone says which shard holds a tensor; what else a
    shard holds is left alone, with a warning.
    """

    kind = "huggingface"

    def __init__(self, path: pathlib.Path) -> None:
        """Reads and checks settings and headers. Raises ValueError naming the file and fault."""
        self.path = path
        self.config: dict[str, Any] = read_json(path, CONFIG)
        if "auto_map" in self.config:
            logger.warning("%s: auto_map is ignored; no code of a checkpoint is run", path)
        self.generation_config: dict[str, Any] = read_json(path, GENERATION_CONFIG, optional=True)
        if (path / INDEX).exists():
            self._stored = _read_index(path)
        elif (path / WEIGHTS).exists():
            self._stored = _read_header(path, WEIGHTS)
        else:
            raise ValueError(_no_weights(path))
        self.tensors: Mapping[str, TensorInfo] = {n: s.info for n, s in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor in the type in which it is stored."""
        file, info, start = self._stored[name]
        return read_array(file, start, info.shape, _STORED[info.dtype])

    def read_part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor, of which whole rows are read."""
        file, info, start = self._stored[name]
        if not index:
            return self.read(name)
        dtype = np.dtype(_STORED[info.dtype])
        rows, inner = index[0], info.shape[1:]
        start += rows.start * math.prod(inner) * dtype.itemsize
        return read_array(file, start, (rows.stop - rows.start, *inner), dtype)[:, *index[1:]]

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer in tokenizer.json, or None where the folder has none."""
        return read_tokenizer(self.path, self.config, self.generation_config)


class _Stored(NamedTuple):
    """Where a tensor lies: its bytes begin at byte `start` of `file`."""

    file: pathlib.Path
    info: TensorInfo
    start: int


def _read_index(folder: pathlib.Path) -> dict[str, _Stored]:
    """Returns the tensors that the index lists, each in the shard that it names."""
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX}: weight_map is missing or empty")
    listed: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ValueError(f"{folder / INDEX}: tensor {name!r} names no shard")
        listed.setdefault(shard, set()).add(name)
    shards = {shard: _read_header(folder, shard) for shard in sorted(listed)}
    missing = [name for name, shard in weight_map.items() if name not in shards[shard]]
    if missing:
        raise ValueError(
            f"{folder / weight_map[missing[0]]}: tensor {missing[0]!r} is missing, though "
            f"the index says that it is here ({len(missing)} such tensors); fetch it again"
        )
    extra = [(shard, name) for shard in shards for name in shards[shard].keys() - listed[shard]]
    if extra:
        logger.warning(
            "%s: %d tensors that the index does not list there, as %s in %s; they are left alone",
            folder,
            len(extra),
            extra[0][1],
            extra[0][0],
        )
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _read_header(folder: pathlib.Path, shard: str) -> dict[str, _Stored]:
    """Returns the tensors of a safetensors file, once it is checked against the file's length.

    Layout: the header's length (8 bytes, little-endian), the header as JSON, the data.
    """
    file = inside(folder, shard)
    if not shard.endswith(".safetensors"):
        raise ValueError(f"{folder / shard}: {PICKLE_HINT}")
    if not file.is_file():
        raise ValueError(f"{folder / shard}: the shard is missing; fetch it again")
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(
                f"its header has {length} bytes; at most {_MOST_HEADER_BYTES} are accepted"
            )
        # The library checks that the tensors' bytes fit their shapes, the file and each other.
        with safetensors.safe_open(str(file), framework="numpy"):
            pass
        with file.open("rb") as opened:
            opened.seek(8)
            header = json.loads(opened.read(length), object_pairs_hook=unique)
    except (safetensors.SafetensorError, ValueError) as error:
        said = " ".join(str(error).split())  # which may quote the file
        raise ValueError(
            f"{folder / shard}: truncated, damaged or not safetensors ({said}); fetch it again"
        ) from None
    header.pop("__metadata__", None)
    stored = {}
    for name, entry in header.items():
        if entry["dtype"] not in _STORED:
            raise ValueError(
                f"{folder}: tensor {name!r} has type {entry['dtype']}, which is not supported; "
                f"supported: {', '.join(_STORED)}"
            )
        info = TensorInfo(tuple(entry["shape"]), entry["dtype"])
        stored[name] = _Stored(file, info, 8 + length + entry["data_offsets"][0])
    return stored


PICKLE_HINT = (
    "weights are read from safetensors only, since opening a pickle (.bin, .pt) can run code; "
    "convert them with save_pretrained(..., safe_serialization=True)"
)


def _no_weights(path: pathlib.Path) -> str:
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        return f"{path}: the weights are in {pickles[0]}; {PICKLE_HINT}"
    return f"{path}: neither {WEIGHTS} nor {INDEX} is there; is the download complete?"

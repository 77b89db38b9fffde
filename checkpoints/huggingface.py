# SPDX-License-Identifier: Apache-2.0
"""A reader of model folders in Hugging Face layout: JSON settings and safetensors weights.

Nothing in a folder is run: no pickle is opened, no Python file is imported.
"""

import json
import logging
import pathlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import tokenizers

from checkpoints.checkpoint import TensorInfo
from checkpoints.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip


class HuggingFaceCheckpoint:
    """A model folder as a `Checkpoint`; shards are memory-mapped and read a tensor at a time.

    Where the folder has an index, the index alone says which shard holds a tensor; what else a
    shard holds is left alone, with a warning.
    """

    kind = "huggingface"

    def __init__(self, path: pathlib.Path) -> None:
        """Reads and checks settings and headers. Raises ValueError naming the file and fault."""
        self.path = path
        self.config: dict[str, Any] = _read_json(path, "config.json")
        if "auto_map" in self.config:
            logger.warning("%s: auto_map is ignored; no code of a checkpoint is run", path)
        self.generation_config: dict[str, Any] = _read_json(
            path, "generation_config.json", optional=True
        )
        self._shards: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        if (path / _INDEX).exists():
            self._open_index()
        elif (path / _WEIGHTS).exists():
            shard = self._open_shard(_WEIGHTS)
            self._shard_of = dict.fromkeys(shard.keys(), _WEIGHTS)
        else:
            raise ValueError(_no_weights(path))
        self.tensors: Mapping[str, TensorInfo] = {name: self._info(name) for name in self._shard_of}

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor in the type in which it is stored."""
        return self._shards[self._shard_of[name]].get_tensor(name)

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer in tokenizer.json, or None where the folder has none."""
        file = _inside(self.path, "tokenizer.json")
        if not file.exists():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as error:
            # The library raises plain Exceptions, and a panic (no Exception) on some bad merges.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{file}: not a tokenizer that can be read: {error}") from None
        settings = _read_json(self.path, "tokenizer_config.json", optional=True)
        try:
            bos_id = _named_token(backend, settings, "bos_token")
            if bos_id is None and "bos_token" not in settings:
                bos_id = next(iter(_as_ids(self.config, "bos_token_id")), None)
            return build_tokenizer(
                backend,
                bos_id=bos_id,
                eos_ids=[
                    _named_token(backend, settings, "eos_token"),
                    *_as_ids(self.generation_config or self.config, "eos_token_id"),
                ],
                add_bos=settings.get("add_bos_token"),
                chat_template=self._chat_template(settings),
            )
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        """Returns the template: its own file wins over the one in the tokenizer's settings."""
        file = _inside(self.path, "chat_template.jinja")
        if file.exists():
            return file.read_text("utf-8")
        template = settings.get("chat_template")
        if isinstance(template, list):  # several by name
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise ValueError("the chat_template in tokenizer_config.json is no text")
        return template

    def _open_index(self) -> None:
        index = _read_json(self.path, _INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{self.path / _INDEX}: weight_map is missing or empty")
        for name, shard_name in weight_map.items():
            if not isinstance(shard_name, str):
                raise ValueError(f"{self.path / _INDEX}: tensor {name!r} names no shard")
        stored = {s: set(self._open_shard(s).keys()) for s in sorted(set(weight_map.values()))}
        missing = [
            name for name, shard_name in weight_map.items() if name not in stored[shard_name]
        ]
        if missing:
            raise ValueError(
                f"{self.path / weight_map[missing[0]]}: tensor {missing[0]!r} is missing, though "
                f"the index says that it is here ({len(missing)} such tensors); fetch it again"
            )
        listed = Counter(weight_map.values())
        extra = sum(len(names) - listed[shard_name] for shard_name, names in stored.items())
        if extra:
            logger.warning("%s: %d tensors that the index does not list there", self.path, extra)
        self._shard_of = weight_map

    def _open_shard(self, shard_name: str) -> Any:
        """Returns the opened shard; its header is checked against the length of the file."""
        file = _inside(self.path, shard_name)
        if not shard_name.endswith(".safetensors"):
            raise ValueError(f"{self.path / shard_name}: {_PICKLE_HINT}")
        if not file.is_file():
            raise ValueError(f"{self.path / shard_name}: the shard is missing; fetch it again")
        try:
            shard = safetensors.safe_open(str(file), framework="numpy")
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{self.path / shard_name}: truncated, damaged or not safetensors ({error}); "
                "fetch it again"
            ) from None
        self._shards[shard_name] = shard
        return shard

    def _info(self, name: str) -> TensorInfo:
        view = self._shards[self._shard_of[name]].get_slice(name)
        dtype = view.get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {dtype}, which is not supported; "
                f"supported: {', '.join(_DTYPES)}"
            )
        return TensorInfo(tuple(view.get_shape()), dtype)


_PICKLE_HINT = (
    "weights are read from safetensors only, since opening a pickle (.bin, .pt) can run code; "
    "convert them with save_pretrained(..., safe_serialization=True)"
)


def _no_weights(path: pathlib.Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        return f"{path}: the weights are in {pickles[0]}; {_PICKLE_HINT}"
    return f"{path}: neither {_WEIGHTS} nor {_INDEX} is there; is the download complete?"


def _inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the real path of a file of the folder, which must not lead out of it.

    Links into a hub cache are allowed: there a snapshot's files are links to `models--*/blobs/`.
    """
    try:
        root = folder.resolve()
        real = (root / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null character
        raise ValueError(f"{folder}: {name!r} is no usable path: {error}") from None
    spelled = pathlib.PurePath(name)
    blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if spelled.is_absolute() or ".." in spelled.parts or not (real.is_relative_to(root) or blob):
        raise ValueError(f"{folder}: {name!r} leads out of the model folder, which is refused")
    return real


def _read_json(folder: pathlib.Path, name: str, optional: bool = False) -> dict[str, Any]:
    """Returns the object in a JSON file, in which no key may stand twice; {} where absent."""
    file = _inside(folder, name)
    if not file.exists():
        if optional:
            return {}
        raise ValueError(f"{folder}: {name} is missing; this is no Hugging Face model folder")
    try:
        value = json.loads(file.read_text("utf-8"), object_pairs_hook=_unique)
    except ValueError as error:  # JSON, UTF-8, or a repeated key
        raise ValueError(f"{folder / name}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{folder / name}: a JSON object is needed")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r} is there twice")
    return values


def _as_ids(settings: dict[str, Any], key: str) -> list[int]:
    """Returns the ids under `key`, which may be one, several, or absent."""
    value = settings.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"{key} is {value!r}; token ids are needed")
    return ids


def _named_token(backend: tokenizers.Tokenizer, settings: dict[str, Any], key: str) -> int | None:
    """Returns the id of the token that tokenizer_config.json names under `key`, if it does."""
    token = settings.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    token_id = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise ValueError(f"tokenizer_config.json names {key} {token!r}, which is no token")
    return token_id

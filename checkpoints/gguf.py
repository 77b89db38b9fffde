# SPDX-License-Identifier: Apache-2.0
"""A reader of GGUF files that trusts nothing it reads.

Layout: "GGUF", version, counts; metadata as typed key-value pairs; one record a tensor; padding;
tensor data at aligned offsets. Every count and length is held against the bytes that are left
before anything of its size is made, so a hostile file of a few bytes costs a few bytes.
"""

import math
import mmap
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from checkpoints.buffers import read_array
from checkpoints.checkpoint import TensorInfo
from checkpoints.gguf_blocks import BLOCK_TYPES, TYPE_NAMES, dequantize
from checkpoints.gguf_tokenizer import check_tokenizer_metadata, tokenizer_from_metadata
from checkpoints.tokenizer import Tokenizer

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "bool",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAGIC = b"GGUF"

_MAX_KEY_BYTES = 65_535
_MAX_STRING_BYTES = 1 << 24
# Of all arrays together: the largest vocabularies have some 2**18 entries, in five tables.
_MAX_ITEMS = 1 << 21
_MAX_DIMENSIONS = 4
_MAX_DIMENSION = 1 << 40
_MAX_ALIGNMENT = 1 << 16
_LEAST_PAIR_BYTES = 8 + 1 + 4 + 1  # key length, key, type, value
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, dimensions, one dimension, type, offset


class _Stored(NamedTuple):
    """Where a tensor lies in the file, and what it is."""

    info: TensorInfo
    start: int
    num_bytes: int


class GGUFCheckpoint:
    """A GGUF file as a `Checkpoint`; a tensor is read at a time, and nothing stays open."""

    kind = "gguf"

    def __init__(self, path: pathlib.Path) -> None:
        """Reads and checks the header. Raises ValueError naming the file and the fault."""
        self.path = path
        self._file = path.resolve()
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise ValueError(f"{path}: the file is empty; fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as header:
                try:
                    metadata, stored = _Reader(header).read_all()
                    check_tokenizer_metadata(metadata)
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from None
        self.config: dict[str, Any] = metadata
        self.generation_config: dict[str, Any] = {}
        self._stored = stored
        self.tensors: Mapping[str, TensorInfo] = {name: s.info for name, s in stored.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor: float32 if it is stored in blocks, else as stored."""
        info, start, num_bytes = self._stored[name]
        data = read_array(self._file, start, (num_bytes,), np.uint8)
        return dequantize(data, info.dtype, info.shape)

    def read_part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor, which is read whole."""
        return self.read(name)[index]

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer built from the metadata, or None where the file has none."""
        try:
            return tokenizer_from_metadata(self.config)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None


def is_gguf(path: pathlib.Path) -> bool:
    """Returns whether the file begins as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


class _Reader:
    """Walks through the bytes of a GGUF header; every fault is a ValueError that names it."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._at = 0
        self._items_left = _MAX_ITEMS

    def read_all(self) -> tuple[dict[str, Any], dict[str, _Stored]]:
        """Returns the metadata and the tensors by name, checked against each other."""
        num_tensors, num_pairs = self._read_counts()
        metadata: dict[str, Any] = {}
        for number in range(num_pairs):
            key = self._string(f"metadata key {number}", _MAX_KEY_BYTES)
            if not key:
                raise ValueError(f"metadata key {number} is empty")
            if key in metadata:
                raise ValueError(f"metadata key {key!r} is there twice")
            metadata[key] = self._value(key)
        records: dict[str, tuple[TensorInfo, int]] = {}
        for number in range(num_tensors):
            name = self._string(f"name of tensor {number}", _MAX_KEY_BYTES)
            if not name:
                raise ValueError(f"name of tensor {number} is empty")
            if name in records:
                raise ValueError(f"tensor {name!r} is there twice")
            records[name] = self._tensor_record(name)
        return metadata, self._place(records, _alignment(metadata))

    def _read_counts(self) -> tuple[int, int]:
        """Returns the numbers of tensors and of metadata pairs, held against the file's size."""
        if bytes(self._data[:4]) != _MAGIC:
            raise ValueError(
                f"not a GGUF file (it starts with {bytes(self._data[:4])!r}); give one, or the "
                "folder of a model"
            )
        self._at = 4
        version = self._unpack("<I", "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "is big-endian" if swapped in (1, 2, 3) else f"has version {version}"
            raise ValueError(f"the GGUF file {kind}; little-endian versions 2 and 3 are supported")
        num_tensors = self._unpack("<Q", "number of tensors")
        num_pairs = self._unpack("<Q", "number of metadata pairs")
        left = len(self._data) - self._at
        if num_tensors * _LEAST_TENSOR_BYTES + num_pairs * _LEAST_PAIR_BYTES > left:
            raise ValueError(
                f"{num_tensors} tensors and {num_pairs} metadata pairs cannot fit the {left} bytes "
                "after the counts; the file is damaged or truncated"
            )
        return num_tensors, num_pairs

    def _need(self, num_bytes: int, what: str) -> None:
        if num_bytes > len(self._data) - self._at:
            raise ValueError(
                f"truncated in {what}: {num_bytes} bytes are needed at byte {self._at}, but the "
                f"file ends at byte {len(self._data)}; fetch it again"
            )

    def _unpack(self, form: str, what: str) -> Any:
        size = struct.calcsize(form)
        self._need(size, what)
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += size
        return value

    def _string(self, what: str, limit: int = _MAX_STRING_BYTES) -> str:
        length = self._unpack("<Q", what)
        if length > limit:
            raise ValueError(f"{what} has length {length}; at most {limit} bytes are accepted")
        self._need(length, what)
        start, self._at = self._at, self._at + length
        try:
            return str(self._data[start : self._at], "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not valid UTF-8") from None

    def _value(self, key: str) -> Any:
        what = f"the value of {key!r}"
        kind = self._unpack("<I", what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            return self._numbers(kind, 1, what)[0]
        kind = self._unpack("<I", what)
        length = self._unpack("<Q", what)
        if length > self._items_left:
            raise ValueError(
                f"{what} has {length} items; at most {_MAX_ITEMS} are accepted in all arrays"
            )
        self._items_left -= length
        if kind != _STRING:
            return self._numbers(kind, length, what)
        self._need(8 * length, what)
        return self._strings(length, what)

    def _strings(self, length: int, what: str) -> list[str]:
        return [self._string(what) for _ in range(length)]

    def _numbers(self, kind: int, length: int, what: str) -> list[Any]:
        """Returns `length` numbers of one of the format's scalar types, as Python's own."""
        if kind not in _SCALARS:
            known = ", ".join(map(str, sorted([*_SCALARS, _STRING, _ARRAY])))
            raise ValueError(f"{what} has type {kind}; types are {known}, and arrays do not nest")
        dtype = np.dtype(_SCALARS[kind])
        self._need(dtype.itemsize * length, what)
        values = np.frombuffer(self._data, dtype, length, self._at).tolist()
        self._at += dtype.itemsize * length
        return values

    def _tensor_record(self, name: str) -> tuple[TensorInfo, int]:
        """Returns the tensor's shape and type, and its offset in the data part."""
        what = f"the record of tensor {name!r}"
        num_dims = self._unpack("<I", what)
        if not 1 <= num_dims <= _MAX_DIMENSIONS:
            raise ValueError(
                f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMENSIONS} are accepted"
            )
        dims = [self._unpack("<Q", what) for _ in range(num_dims)]
        for dim in dims:
            if not 1 <= dim <= _MAX_DIMENSION:
                raise ValueError(
                    f"tensor {name!r} has dimension {dim}; 1 to {_MAX_DIMENSION} are accepted"
                )
        number = self._unpack("<I", what)
        dtype = TYPE_NAMES.get(number, f"number {number}")
        if dtype not in BLOCK_TYPES:
            raise ValueError(
                f"tensor {name!r} has type {dtype}, which is not supported; "
                f"supported: {', '.join(BLOCK_TYPES)}"
            )
        if dims[0] % BLOCK_TYPES[dtype].size:
            raise ValueError(
                f"tensor {name!r} has rows of {dims[0]}, which the {BLOCK_TYPES[dtype].size} "
                f"elements of a {dtype} block do not divide"
            )
        # The file names the fastest axis first.
        return TensorInfo(tuple(reversed(dims)), dtype), self._unpack("<Q", what)

    def _place(
        self, records: dict[str, tuple[TensorInfo, int]], alignment: int
    ) -> dict[str, _Stored]:
        """Returns where each tensor lies; all lie apart, aligned, and inside the file."""
        data_start = -(-self._at // alignment) * alignment
        stored = {}
        for name, (info, offset) in records.items():
            if offset % alignment:
                raise ValueError(
                    f"tensor {name!r} has offset {offset}, which is not a multiple of the "
                    f"alignment {alignment}"
                )
            block = BLOCK_TYPES[info.dtype]
            num_bytes = math.prod(info.shape) // block.size * block.layout.itemsize
            if data_start + offset + num_bytes > len(self._data):
                raise ValueError(
                    f"tensor {name!r} should end at byte {data_start + offset + num_bytes}, but "
                    f"the file ends at byte {len(self._data)}: it is truncated or damaged; "
                    "fetch it again"
                )
            stored[name] = _Stored(info, data_start + offset, num_bytes)
        in_order = sorted(stored, key=lambda name: stored[name].start)
        for before, after in zip(in_order, in_order[1:], strict=False):
            if stored[before].start + stored[before].num_bytes > stored[after].start:
                raise ValueError(f"tensors {before!r} and {after!r} overlap in the file")
        return stored


def _alignment(metadata: dict[str, Any]) -> int:
    """Returns the alignment of tensor data: 32 unless the metadata says otherwise."""
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise ValueError(
            f"general.alignment is {value!r}; a power of two up to {_MAX_ALIGNMENT} is needed"
        )
    return value

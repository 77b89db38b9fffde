# SPDX-License-Identifier: Apache-2.0
"""The file of a segment: pages, and the tokens that they are a function of.

A digest of what follows up to the pages; the sizes of the head and of the tokens; the head, which
is JSON; the tokens of the prefix; the pages one after another, each with a checksum in the head.
The digest is checked before anything is believed, and every value after that.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from engine.radix import TOKEN_BYTES

PART = ".part"  # the end of a name while the file is being written
_DIGEST_BYTES = 32
_START_BYTES = _DIGEST_BYTES + 16
_MOST_BYTES = 1 << 26  # of a head, and of tokens
_VALUES = (str, int, float, bool, type(None))  # what a space is made of


class Damaged(Exception):
    """A file is not what it should be; the text says how."""


@dataclasses.dataclass(frozen=True)
class PageKind:
    """What the pages of a file are: the fingerprint of their model, and the array of each."""

    fingerprint: str
    shape: tuple[int, ...]  # [places, K, W, C], those of all devices that have parts of it
    dtype: np.dtype
    stripes: int = 1  # devices that a page's tokens are dealt out to

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.shape[-2] * self.stripes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Segment:
    """What the head of a file says: see `Save`. entries: (group, index of the run) of each page."""

    path: Path
    space: Any
    tokens: bytes
    first: int
    lengths: list[int]
    entries: list[tuple[int, int]]
    checksums: list[int]
    offset: int  # of the first page in the file

    @property
    def run(self) -> tuple[Any, bytes, int, list[int], list[tuple[int, int]]]:
        """What `PrefixCache.add_saved` is told of it."""
        return self.space, self.tokens, self.first, self.lengths, self.entries


def write_segment(segment: Segment, pages: Sequence[Any], kind: PageKind) -> Segment:
    """Writes a file whole or not at all; returns the segment as the file has it. Raises OSError."""
    arrays = [np.ascontiguousarray(page) for page in pages]
    checksums = [zlib.crc32(array.view(np.uint8).data) for array in arrays]
    head = {
        "fingerprint": kind.fingerprint,
        "space": segment.space,
        "first": segment.first,
        "lengths": segment.lengths,
        "entries": segment.entries,
        "checksums": checksums,
    }
    text = json.dumps(head).encode()
    sizes = b"".join(len(part).to_bytes(8, "little") for part in (text, segment.tokens))
    body = sizes + text + segment.tokens
    part = segment.path.with_name(segment.path.name + PART)
    try:
        with part.open("xb") as file:
            with suppress(OSError):  # where there are no locks, killed writes are not told
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(hashlib.sha256(body).digest() + body)
            for array in arrays:
                file.write(array.view(np.uint8).data)
        part.replace(segment.path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return dataclasses.replace(segment, checksums=checksums, offset=_DIGEST_BYTES + len(body))


def is_abandoned(path: Path) -> bool:
    """Whether nobody is writing a file of an unfinished name: who does holds its lock."""
    with open_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def read_page(segment: Segment, index: int, kind: PageKind) -> np.ndarray:
    """Returns a page. Raises Damaged if it is not what was written, OSError if it is not there."""
    with open_file(segment.path) as file:
        file.seek(segment.offset + index * kind.page_bytes)
        data = file.read(kind.page_bytes)
    if len(data) != kind.page_bytes or zlib.crc32(data) != segment.checksums[index]:
        raise Damaged(f"{segment.path.name} is damaged")
    return np.frombuffer(data, kind.dtype).reshape(kind.shape)


def read_segment(path: Path, kind: PageKind) -> Segment:
    """Returns what a file says of itself. Raises Damaged, or OSError."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_START_BYTES)
        sizes = [
            int.from_bytes(start[first : first + 8], "little")
            for first in range(_DIGEST_BYTES, _START_BYTES, 8)
        ]
        offset = _START_BYTES + sum(sizes)
        if len(start) < _START_BYTES or max(sizes) > _MOST_BYTES or offset > size:
            raise Damaged("it has no head")
        text, tokens = map(file.read, sizes)
    if hashlib.sha256(start[_DIGEST_BYTES:] + text + tokens).digest() != start[:_DIGEST_BYTES]:
        raise Damaged("its head does not have its own digest")
    try:
        head = json.loads(text)
        space = as_tuples(head["space"])
        values = [head[key] for key in ("fingerprint", "first", "lengths", "entries", "checksums")]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged("its head cannot be read") from None
    fingerprint, first, lengths, entries, checksums = values
    if fingerprint != kind.fingerprint:
        raise Damaged("it is of another model than its name says")
    _check_run(tokens, first, lengths, kind.page_size)
    _check_pages(entries, checksums, len(lengths))
    if size != offset + len(entries) * kind.page_bytes:
        raise Damaged("it is cut off, or goes on behind its end")
    pairs = [(group, index) for group, index in entries]
    return Segment(path, space, tokens, first, lengths, pairs, checksums, offset)


def _check_run(tokens: bytes, first: Any, lengths: Any, page_size: int) -> None:
    """Raises Damaged unless there are tokens of so many pages: whole ones, or a short one alone."""
    if not are_below(lengths, page_size + 1) or not lengths or min(lengths) < 1:
        raise Damaged("its pages have impossible lengths")
    if len(lengths) > 1 and min(lengths) < page_size:
        raise Damaged("it has a short page among others")
    if not are_below([first], len(tokens) + 1):
        raise Damaged("its first page has an impossible place")
    if len(tokens) != (first * page_size + sum(lengths)) * TOKEN_BYTES:
        raise Damaged("its tokens are not those of its pages")


def _check_pages(entries: Any, checksums: Any, length: int) -> None:
    """Raises Damaged unless entries are different (group, index in a run of `length`) pairs."""
    if not isinstance(entries, list) or not all(
        isinstance(entry, list) and len(entry) == 2 and are_below(entry, 1 << 31)
        for entry in entries
    ):
        raise Damaged("its entries are no pairs of numbers")
    if any(index >= length for _, index in entries):
        raise Damaged("it has pages outside its run")
    if len(set(map(tuple, entries))) < len(entries):
        raise Damaged("it has a page twice")
    if not are_below(checksums, 1 << 32) or len(checksums) != len(entries):
        raise Damaged("it does not have a checksum for each page")


def are_below(numbers: Any, limit: int) -> bool:
    """Whether a value is a list of integers from 0 to below `limit`."""
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < limit for n in numbers)


def as_tuples(value: Any, deepest: int = 8) -> Any:
    """Returns a value as it was before it went through JSON; TypeError if it was no space."""
    if isinstance(value, list) and deepest > 0:
        return tuple(as_tuples(part, deepest - 1) for part in value)
    if not isinstance(value, _VALUES):
        raise TypeError(f"{type(value).__name__} is not a part of a space")
    return value


def open_file(path: Path) -> IO[bytes]:
    """Returns a file to read; what only stands for another one is an OSError."""
    return open(path, "rb", opener=_open)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

# SPDX-License-Identifier: Apache-2.0
"""Pages on disk: one file a segment, written whole or not at all, and checked when they are read.

A file has a digest of its head, the head (JSON), the tokens of the prefix, and its pages one after
another, each with a checksum in the head. It is written under another name and renamed, so that a
process that is killed leaves no half file under a name that is looked at. Only what was written for
the same model, program and layout is read, and nothing is executed. Two engines may share a folder:
each sees the files that were there when it started, and what the other deletes is a miss.
"""

import dataclasses
import hashlib
import json
import os
import queue
import threading
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.log import logger
from engine.moves import DISK, Load, Save
from engine.prefix_cache import PrefixCache

_DIGEST_BYTES = 32
_SUFFIX = ".kv"
_MOST_HEAD_BYTES = 1 << 26


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
        """What `Tiers.add_saved` is told of it."""
        return self.space, self.tokens, self.first, self.lengths, self.entries


class Damaged(Exception):
    """A file is not what it should be; the text says how."""


class DiskCache:
    """Writes, reads and deletes files in a thread, in the order that it is asked to.

    `events` has what was done: ("loaded", ticket, {slot: page} or None) and ("lost", numbers).
    """

    def __init__(self, folder: Path, fingerprint: str, shape: Sequence[int], dtype: Any) -> None:
        """`shape` and `dtype` are of a page; `fingerprint` of all that its numbers depend on."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._fingerprint = fingerprint
        self._shape, self._dtype = tuple(shape), np.dtype(dtype)
        self._page_bytes = int(np.prod(shape)) * self._dtype.itemsize
        self._place: dict[int, tuple[Segment, int]] = {}  # by number: segment and page in it
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._jobs: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="disk cache", daemon=True)
        self._thread.start()

    def scan(self) -> list[Segment]:
        """Returns the segments of this model in the folder, the last used first.

        What cannot be read is deleted, with one line that counts it; so are files of killed writes.
        """
        segments: list[Segment] = []
        bad: list[tuple[Path, str]] = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}*")):
            try:
                if path.suffix != _SUFFIX:
                    if _is_abandoned(path):
                        bad.append((path, "its write was cut off"))
                elif (segment := self._read_head(path)) is not None:
                    segments.append(segment)
            except (OSError, Damaged) as error:
                bad.append((path, str(error)))
        for path, _ in bad:
            path.unlink(missing_ok=True)
        if bad:
            logger().warning(
                "%d files of %s were dropped, the first because %s: %s",
                len(bad),
                self._folder,
                bad[0][1],
                bad[0][0].name,
            )
        return sorted(segments, key=lambda segment: -_used(segment.path))

    def restore(self, cache: PrefixCache, room: int) -> None:
        """Adds what is in the folder to a cache with room for so many pages, and drops the rest."""
        self._jobs.join()
        while not self.events.empty():
            self.events.get()
        self._place.clear()
        found, kept = self.scan(), []
        for segment in found:
            room -= len(segment.entries)
            if room >= 0:
                kept.append(segment)
        added = 0
        for segment in sorted(kept, key=lambda each: (each.first, -len(each.tokens))):
            numbers = cache.tiers.add_saved(DISK, *segment.run)
            if numbers is not None:
                self._place |= {number: (segment, i) for i, number in enumerate(numbers)}
                found.remove(segment)
                added += 1
        for segment in found:
            segment.path.unlink(missing_ok=True)
        if added or found:
            logger().info(
                "%s: %d segments found, %d dropped (no room, or what is before them is gone)",
                self._folder,
                added,
                len(found),
            )

    def save(self, save: Save, pages: Sequence[Any]) -> None:
        """Has pages (arrays that do not change any more) written as one segment."""
        path = self._folder / f"{self._fingerprint[:16]}-{uuid.uuid4().hex}{_SUFFIX}"
        entries = [(group, index) for group, index, _, _ in save.entries]
        segment = Segment(path, save.space, save.tokens, save.first, save.lengths, entries, [], 0)
        numbers = [number for _, _, _, number in save.entries]
        self._place |= {number: (segment, index) for index, number in enumerate(numbers)}
        self._jobs.put(("save", segment, numbers, list(pages)))

    def load(self, load: Load) -> None:
        """Has pages read; an event says when they are there."""
        self._jobs.put(("load", load, [self._place[number] for number in load.numbers]))

    def delete(self, numbers: Sequence[int]) -> None:
        """Deletes the file that has these pages, all of it."""
        segment, _ = self._place[numbers[0]]
        for number in numbers:
            del self._place[number]
        self._jobs.put(("delete", segment.path))

    def close(self) -> None:
        """Returns when all that was asked for is done."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def read(self, segment: Segment) -> list[np.ndarray] | None:
        """Returns the pages of a segment that was found, None if they are not what was written."""
        pages = range(len(segment.entries))
        load = Load(0, [], list(pages))
        read = self._read(load, [(segment, index) for index in pages], {})
        return None if read is None else list(read.values())

    def _work(self) -> None:
        written: dict[Path, Segment] = {}
        while (job := self._jobs.get()) is not None:
            self._do(job, written)
            self._jobs.task_done()

    def _do(self, job: tuple[Any, ...], written: dict[Path, Segment]) -> None:
        kind, *rest = job
        if kind == "save":
            segment, numbers, pages = rest
            try:
                written[segment.path] = self._write(segment, pages)
            except OSError as error:
                logger().warning("the cache of %s is not kept: %s", self._folder, error)
                self.events.put(("lost", numbers))
        elif kind == "load":
            load, places = rest
            self.events.put(("loaded", load.ticket, self._read(load, places, written)))
        else:
            written.pop(rest[0], None)
            rest[0].unlink(missing_ok=True)

    def _write(self, segment: Segment, pages: list[Any]) -> Segment:
        arrays = [np.ascontiguousarray(page) for page in pages]
        checksums = [zlib.crc32(array.view(np.uint8).data) for array in arrays]
        head = {
            "fingerprint": self._fingerprint,
            "space": segment.space,
            "first": segment.first,
            "lengths": segment.lengths,
            "entries": segment.entries,
            "checksums": checksums,
            "tokens": len(segment.tokens),
        }
        text = json.dumps(head).encode()
        body = len(text).to_bytes(8, "little") + text + segment.tokens
        part = segment.path.with_name(f"{segment.path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
                for array in arrays:
                    file.write(array.view(np.uint8).data)
            part.replace(segment.path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        offset = _DIGEST_BYTES + len(body)
        return dataclasses.replace(segment, checksums=checksums, offset=offset)

    def _read(
        self, load: Load, places: list[tuple[Segment, int]], written: dict[Path, Segment]
    ) -> dict[int, np.ndarray] | None:
        """Returns the pages by slot; None if one of them is not what was written."""
        pages = {}
        try:
            for (segment, index), slot in zip(places, load.slots, strict=True):
                segment = written.get(segment.path, segment)
                with segment.path.open("rb") as file:
                    file.seek(segment.offset + index * self._page_bytes)
                    data = file.read(self._page_bytes)
                whole = len(data) == self._page_bytes and segment.checksums
                if not whole or zlib.crc32(data) != segment.checksums[index]:
                    raise Damaged(f"{segment.path.name} is damaged")
                pages[slot] = np.frombuffer(data, self._dtype).reshape(self._shape)
            for path in {segment.path for segment, _ in places}:
                os.utime(path)  # by which the oldest files are found
        except FileNotFoundError:
            return None  # another engine has deleted it
        except (OSError, Damaged) as error:
            logger().warning("the cache of %s: %s; it is dropped", self._folder, error)
            return None
        return pages

    def _read_head(self, path: Path) -> Segment | None:
        """Returns what a file says of itself; None if it is of another model. Raises Damaged."""
        with path.open("rb") as file:
            start = file.read(_DIGEST_BYTES + 8)
            size = int.from_bytes(start[_DIGEST_BYTES:], "little")
            if len(start) < _DIGEST_BYTES + 8 or size > _MOST_HEAD_BYTES:
                raise Damaged("it has no head")
            text = file.read(size)
            try:
                head = json.loads(text)
                own = head["fingerprint"] == self._fingerprint
                length = int(head["tokens"])
            except (ValueError, KeyError, TypeError):
                raise Damaged("its head cannot be read") from None
            if not own:
                return None
            tokens = file.read(length) if 0 <= length <= _MOST_HEAD_BYTES else b""
            digest = hashlib.sha256(start[_DIGEST_BYTES:] + text + tokens).digest()
            if digest != start[:_DIGEST_BYTES]:
                raise Damaged("its head does not have its own digest")
            offset = file.tell()
        entries = [(int(group), int(index)) for group, index in head["entries"]]
        if path.stat().st_size != offset + len(entries) * self._page_bytes:
            raise Damaged("it is cut off")
        space = as_tuples(head["space"])
        first, lengths, sums = head["first"], head["lengths"], head["checksums"]
        return Segment(path, space, tokens, first, lengths, entries, sums, offset)


def as_tuples(value: Any) -> Any:
    """Returns a value as it was before it went through JSON."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def _used(path: Path) -> float:
    """Returns when a file was last used, 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_abandoned(path: Path) -> bool:
    """Whether the process that was writing a file is gone."""
    try:
        os.kill(int(path.suffixes[-2][1:]), 0)
    except (ValueError, IndexError, ProcessLookupError):
        return True
    except PermissionError:
        return False
    return False

# SPDX-License-Identifier: Apache-2.0
"""Pages on disk: one file a segment, written whole or not at all, and checked when they are read.

A file is written under another name and renamed, so that a process that is killed leaves no half
file under a name that is looked at. Only what was written for the same model, program and layout is
read, and nothing is executed. Files of others are left alone while there is room for them. Two
engines may share a folder: each sees the files that were there when it started, and what the other
deletes is a miss.
"""

import hashlib
import os
import queue
import re
import stat
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from engine.log import logger
from engine.moves import DISK, Load, Save
from engine.prefix_cache import PrefixCache
from engine.radix import TOKEN_BYTES
from engine.segment_file import (
    PART,
    Damaged,
    PageKind,
    Segment,
    is_abandoned,
    read_page,
    read_segment,
    write_segment,
)

_SUFFIX = ".kv"
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.kv")
_MOST_QUEUED_BYTES = 256 * 2**20  # of pages that wait to be written; at least one segment may


class DiskCache:
    """Writes, reads and deletes files in a thread, in the order that it is asked to.

    `events` has what was done: ("loaded", ticket, {slot: page} or None) and ("lost", numbers).
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        shape: Sequence[int],
        dtype: Any,
        stripes: int = 1,
    ) -> None:
        """`folder` is there. `shape` and `dtype` are of a page; `fingerprint` of all that its
        numbers depend on.
        """
        self._folder = folder
        self._kind = PageKind(fingerprint, tuple(shape), np.dtype(dtype), stripes)
        self._prefix = f"{fingerprint[:16]}-"
        self._place: dict[int, tuple[Segment, int]] = {}  # by number: segment and page in it
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._jobs: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        self._most_queued = _MOST_QUEUED_BYTES // self._kind.page_bytes
        self._queued = 0  # pages that wait to be written
        self._written = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="disk cache", daemon=True)
        self._thread.start()

    def scan(self, fate: str) -> tuple[list[Segment], list[Path]]:
        """Returns the segments of this model in the folder, the last used first, and what is bad.

        One is used when one behind it is, and comes before it. Bad are files that are damaged, and
        those of killed writes: one line counts them and says their `fate`. What is no file, or of
        another model, is left alone.
        """
        segments: list[Segment] = []
        bad: list[tuple[Path, str]] = []
        for path in self._paths():
            try:
                if not stat.S_ISREG(path.lstat().st_mode):
                    continue
                if path.name.endswith(_SUFFIX + PART):
                    if is_abandoned(path):
                        raise Damaged("its write was cut off")
                elif path.name.startswith(self._prefix) and path.suffix == _SUFFIX:
                    segments.append(read_segment(path, self._kind))
            except FileNotFoundError:
                continue  # another engine has just deleted it
            except OSError as error:
                logger().warning("%s is left alone: %s", path, error.strerror)
            except Damaged as error:
                bad.append((path, str(error)))
        if bad:
            logger().warning(
                "%d files of %s were %s, the first because %s: %s",
                len(bad),
                self._folder,
                fate,
                bad[0][1],
                bad[0][0].name,
            )
        used = last_uses(segments, self._kind.page_size)
        segments.sort(key=lambda segment: (-used[segment.path], segment.first))
        return segments, [path for path, _ in bad]

    def _paths(self) -> list[Path]:
        """Returns what is in the folder, by name; nothing if it is not there any more."""
        try:
            return sorted(self._folder.iterdir())
        except OSError as error:
            logger().warning("the cache of %s is not to be had: %s", self._folder, error.strerror)
            return []

    def restore(self, cache: PrefixCache, room: int) -> None:
        """Adds what is in the folder to a cache with room for so many pages, and drops the rest.

        Files of other models and versions keep what room is left, the last used of them.
        """
        left = room * self._kind.page_bytes
        self._jobs.join()
        while not self.events.empty():
            self.events.get()
        self._place.clear()
        (found, bad), kept = self.scan("dropped"), []
        for path in bad:
            _delete(path)
        for segment in found:
            room -= len(segment.entries)
            if room < 0:
                break
            kept.append(segment)
        added: set[Path] = set()
        for segment in parents_first(kept):
            numbers = cache.tiers.add_saved(DISK, *segment.run)
            if numbers is not None:
                self._place |= {number: (segment, i) for i, number in enumerate(numbers)}
                added.add(segment.path)
                left -= len(numbers) * self._kind.page_bytes
        for segment in found:
            if segment.path not in added:
                _delete(segment.path)
        if found:
            logger().info(
                "%s: %d segments kept, %d dropped (no room, or what is before them is gone)",
                self._folder,
                len(added),
                len(found) - len(added),
            )
        self._drop_others(left)

    def _drop_others(self, room: int) -> None:
        """Deletes the oldest files of other models and versions, beyond `room` bytes of them."""
        others: list[tuple[int, Path, int]] = []
        for path in self._paths():
            if _NAME.fullmatch(path.name) and not path.name.startswith(self._prefix):
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        others.append((status.st_mtime_ns, path, status.st_size))
        dropped = 0
        for _, path, size in sorted(others, reverse=True):
            room -= size
            if room < 0:
                _delete(path)
                dropped += 1
        if dropped:
            logger().info("%s: %d files of other models dropped, for room", self._folder, dropped)

    def save(self, save: Save, pages: Sequence[Any], *, waits: bool = False) -> None:
        """Has pages (arrays that do not change any more) written as one segment.

        If the disk is so slow that too many wait already, these are lost, or if `waits`, this does.
        """
        path = self._folder / f"{self._prefix}{uuid.uuid4().hex}{_SUFFIX}"
        entries = [(group, index) for group, index, _, _ in save.entries]
        segment = Segment(path, save.space, save.tokens, save.first, save.lengths, entries, [], 0)
        numbers = [number for _, _, _, number in save.entries]
        self._place |= {number: (segment, index) for index, number in enumerate(numbers)}
        with self._written:
            while waits and self._is_busy(len(pages)):
                self._written.wait()
            if self._is_busy(len(pages)):
                self.events.put(("lost", numbers))
                return
            self._queued += len(pages)
        self._jobs.put(("save", segment, numbers, list(pages)))

    def _is_busy(self, count: int) -> bool:
        return self._queued > 0 and self._queued + count > self._most_queued

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
        return self._read([(segment, index) for index in range(len(segment.entries))])

    def _work(self) -> None:
        written: dict[Path, Segment] = {}
        while (job := self._jobs.get()) is not None:
            self._do(job, written)
            self._jobs.task_done()
        self._jobs.task_done()

    def _do(self, job: tuple[Any, ...], written: dict[Path, Segment]) -> None:
        kind, *rest = job
        if kind == "save":
            segment, numbers, pages = rest
            try:
                written[segment.path] = write_segment(segment, pages, self._kind)
            except Exception as error:  # whatever it is costs these pages, not who waits for them
                logger().warning("the cache of %s is not kept: %s", self._folder, error)
                self.events.put(("lost", numbers))
            with self._written:
                self._queued -= len(pages)
                self._written.notify()
        elif kind == "load":
            load, places = rest
            # Who asked for pages that were not written yet knows neither checksums nor places.
            pages = self._read([(written.get(one.path, one), index) for one, index in places])
            slots = None if pages is None else dict(zip(load.slots, pages, strict=True))
            self.events.put(("loaded", load.ticket, slots))
        else:
            written.pop(rest[0], None)
            _delete(rest[0])

    def _read(self, places: list[tuple[Segment, int]]) -> list[np.ndarray] | None:
        """Returns pages; None if one of them is not what was written."""
        try:
            pages = [read_page(segment, index, self._kind) for segment, index in places]
        except FileNotFoundError:
            return None  # another engine has deleted it
        except Exception as error:  # as above
            logger().warning("the cache of %s: %s; it is dropped", self._folder, error)
            return None
        for path in {segment.path for segment, _ in places}:
            with suppress(OSError):
                os.utime(path, follow_symlinks=False)  # by which the oldest files are found
        return pages


def parents_first(segments: Sequence[Segment]) -> list[Segment]:
    """Returns segments in an order in which they can be added; of several at a place, the longest
    first.
    """
    return sorted(segments, key=lambda segment: (segment.first, -len(segment.tokens)))


def last_uses(segments: Sequence[Segment], page_size: int) -> dict[Path, int]:
    """Returns when each segment, or one that is behind it, was last used, in nanoseconds."""
    used: dict[Path, int] = {}
    before: dict[Path, bytes] = {}  # the digest of all tokens before the segment
    owner: dict[bytes, Path] = {}  # by the digest of all tokens up to the end of a page
    for segment in segments:
        used[segment.path] = _used(segment.path)
        digest = hashlib.blake2b(repr(segment.space).encode())
        size, first = page_size * TOKEN_BYTES, segment.first * page_size * TOKEN_BYTES
        digest.update(segment.tokens[:first])
        before[segment.path] = digest.digest()
        for start in range(first, len(segment.tokens), size):
            digest.update(segment.tokens[start : start + size])
            owner[digest.digest()] = segment.path
    for segment in reversed(parents_first(segments)):
        parent = owner.get(before[segment.path])
        if parent is not None:
            used[parent] = max(used[parent], used[segment.path])
    return used


def _used(path: Path) -> int:
    """Returns when a file was last used, 0 if it is gone."""
    try:
        return path.lstat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _delete(path: Path) -> None:
    """Deletes a file of the cache, if it is ours to delete."""
    with suppress(OSError):
        path.unlink()

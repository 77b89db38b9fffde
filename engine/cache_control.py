# SPDX-License-Identifier: Apache-2.0
"""What a user can do with what is kept of requests: look, clear, carry it elsewhere and back."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.disk_cache import DiskCache, parents_first
from engine.host_pages import stripes_of
from engine.loop import Engine


class CacheControl:
    """The cache of an engine, `llm.cache`. Not to be used while another call runs."""

    def __init__(self, engine: Engine, fingerprint: Callable[[], str], page: Any) -> None:
        """`page`: the abstract value of a page in the host's memory."""
        self._engine = engine
        self._fingerprint = fingerprint
        self._page = page

    def _disk(self, folder: Path) -> DiskCache:
        page = self._page
        return DiskCache(folder, self._fingerprint(), page.shape, page.dtype, stripes_of(page))

    def _check_is_kept(self) -> None:
        if not self._engine.keeps:
            raise ValueError("the engine keeps nothing; start it with prefix_cache=True")
        if self._engine.is_shared:
            raise ValueError("pages go to and from files in an engine of one process only")

    def clear(self) -> None:
        """Lets go of all that is kept, in every tier; what runs goes on."""
        self._engine.clear_cache()

    def stats(self) -> dict[str, Any]:
        """Returns counters since the start.

        prompt_tokens, hit_tokens: of requests when they first ran; hits: those that had any.
        resumed_tokens: what preempted requests found again. copied_pages: copies on write.
        evicted_pages: let go for good. host_in_pages, host_out_pages, disk_in_pages,
        disk_out_pages: moved down into a tier, and up from it; `.._bytes`, the same in bytes.
        host_out_tokens, disk_out_tokens: of the tokens that were found, those that were in these
        tiers; from disk they come by the host, and count in both. damaged_pages: dropped, since the
        disk did not give back what was written. preemptions, and requests that were refused since
        they could never fit or too many waited. nodes: runs of pages in the tree, now.
        """
        stats = self._engine.stats()
        counts = stats["cache"] | {name: stats[name] for name in ("preemptions", "refused")}
        page_bytes = math.prod(self._page.shape) * self._page.dtype.itemsize
        for name in [name for name in counts if name.endswith(("_in_pages", "_out_pages"))]:
            counts[name.replace("_pages", "_bytes")] = counts[name] * page_bytes
        return counts

    def export(self, path: str | os.PathLike[str]) -> int:
        """Writes all that is on the device and the host to a new folder; returns its segments.

        For `import_` by an engine with the same model, options of the layout and program version.
        ValueError if the folder is there and not empty.
        """
        self._check_is_kept()
        folder = Path(path)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is not an empty folder; name a new one")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        disk = self._disk(folder)
        count = self._engine.write_cache(disk)
        disk.close()
        if not disk.events.empty():
            raise OSError(f"{folder} could not be written whole; free some space")
        return count

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Reads what `export` wrote onto the device, as far as pages are free.

        Returns how many segments were read; files that are damaged are left out, with a line in the
        log. ValueError if none of the folder's is of this model.
        """
        self._check_is_kept()
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder that export has written")
        disk = self._disk(folder)
        segments, _ = disk.scan("left out")
        disk.close()
        if not segments:
            raise ValueError(
                f"{folder} has nothing of this model and version; export it again with them"
            )
        count = 0
        for segment in parents_first(segments):
            if self._engine.read_segment(disk, segment):
                count += 1
        return count

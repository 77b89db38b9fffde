# SPDX-License-Identifier: Apache-2.0
"""Who holds which page. Host only: numbers, no arrays of keys and values."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

NULL_PAGE = 0  # of every partition; padded rows write there, nobody holds it
HOT = "hot"  # the tier of pages on the device in model precision
_FREE = -1


class OutOfPages(Exception):
    """The pool cannot serve this now; preempt or wait, then ask again."""


@dataclasses.dataclass(frozen=True)
class PageGroup:
    """Layers that share page ids. A query at q sees cell k if q - k < window (None: all k <= q)."""

    window: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window} must be at least 1, since a window counts the current "
                "token; use None for full attention"
            )

    def first_cell(self, query: int) -> int:
        """Returns the first cell that queries at `query` and later can see."""
        return 0 if self.window is None else max(0, query - self.window + 1)


class Handle(NamedTuple):
    """A page's full name."""

    partition: int
    group: int
    tier: str
    number: int


class PageCounts(NamedTuple):
    """Pages of one partition as one group sees them; `free` is shared by all groups."""

    free: int
    held: int
    cached: int


class PagePool:
    """Page numbers of every partition: each free, held by requests, or kept by the cache alone.

    A page belongs to the group that took it, until it is free. It is held while any request has it
    (`take` and `share`, until each has called `release`), and cached when none has it but the cache
    keeps it (`keep`, until `drop`). All groups draw from one id space, so a page that one group
    frees feeds any other.
    Invariant, by partition: free + held + cached + the null page == num_pages.
    """

    def __init__(self, num_pages: int, num_partitions: int = 1, num_groups: int = 1):
        if num_pages < 2:
            raise ValueError(
                f"num_pages={num_pages} leaves no page to use, since page 0 is reserved; "
                "use at least 2"
            )
        self.num_pages = num_pages
        self.num_partitions = num_partitions
        self.num_groups = num_groups
        partitions = range(num_partitions)
        self._free = [list(range(num_pages - 1, NULL_PAGE, -1)) for _ in partitions]
        self._group = [[_FREE] * num_pages for _ in partitions]
        self._holders = [[0] * num_pages for _ in partitions]
        self._kept = [bytearray(num_pages) for _ in partitions]
        self._held = [[0] * num_groups for _ in partitions]
        self._cached = [[0] * num_groups for _ in partitions]

    @property
    def capacity(self) -> int:
        """Pages of a partition that can be held."""
        return self.num_pages - 1

    def num_free(self, partition: int) -> int:
        """Returns how many pages of `partition` can be taken now."""
        return len(self._free[partition])

    def num_available(self, partition: int) -> int:
        """Returns how many pages of `partition` can be taken once the cache lets go of its own."""
        return len(self._free[partition]) + sum(self._cached[partition])

    def counts(self, partition: int, group: int) -> PageCounts:
        """Returns the pages of `partition` by state, as `group` sees them."""
        return PageCounts(
            len(self._free[partition]),
            self._held[partition][group],
            self._cached[partition][group],
        )

    def is_held(self, partition: int, number: int) -> bool:
        """Returns whether a request has the page."""
        return self._holders[partition][number] > 0

    def num_held(self, partition: int, numbers: Sequence[int]) -> int:
        """Returns how many of `numbers` (the null page: of none) a request has."""
        holders = self._holders[partition]
        return sum([holders[number] > 0 for number in numbers])

    def take(self, partition: int, group: int, count: int) -> list[int]:
        """Returns `count` page numbers, held by one request of `group` from now on.

        All of them or OutOfPages.
        """
        free, holders, groups = self._free[partition], self._holders[partition], self._group
        if count > len(free):
            raise OutOfPages(
                f"asked for {count} pages of partition {partition}, "
                f"{len(free)} of {self.capacity} are free"
            )
        numbers = [free.pop() for _ in range(count)]
        for number in numbers:
            groups[partition][number] = group
            holders[number] = 1
        self._held[partition][group] += count
        return numbers

    def share(self, partition: int, group: int, numbers: Sequence[int]) -> None:
        """Makes one more request a holder of `numbers`, which `group` has held or cached."""
        holders, groups = self._holders[partition], self._group[partition]
        for number in numbers:
            assert groups[number] == group, f"page {number} is not of group {group}"
            if holders[number] == 0:
                self._cached[partition][group] -= 1
                self._held[partition][group] += 1
            holders[number] += 1

    def release(self, partition: int, group: int, numbers: Sequence[int]) -> list[int]:
        """Takes one holder from each of `numbers`; returns those that are only cached now.

        What nobody holds or keeps is free. ValueError, naming the page, if `group` has it not held.
        """
        holders, kept, cached = self._holders[partition], self._kept[partition], []
        for number in numbers:
            if holders[number] == 0 or self._group[partition][number] != group:
                raise ValueError(
                    f"page {number} of partition {partition} is not held by group {group}; "
                    "release a page once, by the group that took it"
                )
            holders[number] -= 1
            if holders[number]:
                continue
            self._held[partition][group] -= 1
            if kept[number]:
                self._cached[partition][group] += 1
                cached.append(number)
            else:
                self._set_free(partition, number)
        return cached

    def keep(self, partition: int, group: int, numbers: Sequence[int]) -> None:
        """Marks held pages as ones that the cache keeps when nobody holds them any more."""
        holders, kept, groups = self._holders[partition], self._kept[partition], self._group
        for number in numbers:
            assert holders[number] and groups[partition][number] == group, "it is to be held"
            assert not kept[number], "the cache keeps a page in one place"
            kept[number] = 1

    def drop(self, partition: int, group: int, number: int) -> None:
        """Ends `keep` of one page; if nobody holds it, it is free then."""
        assert self._group[partition][number] == group, f"page {number} is not of group {group}"
        assert self._kept[partition][number], "the cache drops what it keeps"
        self._kept[partition][number] = 0
        if not self._holders[partition][number]:
            self._cached[partition][group] -= 1
            self._set_free(partition, number)

    def _set_free(self, partition: int, number: int) -> None:
        self._group[partition][number] = _FREE
        self._free[partition].append(number)

    def kept(self, partition: int) -> set[int]:
        """Returns the pages that the cache keeps."""
        return {number for number, is_kept in enumerate(self._kept[partition]) if is_kept}

    def held(self) -> Iterator[Handle]:
        """Yields the handle of every held page."""
        for partition, holders in enumerate(self._holders):
            for number, count in enumerate(holders):
                if count:
                    yield Handle(partition, self._group[partition][number], HOT, number)

    def check(self) -> None:
        """Raises AssertionError, in words, unless every page is in exactly one state."""
        for partition, free in enumerate(self._free):
            unique = set(free)
            assert len(unique) == len(free), f"partition {partition} lists a free page twice"
            assert NULL_PAGE not in unique, f"partition {partition} would give its null page away"
            held, cached = [0] * self.num_groups, [0] * self.num_groups
            for number, group in enumerate(self._group[partition]):
                holders, kept = self._holders[partition][number], self._kept[partition][number]
                assert (group == _FREE) == (not holders and not kept), f"page {number} is lost"
                if group != _FREE:
                    assert number not in unique, f"group {group} has free page {number}"
                    (held if holders else cached)[group] += 1
            assert held == self._held[partition], f"held: {held}, counted {self._held[partition]}"
            assert cached == self._cached[partition], (
                f"cached: {cached}, counted {self._cached[partition]}"
            )
            total = len(free) + sum(held) + sum(cached) + 1
            assert total == self.num_pages, (
                f"partition {partition} accounts for {total} of {self.num_pages} pages"
            )


class FilePool(PagePool):
    """Pages on disk, several in a file: a page that was dropped is free when its whole file is.

    `dead`: the pages of files that may be deleted, which whoever deletes them takes out.
    """

    def __init__(self, num_pages: int, num_groups: int):
        super().__init__(num_pages, 1, num_groups)
        self._file: dict[int, list[int]] = {}
        self._live: dict[int, int] = {}  # pages that are not dropped, by the file's first page
        self._dropped: set[int] = set()
        self.dead: list[list[int]] = []

    def put_together(self, numbers: list[int]) -> None:
        """Notes that pages are in one file."""
        self._file.update(dict.fromkeys(numbers, numbers))
        self._live[numbers[0]] = len(numbers)

    def drop(self, partition: int, group: int, number: int) -> None:
        """Ends `keep` of one page, once all of its file are dropped."""
        file = self._file[number]
        self._dropped.add(number)
        self._live[file[0]] -= 1
        if self._live[file[0]]:
            return
        del self._live[file[0]]
        for other in file:
            del self._file[other]
            self._dropped.remove(other)
            super().drop(partition, self._group[partition][other], other)
        self.dead.append(file)

    def kept(self, partition: int) -> set[int]:
        """Returns the pages that the cache keeps, and has not dropped."""
        return super().kept(partition) - self._dropped

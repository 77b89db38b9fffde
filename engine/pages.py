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
    """Page numbers of every partition, each free or held by exactly one group.

    All groups draw from one id space, so a group that frees a page feeds any other.
    Invariant, by partition: free + held + cached + the null page == num_pages. Nothing is cached:
    a page is let go when its request is.
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
        self._free = [list(range(num_pages - 1, NULL_PAGE, -1)) for _ in range(num_partitions)]
        self._holder = [[_FREE] * num_pages for _ in range(num_partitions)]
        self._held = [[0] * num_groups for _ in range(num_partitions)]

    @property
    def capacity(self) -> int:
        """Pages of a partition that can be held."""
        return self.num_pages - 1

    def num_free(self, partition: int) -> int:
        """Returns how many pages of `partition` can be taken now."""
        return len(self._free[partition])

    def counts(self, partition: int, group: int) -> PageCounts:
        """Returns the pages of `partition` by state, as `group` sees them."""
        return PageCounts(len(self._free[partition]), self._held[partition][group], 0)

    def take(self, partition: int, group: int, count: int) -> list[int]:
        """Returns `count` page numbers, held by `group` from now on; all of them or OutOfPages."""
        free, holder = self._free[partition], self._holder[partition]
        if count > len(free):
            raise OutOfPages(
                f"asked for {count} pages of partition {partition}, "
                f"{len(free)} of {self.capacity} are free"
            )
        numbers = [free.pop() for _ in range(count)]
        for number in numbers:
            holder[number] = group
        self._held[partition][group] += count
        return numbers

    def release(self, partition: int, group: int, numbers: Sequence[int]) -> None:
        """Frees `numbers`, which `group` must hold; ValueError otherwise, naming the page."""
        free, holder = self._free[partition], self._holder[partition]
        for number in numbers:
            if holder[number] != group:
                raise ValueError(
                    f"page {number} of partition {partition} is not held by group {group}; "
                    "release a page once, by the group that took it"
                )
            holder[number] = _FREE
            free.append(number)
            self._held[partition][group] -= 1

    def held(self) -> Iterator[Handle]:
        """Yields the handle of every held page."""
        for partition, holder in enumerate(self._holder):
            for number, group in enumerate(holder):
                if group != _FREE:
                    yield Handle(partition, group, HOT, number)

    def check(self) -> None:
        """Raises AssertionError, in words, unless every page is in exactly one state."""
        for partition, free in enumerate(self._free):
            unique = set(free)
            assert len(unique) == len(free), f"partition {partition} lists a free page twice"
            assert NULL_PAGE not in unique, f"partition {partition} would give its null page away"
            held: dict[int, list[int]] = {}
            for number, group in enumerate(self._holder[partition]):
                if group != _FREE:
                    held.setdefault(group, []).append(number)
            for group, count in enumerate(self._held[partition]):
                numbers = held.get(group, [])
                assert len(numbers) == count, f"group {group} holds {numbers}, counted {count}"
                assert unique.isdisjoint(numbers), f"group {group} holds a free page"
            total = len(free) + sum(self._held[partition]) + 1
            assert total == self.num_pages, (
                f"partition {partition} accounts for {total} of {self.num_pages} pages"
            )

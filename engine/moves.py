# SPDX-License-Identifier: Apache-2.0
"""The tiers that pages are in, and what is to be moved between them before a step."""

from collections.abc import Hashable
from typing import NamedTuple

DEVICE, HOST, DISK = 0, 1, 2  # tiers; each is evicted into the next
TIERS = ("device", "host", "disk")


class Move(NamedTuple):
    """One page is copied: on the device, from it to the host ("park"), or back ("restore")."""

    kind: str
    source: int
    target: int


class Save(NamedTuple):
    """Pages are written to disk as one segment.

    tier: where they are. tokens: those of all pages up to the segment's last; first: the place of
    its first page. entries: (group, index in the run, number in the tier, number on disk).
    """

    tier: int
    space: Hashable
    tokens: bytes
    first: int
    lengths: list[int]  # tokens of each page of the run
    entries: list[tuple[int, int, int, int]]


class Load(NamedTuple):
    """Pages on disk are to be read into slots; `loaded` is to be told of it."""

    ticket: int
    numbers: list[int]
    slots: list[int]


class Delete(NamedTuple):
    """The file that has these pages is of no use any more."""

    numbers: list[int]

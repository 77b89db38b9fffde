# SPDX-License-Identifier: Apache-2.0
"""Carries pages between the device, the host's memory and disk, as the scheduler wants it.

Moves between device and host are programs in the stream of steps, so that their order makes them
safe; only disk is asynchronous, and says when it is done. A page in the host's memory is an array
of its own, pinned where the platform can, which nothing changes once it is there.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from engine.disk_cache import DiskCache
from engine.host_pages import Places
from engine.moves import DEVICE, Delete, Load, Move, Save
from engine.pages import NULL_PAGE
from engine.prefix_cache import PrefixCache
from engine.programs import MOVES
from engine.state import State


class Mover:
    """The pages of one partition in the host's memory, by slot, and how they get there."""

    def __init__(
        self, programs: Mapping[Any, Any], disk: DiskCache | None, places: Places | None
    ) -> None:
        """`places` may be None where nothing is moved."""
        self._programs = programs
        self.disk = disk
        self._places: Any = places
        self._slots: dict[int, jax.Array | None] = {}  # None: in other processes only
        self._others: jax.Array | None = None

    def run(
        self, state: State, moves: Sequence[Move | Save | Load | Delete], *, waits: bool = False
    ) -> State:
        """Returns the state with the moves on their way, in order.

        `waits`: until the disk has room for what it is to write, else that is lost.
        """
        for part in batches(moves):
            first = part[0]
            if isinstance(first, Move):
                state = getattr(self, f"_{first.kind}")(state, part)
            elif self.disk is None:
                raise AssertionError("who has no disk asks for nothing of it")
            elif isinstance(first, Save):
                self.disk.save(first, self.pages(state, first), waits=waits)
            elif isinstance(first, Load):
                self.disk.load(first)
            else:
                self.disk.delete(first.numbers)
        return state

    def pages(self, state: State, save: Save) -> list[Any]:
        """Returns the pages that a segment is made of."""
        sources = [source for _, _, source, _ in save.entries]
        if save.tier != DEVICE:
            return [self._slots[source] for source in sources]
        taken: list[jax.Array | None] = []
        for first in range(0, len(sources), MOVES):
            part = sources[first : first + MOVES]
            taken += self._take(state, part)
        return taken

    def _take(self, state: State, numbers: Sequence[int]) -> list[jax.Array | None]:
        """Returns pages of the pool, on their way to the host; at most MOVES."""
        arrays = self._programs["park"](state.pool, self._padded(numbers))
        return [self._places.own(array) for array in arrays[: len(numbers)]]

    def _padded(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns page numbers as a program takes them, null pages of the other partitions."""
        array_PC = np.full((self._places.partitions, MOVES), NULL_PAGE, np.int32)
        array_PC[self._places.number, : len(numbers)] = numbers
        return array_PC.ravel()

    def put(self, state: State, numbers: Sequence[int], pages: Sequence[np.ndarray]) -> State:
        """Returns the state with `pages` in pages `numbers` of the pool."""
        for first in range(0, len(numbers), MOVES):
            part = [self._on_host(page) for page in pages[first : first + MOVES]]
            state = self._put(state, numbers[first : first + MOVES], part)
        return state

    def _on_host(self, page: np.ndarray) -> jax.Array:
        return jax.device_put(page, self._places.page.sharding)

    def _put(
        self, state: State, numbers: Sequence[int], slots: Sequence[jax.Array | None]
    ) -> State:
        places = self._places
        if self._others is None and places.partitions > 1:
            self._others = places.zeros()
        slots = list(slots) + [slots[0]] * (MOVES - len(slots))  # to the null page
        arrays = [places.whole(slot, self._others) for slot in slots]
        pool = self._programs["restore"](state.pool, self._padded(numbers), *arrays)
        return dataclasses.replace(state, pool=pool)

    def _copy(self, state: State, moves: Sequence[Move]) -> State:
        pages = [self._padded([move.source for move in moves])]
        pages.append(self._padded([move.target for move in moves]))
        return self._programs["copy"](state, np.stack(pages))

    def _park(self, state: State, moves: Sequence[Move]) -> State:
        slots = self._take(state, [move.source for move in moves])
        for move, slot in zip(moves, slots, strict=True):
            self._slots[move.target] = slot
        return state

    def _restore(self, state: State, moves: Sequence[Move]) -> State:
        slots = [self._slots[move.source] for move in moves]
        return self._put(state, [move.target for move in moves], slots)

    def read_events(self, cache: PrefixCache, *, wait: bool = False) -> None:
        """Tells the cache what the disk has done, and if `wait`, not before there is something."""
        while self.disk is not None and (wait or not self.disk.events.empty()):
            kind, *what = self.disk.events.get()
            wait = False
            if kind == "lost":
                cache.tiers.lost(set(what[0]))
                continue
            ticket, pages = what
            for slot, page in (pages or {}).items():
                self._slots[slot] = self._on_host(page)
            cache.tiers.loaded(ticket, pages is not None)

    def free_slots(self) -> None:
        """Gives the host's memory back, once the cache has nothing there."""
        self._slots.clear()

    def close(self) -> None:
        """Returns when all that goes to disk is there."""
        if self.disk is not None:
            self.disk.close()


def batches(moves: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields moves in order: runs of one kind that one program can do, and the others one by one.

    Such a program reads all pages before it writes any, and in no order.
    """
    batch: list[Any] = []
    written: set[int] = set()
    for move in moves:
        joins = (
            isinstance(move, Move)
            and batch
            and isinstance(batch[0], Move)
            and batch[0].kind == move.kind
            and len(batch) < MOVES
            and move.target not in written
            and not (move.kind == "copy" and move.source in written)
        )
        if batch and not joins:
            yield batch
            batch, written = [], set()
        batch.append(move)
        if isinstance(move, Move):
            written.add(move.target)
    if batch:
        yield batch

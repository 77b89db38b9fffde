# SPDX-License-Identifier: Apache-2.0
"""Kept pages move between tiers: down when room is needed, up when a request wants them."""

from collections import Counter
from collections.abc import Hashable, Iterator

from engine.kept_pages import MOVING, Group, KeptPages
from engine.moves import DEVICE, DISK, HOST, TIERS, Load, Move, Save
from engine.pages import NULL_PAGE, OutOfPages
from engine.radix import TOKEN_BYTES, Node, add_child, find, join

# Pages of a run that move down together: a few at a time from the device, a file's worth to disk.
BATCH = {DEVICE: 8, HOST: 64}


class Tiers:
    """Moves kept pages. What is to be done is written down in `moves`, in order."""

    def __init__(self, kept: KeptPages) -> None:
        self._kept = kept
        self._last_ticket = 0

    def demote(self, node: Node) -> None:
        """Moves the last pages of a leaf a tier down, or drops them if there is no room."""
        tier, last = node.tier, len(node.keys)
        first = max(self._kept.first_idle(node) if tier == DEVICE else 0, last - BATCH[tier])
        if tier + 1 == DISK:
            first = max(first, self._file_start(node))
        if first:
            self._kept.split(node, first)
        node.busy = MOVING
        try:
            self._copy_down(node)
        except OutOfPages:
            node.busy = 0
            self._kept.counts["evicted_pages"] += sum(
                map(bool, (n for run in node.nearest for n in run))
            )
            self._kept.drop(node)
            return
        node.busy = 0
        self._kept.unset_all(node, tier)
        self._kept.to_tier(node, tier + 1)
        children = list(node.children.values())
        if len(children) == 1 and children[0].tier == node.tier and not children[0].busy:
            if len(children[0].keys[-1]) == self._kept.key_bytes:
                join(node)
                self._kept.num_nodes -= 1
                self._kept.offer(node)

    def _copy_down(self, node: Node) -> None:
        """Copies a node's pages to the next tier, those that it has not; OutOfPages copies none."""
        tier, below = node.tier, node.tier + 1
        new = self._missing_below(node)
        if not new:
            return
        self._kept.make_room(len(new), below)
        entries = []
        for group, index in new:
            source, target = node.pages[tier][group][index], self._kept.take(below, group)
            node.pages[below][group][index] = target
            entries.append((group, index, source, target))
        if below == HOST:
            self._kept.moves += [Move("park", source, target) for _, _, source, target in entries]
        else:
            self._kept.disk.put_together([number for _, _, _, number in entries])
            self._kept.moves.append(self._segment(node, entries))
        self._kept.counts[f"{TIERS[below]}_in_pages"] += len(new)

    def _missing_below(self, node: Node) -> list[tuple[int, int]]:
        """Returns (group, index) of a node's pages of which the next tier has no copy."""
        below = node.pages[node.tier + 1]
        return [
            (group, index)
            for group, run in enumerate(node.nearest)
            for index, number in enumerate(run)
            if number != NULL_PAGE and below[group][index] == NULL_PAGE
        ]

    def _file_start(self, node: Node) -> int:
        """Returns the page of a run from which on all are on disk, or none is.

        What goes to disk as a segment has no page of a run that another has, else who finds it
        later finds a run with holes.
        """
        last = None
        for index in reversed(range(len(node.keys))):
            is_there = any(run[index] for run in node.pages[DISK])
            if not is_there and not any(run[index] for run in node.nearest):
                continue
            if last not in (None, is_there):
                return index + 1
            last = is_there
        return 0

    def _segment(self, node: Node, entries: list[tuple[int, int, int, int]]) -> Save:
        """Returns what is to be written of a node that goes to disk."""
        path = node.path()
        tokens = b"".join(key for above in path for key in above.keys)
        lengths = [len(key) // TOKEN_BYTES for key in node.keys]
        return Save(node.tier, node.root().space, tokens, node.start, lengths, entries)

    def park(self, node: Node, most: int) -> int:
        """Copies a node and those above to the host, at most `most` pages; returns how many.

        From the end on; they stay on the device until room is needed there.
        """
        copied = 0
        for above in reversed(node.path()) if len(self._kept.pools) > 1 else ():
            missing = sorted(index for _, index in self._missing_below(above))
            left, start = most - copied, 0
            if len(missing) > left:  # the last pages only, of every group
                start = missing[-left - 1] + 1 if left else len(above.keys)
                if start == len(above.keys):
                    break
                self._kept.split(above, start)
            try:
                self._copy_down(above)
            except OutOfPages:
                break
            copied += min(len(missing), left)
            self._kept.offer(above)
            if start:
                break
        return copied

    def lift(self, low: list[tuple[Node, int]], most: int) -> tuple[int, bool]:
        """Brings what is in lower tiers of a match up, at most `most` pages, or one.

        Returns how many pages of the device it took, and whether more is on its way: pages on disk
        are only asked for here, and `loaded` brings them to the host.
        """
        self._kept.touch(low[-1][0])
        on_host = [(node, count) for node, count in low if node.tier == HOST]
        for node, _ in on_host:
            node.busy = MOVING
        taken, ended = 0, False
        for node, count in on_host:
            count = min(count, max(1, (most - taken) // len(self._kept.groups)))
            ended = count < len(node.keys)
            got = self._promote(self._kept.split(node, count) if ended else node)
            taken += got
            ended = ended or not got or taken >= most
            if ended:
                break
        for node, _ in on_host:
            self._kept.set_idle(node)
        coming = False
        for node, _ in low if not ended else ():
            if node.tier == DISK:
                if node.parent is None or not (node.busy or self._ask(node)):
                    break  # it was let go just now, or the host has no room
                coming = True
        return taken, coming

    def _promote(self, node: Node) -> int:
        """Copies a node's pages from the host to the device; returns how many, 0 if no room."""
        new = [(g, i) for g, run in enumerate(node.nearest) for i, n in enumerate(run) if n]
        node.busy = MOVING
        try:
            self._kept.make_room(len(new))
        except OutOfPages:
            self._kept.set_idle(node)
            return 0
        node.busy = 0
        for group, index in new:
            page = self._kept.take(DEVICE, group)
            self._kept.moves.append(Move("restore", node.pages[HOST][group][index], page))
            node.pages[DEVICE][group][index] = page
            if self._kept.groups[group].window is not None:
                self._kept.node_of[page] = node
                self._kept.loose[page] = (self._kept.clock, group)
        self._kept.unset_all(node, HOST)
        self._kept.to_tier(node, DEVICE)
        self._kept.counts["host_out_pages"] += len(new)
        self._kept.counts["host_out_tokens"] += sum(map(len, node.keys)) // TOKEN_BYTES
        return len(new)

    def _ask(self, node: Node) -> bool:
        """Asks for a node's pages on disk; returns whether the host has room for them."""
        new = [(g, i) for g, run in enumerate(node.nearest) for i, n in enumerate(run) if n]
        node.busy = MOVING
        try:
            self._kept.make_room(len(new), HOST)
        except OutOfPages:
            self._kept.set_idle(node)
            return False
        self._last_ticket += 1
        node.busy = self._last_ticket
        slots: list[Group] = [[NULL_PAGE] * len(node.keys) for _ in self._kept.groups]
        for group, index in new:
            [slots[group][index]] = self._kept.pools[HOST].take(0, group, 1)
        self._kept.loads[node.busy] = (node, slots)
        numbers = [node.nearest[group][index] for group, index in new]
        targets = [slots[group][index] for group, index in new]
        self._kept.moves.append(Load(node.busy, numbers, targets))
        return True

    def loaded(self, ticket: int, is_whole: bool) -> None:
        """Ends a `Load`. What could not be read whole is dropped, and all behind it."""
        node, slots = self._kept.loads.pop(ticket)
        host = self._kept.pools[HOST]
        if node is not None and is_whole and self._is_on_disk(node.parent):
            self._kept.set_idle(node)  # another took what is before it, or it was not to be had
            node = None
        for group, run in enumerate(slots):
            numbers = [number for number in run if number != NULL_PAGE]
            if node is not None and is_whole:
                host.keep(0, group, numbers)
            host.release(0, group, numbers)
        if node is None:
            return
        node.busy = 0
        if not is_whole:
            self._kept.counts["damaged_pages"] += sum(map(len, slots))
            self._kept.drop(node)
            return
        self._kept.counts["disk_out_pages"] += sum(n != NULL_PAGE for run in slots for n in run)
        self._kept.counts["disk_out_tokens"] += sum(map(len, node.keys)) // TOKEN_BYTES
        node.pages[HOST] = slots
        self._kept.to_tier(node, HOST)

    @staticmethod
    def _is_on_disk(node: Node | None) -> bool:
        return node is not None and node.tier == DISK

    @property
    def is_loading(self) -> bool:
        """Whether pages are on their way up from disk."""
        return bool(self._kept.loads)

    def lost(self, numbers: set[int]) -> None:
        """Drops what could not be written to disk, by its numbers there."""
        for node in list(self._kept.nodes()):
            on_disk = {number for run in node.pages[DISK] for number in run}
            if node.parent is None or numbers.isdisjoint(on_disk):
                continue
            if node.tier == DISK:
                self._kept.drop(node)
            else:
                self._kept.unset_all(node, DISK)

    def saves(self) -> Iterator[Save]:
        """Yields all that is on the device or the host as segments, parents first."""
        for node in list(self._kept.nodes()):
            if node.parent is not None and node.tier != DISK:
                entries = [
                    (group, index, number, NULL_PAGE)
                    for group, run in enumerate(node.nearest)
                    for index, number in enumerate(run)
                    if number != NULL_PAGE
                ]
                if entries:
                    yield self._segment(node, entries)

    def flush(self) -> None:
        """Has all that is not on disk saved there, as room allows: the last used, and written last.

        So the times of files tell which were used before which.
        """
        for node in list(self._kept.nodes()):
            while node.tier != DISK and (start := self._file_start(node)):
                node = self._kept.split(node, start)
        saves: list[Save] = []
        nodes = [
            node for node in self._kept.nodes() if node.parent is not None and node.tier != DISK
        ]
        for node in sorted(nodes, key=lambda node: (-node.used, node.start)):
            entries = [
                (group, index, number, NULL_PAGE)
                for group, run in enumerate(node.nearest)
                for index, number in enumerate(run)
                if number != NULL_PAGE and node.pages[DISK][group][index] == NULL_PAGE
            ]
            if not entries:
                continue
            if not self._make_older_room(node, len(entries)):
                break
            for place, (group, index, source, _) in enumerate(entries):
                node.pages[DISK][group][index] = number = self._kept.take(DISK, group)
                entries[place] = (group, index, source, number)
            self._kept.disk.put_together([number for _, _, _, number in entries])
            saves.append(self._segment(node, entries))
        self._kept.moves += reversed(saves)

    def _make_older_room(self, node: Node, count: int) -> bool:
        """Whether the disk has room for so many pages, if what is older than a node goes."""
        while self._kept.disk.num_free(0) < count:
            oldest = self._kept.oldest(DISK)
            if oldest is None or oldest.used >= node.used:
                return False
            if oldest.tier == DISK:
                self._kept.drop(oldest)
            else:
                self._kept.unset_all(oldest, DISK)
        return True

    def _is_complete(self, length: int, entries: list[tuple[int, int]]) -> bool:
        """Whether entries of a run have every page of the groups whose layers see all."""
        had, groups = Counter(group for group, _ in entries), self._kept.groups
        full = [g for g, group in enumerate(groups) if group.window is None]
        return all(had[g] == length for g in full) and max(had, default=len(groups)) < len(groups)

    def add_saved(
        self,
        tier: int,
        space: Hashable,
        tokens: bytes,
        first: int,
        lengths: list[int],
        entries: list[tuple[int, int]],
    ) -> list[int] | None:
        """Adds a segment, as `Save` has it, to a tier; returns the numbers of its pages there.

        entries: (group, index in the run) of its pages. None if what is before it is not there, if
        there is no room, it is there already, or lacks a page.
        """
        if not self._is_complete(len(lengths), entries):
            return None
        size = self._kept.key_bytes
        starts = [place * size for place in range(first)]
        keys = [tokens[start : start + size] for start in starts]
        at = first * size
        run = []
        for length in lengths:
            run.append(tokens[at : at + length * TOKEN_BYTES])
            at += length * TOKEN_BYTES
        if self._kept.pools[tier].num_free(0) < len(entries):
            return None
        root = self._kept.root(space)
        path = find(root, keys, b"", first * self._kept.page_size, self._kept.page_size).path
        node, count = path[-1] if path else (root, 0)
        if node.start + count != first or run[0] in node.children or node.tier > tier:
            self._kept.prune_root(root)
            return None
        if count < len(node.keys):
            if node.keys[count] == run[0]:
                return None
            node = self._kept.split(node, count)
        child = Node(node, 0, run, self._kept.no_pages(len(run)), tier)
        numbers = []
        for group, index in entries:
            number = child.pages[tier][group][index] = self._kept.take(tier, group)
            numbers.append(number)
            if tier == DEVICE and self._kept.groups[group].window is not None:
                self._kept.node_of[number] = child
                self._kept.loose[number] = (self._kept.clock, group)
        add_child(node, child)
        self._kept.num_nodes += 1
        self._kept.offer(child)
        if tier == DISK:
            self._kept.disk.put_together(numbers)
        return numbers

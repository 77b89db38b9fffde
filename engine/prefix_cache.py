# SPDX-License-Identifier: Apache-2.0
"""Which prefixes have their keys and values in pages, and in which tier: device, host or disk.

Prefix sharing, preemption, swapping and resumption are one mechanism here: a request that lets go
of its pages leaves them in a tree, what room is needed for moves a tier down, and one that starts
takes what the tree has of its tokens. Host only: integers and bytes. What is to be moved is written
down in `moves`, in the order in which it is to be done before the next step.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from engine.pages import NULL_PAGE, FilePool, OutOfPages, PageGroup, PagePool
from engine.radix import (
    TOKEN_BYTES,
    Found,
    Node,
    Tip,
    add_child,
    common_run,
    find,
    find_part,
    join,
    move_tip,
    remove_child,
    set_tier,
    split,
    walk,
)

DEVICE, HOST, DISK = 0, 1, 2  # tiers; each is evicted into the next
TIERS = ("device", "host", "disk")
# Pages of a run that move down together: a few at a time from the device, a file's worth to disk.
BATCH = {DEVICE: 8, HOST: 64}
# A page that is not full is of less use than any that is: it counts as used so much earlier.
_EARLIER = 1 << 62
_MOVING = -1  # a node that is not to be touched, because its own pages are being moved

Group = list[int]  # the pages of one group, by place or by index in a run


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


class Match(NamedTuple):
    """What the cache has of a request's tokens: `cells` of them.

    path: nodes, and how many pages of each. pages: [group][place], numbers in the nodes' own tiers;
    NULL_PAGE where no later query sees them. source: the node and index of the page whose first
    cells are those behind the whole pages, None if there is none.
    """

    path: list[tuple[Node, int]]
    pages: list[Group]
    cells: int
    source: tuple[Node, int] | None

    @property
    def low(self) -> list[tuple[Node, int]]:
        """The part of the path, and the source's page, that is not on the device."""
        path = [(node, count) for node, count in self.path if node.tier != DEVICE]
        if self.source is not None and self.source[0].tier != DEVICE:
            node, index = self.source
            if path and path[-1][0] is node:
                path[-1] = (node, index + 1)
            else:
                path.append((node, index + 1))
        return path


class PrefixCache:
    """The pages that are kept, by the tokens that they are a function of.

    Each `space` (a tenant, and what else pages depend on beside tokens) has a root of its own, so
    that nothing is shared between two. Layers with full attention (groups without a window) have
    every page of a node; the others lose theirs one by one, and no match ends where one is missing
    that it needs. A tier is emptied least recently used first and leaves first, so that no hole is
    left; what a running request has stays. A node's tier is none nearer than its parent's.
    """

    def __init__(
        self, groups: Sequence[PageGroup], page_size: int, pools: Sequence[PagePool]
    ) -> None:
        """`pools` number the pages of each tier that there is, from the device's on."""
        self._groups = tuple(groups)
        self._windowed = [g for g, group in enumerate(groups) if group.window is not None]
        self._page_size = page_size
        self._key_bytes = page_size * TOKEN_BYTES
        self._pools = tuple(pools)
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._num_nodes = 0
        # Of each tier, a heap of (used, tie, node) that may be stale.
        self._leaves: list[list[tuple[int, int, Node]]] = [[] for _ in pools]
        self._tie = 0
        # Windowed pages on the device: the node of each. Those that nobody holds stand in `_loose`,
        # with the time of that, or in `_stale` if no match at their node's end needs them.
        self._node_of: dict[int, Node] = {}
        self._loose: dict[int, tuple[int, int]] = {}
        self._stale: dict[int, int] = {}
        self._loads: dict[int, tuple[Node | None, list[Group]]] = {}
        self._last_ticket = 0
        self.moves: list[Move | Save | Load | Delete] = []
        self.counts: Counter[str] = Counter()

    # Matching

    def match(
        self, space: Hashable, keys: Sequence[bytes], rest: bytes, most: int, deepest: int = DISK
    ) -> Match:
        """Returns what there is of a prefix, at most `most` tokens of it. Changes nothing.

        keys: those of its whole pages; rest: the tokens behind them. `deepest`: the last tier that
        is looked at.
        """
        root = self._roots.get(space)
        if root is None:
            return self.nothing()
        found = find(root, keys, rest, most, self._page_size)
        near = [each for each in found.path if each[0].tier <= deepest]
        if len(near) < len(found.path) or (found.source and found.source[0].tier > deepest):
            found = Found(near, 0, None)
        pages = [
            [number for node, count in found.path for number in node.nearest[group][:count]]
            for group in range(len(self._groups))
        ]
        end, cells, source = len(pages[0]), len(pages[0]) * self._page_size, found.source
        if not self._windowed:
            return Match(found.path, pages, cells + found.part, source)
        if source is None or not self._sees_all(pages, cells + found.part, source):
            end, source = self._longest(pages, end), None
        cells = end * self._page_size + (found.part if source is not None else 0)
        for group, kind in enumerate(self._groups):
            passed = min(end, kind.first_cell(cells) // self._page_size)
            pages[group] = [NULL_PAGE] * passed + pages[group][passed:end]
        path = [(n, min(count, end - n.start)) for n, count in found.path if n.start < end]
        return Match(path, pages, cells, source)

    def nothing(self) -> Match:
        """Returns a match of nothing."""
        return Match([], [[] for _ in self._groups], 0, None)

    def _sees_all(self, pages: list[Group], cells: int, source: tuple[Node, int]) -> bool:
        """Whether the query at `cells`, in a copy of the source, finds all that it sees."""
        node, index = source
        for g in self._windowed:
            first = self._groups[g].first_cell(cells) // self._page_size
            if NULL_PAGE in pages[g][first:] or node.nearest[g][index] == NULL_PAGE:
                return False
        return True

    def _longest(self, pages: list[Group], last: int) -> int:
        """Returns the most whole pages, up to `last`, behind which a query finds what it sees."""
        holes, best = [0] * len(self._windowed), 0
        for end in range(1, last + 1):
            fits = True
            for index, g in enumerate(self._windowed):
                if pages[g][end - 1] == NULL_PAGE:
                    holes[index] = end
                first = self._groups[g].first_cell(end * self._page_size) // self._page_size
                fits = fits and holes[index] <= first
            best = end if fits else best
        return best

    # Requests that come and go

    def enter(self, space: Hashable, match: Match) -> Tip:
        """Returns the place of a request that starts behind `match`."""
        if match.path:
            tip = Tip(*match.path[-1])
        else:
            root = self._roots.get(space)
            if root is None:
                root = Node(None, 0, [], self._no_pages(0), DEVICE, space)
                self._roots[space] = root
            tip = Tip(root, 0)
        assert tip.node is not None
        tip.node.tips.add(tip)
        return tip

    def stands_at(self, tip: Tip, space: Hashable, match: Match) -> bool:
        """Whether a request's place is that of one that would start behind `match`."""
        if match.path:
            return (tip.node, tip.offset) == match.path[-1]
        return tip.node is not None and tip.node is self._roots.get(space)

    def pin(self, source: tuple[Node, int]) -> tuple[Tip, Group]:
        """Holds a page until `unpin`, as a request would; returns the pin and the page by group."""
        node, index = source
        tip, numbers = Tip(node, index + 1), [pages[index] for pages in node.nearest]
        node.tips.add(tip)
        for group, number in enumerate(numbers):
            self.hold(group, [number])
        return tip, numbers

    def unpin(self, tip: Tip, numbers: Group) -> None:
        """Ends `pin`."""
        for group, number in enumerate(numbers):
            self.let_go(group, [number])
        if tip.node is not None:
            tip.node.tips.remove(tip)
            self._offer(tip.node)

    def hold(self, group: int, numbers: Group) -> None:
        """Makes one more request a holder of kept pages."""
        self._pools[DEVICE].share(0, group, numbers)
        if self._loose or self._stale:
            for number in numbers:
                self._loose.pop(number, None)
                self._stale.pop(number, None)

    def let_go(self, group: int, numbers: Sequence[int]) -> None:
        """Takes one holder from each page."""
        cached = self._pools[DEVICE].release(0, group, numbers)
        window = self._groups[group].window
        if window is None:
            return
        for number in cached:
            node = self._node_of[number]
            place = node.start + node.pages[DEVICE][group].index(number)
            end = (node.start + len(node.keys)) * self._page_size
            if place < self._groups[group].first_cell(end) // self._page_size:
                self._stale[number] = group
            else:
                self._loose[number] = (self._clock, group)

    def leave(self, tip: Tip) -> None:
        """Ends a request's place. What it was behind is the most recently used now."""
        node = tip.node
        if node is None:
            return
        node.tips.remove(tip)
        if 0 < tip.offset < len(node.keys):
            node = self._split(node, tip.offset)
        last = tip.tail if tip.tail is not None and tip.tail.parent is not None else node
        tip.node = tip.tail = None
        self._touch(last)
        self._prune_root(node)

    def _touch(self, node: Node) -> None:
        """Makes a node, and those above, the most recently used ones."""
        self._clock += 1
        for above in node.path():
            is_full = len(above.keys[-1]) == self._key_bytes
            above.used = self._clock if is_full else self._clock - _EARLIER
            if len(self._pools) > 1 or above is node:
                self._offer(above)

    # Growing

    def insert(self, tip: Tip, keys: list[bytes], pages: list[Group]) -> list[tuple[int, int, int]]:
        """Adds pages behind `tip`, which moves on.

        pages: [group][index], the request's own, NULL_PAGE where it has let go. Returns (group,
        index, number) where there was a page, which the request is to hold in place of its own.
        """
        self._drop_tail(tip)
        had: list[tuple[int, int, int]] = []
        done = 0
        while done < len(keys):
            node, offset = tip.node, tip.offset
            assert node is not None
            if offset < len(node.keys):
                count = common_run(node.keys[offset:], keys, done, len(keys))
                if count:
                    had += self._adopt(node, offset, count, pages, done)
                    tip.offset += count
                    done += count
                    continue
                node = self._split(node, offset)
            elif (child := node.children.get(keys[done])) is not None:
                if child.tier != DEVICE:
                    child = self._claim(child, keys, pages, done)
                    move_tip(tip, child, len(child.keys))
                    done += len(child.keys)
                else:
                    move_tip(tip, child, 0)
                continue
            elif node.parent is not None and not node.children:
                self._extend(node, keys[done:], [own[done:] for own in pages])
                tip.offset = len(node.keys)
                break
            child = self._new_child(node, keys[done:], [own[done:] for own in pages])
            move_tip(tip, child, len(child.keys))
            break
        return had

    def put_tail(self, tip: Tip, key: bytes, pages: Group) -> None:
        """Leaves a page that is not full behind `tip`, to be copied, unless one there will do."""
        self._drop_tail(tip)
        node = tip.node
        assert node is not None and 0 < len(key) < self._key_bytes
        tokens, _ = find_part(node, tip.offset, key)
        if tokens == len(key) // TOKEN_BYTES or NULL_PAGE in pages:
            return
        if tip.offset < len(node.keys):
            node = self._split(node, tip.offset)
        tip.tail = self._new_child(node, [key], [[number] for number in pages])

    def detach(self, tip: Tip) -> None:
        """Ends a request's place without a trace: what follows is not to be kept."""
        if tip.node is not None:
            self._drop_tail(tip)
            node, tip.node = tip.node, None
            node.tips.remove(tip)
            self._offer(node)
            self._prune_root(node)

    def _no_pages(self, count: int) -> list[list[Group]]:
        return [[[NULL_PAGE] * count for _ in self._groups] for _ in self._pools]

    def _adopt(
        self, node: Node, offset: int, count: int, pages: list[Group], done: int
    ) -> list[tuple[int, int, int]]:
        """Gives a run the pages that it lacks; returns those that it had, as `insert` does."""
        had = []
        for group, own in enumerate(pages):
            run = node.pages[DEVICE][group]
            for index in range(count):
                number = run[offset + index]
                if number != NULL_PAGE:
                    had.append((group, done + index, number))
                elif own[done + index] != NULL_PAGE:
                    run[offset + index] = own[done + index]
                    self._keep(node, group, [own[done + index]])
        return had

    def _claim(self, node: Node, keys: list[bytes], pages: list[Group], done: int) -> Node:
        """Gives a node of a lower tier, as far as its keys match, a request's own pages."""
        count = common_run(node.keys, keys, done, len(keys))
        if count < len(node.keys):
            node = self._split(node, count)
        self._cancel(node)
        for group, own in enumerate(pages):
            node.pages[DEVICE][group] = own[done : done + count]
            self._keep(node, group, own[done : done + count])
        self._to_tier(node, DEVICE)
        return node

    def _extend(self, node: Node, keys: list[bytes], pages: list[Group]) -> None:
        """Adds pages to the end of a run."""
        node.keys += keys
        for tier, runs in enumerate(node.pages):
            for group, run in enumerate(runs):
                run += pages[group] if tier == DEVICE else [NULL_PAGE] * len(keys)
        for group, numbers in enumerate(pages):
            self._keep(node, group, numbers)

    def _keep(self, node: Node, group: int, numbers: Group) -> None:
        if self._groups[group].window is None:
            self._pools[DEVICE].keep(0, group, numbers)
            return
        present = [number for number in numbers if number != NULL_PAGE]
        self._pools[DEVICE].keep(0, group, present)
        self._node_of.update(dict.fromkeys(present, node))

    def _unset(self, node: Node, tier: int, group: int, index: int) -> None:
        number = node.pages[tier][group][index]
        if number == NULL_PAGE:
            return
        node.pages[tier][group][index] = NULL_PAGE
        self._pools[tier].drop(0, group, number)
        if tier == DISK and self._disk.dead:
            self.moves += [Delete(numbers) for numbers in self._disk.dead]
            self._disk.dead.clear()
        if tier == DEVICE and self._groups[group].window is not None:
            del self._node_of[number]
            self._loose.pop(number, None)
            self._stale.pop(number, None)

    def _unset_all(self, node: Node, tier: int) -> None:
        for group in range(len(self._groups)):
            for index in range(len(node.keys)):
                self._unset(node, tier, group, index)

    def _new_child(self, node: Node, keys: list[bytes], pages: list[Group]) -> Node:
        child = Node(node, 0, [], self._no_pages(0), DEVICE, used=node.used)
        self._extend(child, keys, pages)
        add_child(node, child)
        self._num_nodes += 1
        return child

    def _drop_tail(self, tip: Tip) -> None:
        if tip.tail is not None and tip.tail.parent is not None:
            self._drop(tip.tail)
        tip.tail = None

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node in two; returns the upper part. The lower part stays the same object."""
        self._cancel(node)
        upper = split(node, at)
        for g in self._windowed:
            for number in upper.pages[DEVICE][g]:
                if number != NULL_PAGE:
                    self._node_of[number] = upper
                    # It may stand at the end of a node now, where a match needs it.
                    if self._stale.pop(number, None) is not None:
                        self._loose[number] = (node.used, g)
        self._num_nodes += 1
        if len(self._pools) > 1:
            self._offer(upper)
        return upper

    # Eviction

    def make_room(self, count: int, tier: int = DEVICE) -> None:
        """Empties a tier until `count` of its pages are free; OutOfPages if there are not so many.

        What is least recently used goes first, to the next tier where there is one.
        """
        pool = self._pools[tier]
        while (missing := count - pool.num_free(0)) > 0:
            if tier == DEVICE and self._stale:
                number, group = next(iter(self._stale.items()))
                self._drop_windowed(number, group)
                continue
            node = self._oldest(tier)
            loose = next(iter(self._loose.items()), None) if tier == DEVICE else None
            if loose is not None and (node is None or loose[1][0] <= node.used):
                self._drop_windowed(loose[0], loose[1][1])
            elif node is None:
                raise OutOfPages(f"asked for {count} pages, {pool.num_free(0)} are free")
            elif node.tier < tier:
                self._unset_all(node, tier)
            elif tier + 1 < len(self._pools):
                self._demote(node)
            else:
                self._trim(node, missing)

    def _drop_windowed(self, number: int, group: int) -> None:
        node = self._node_of[number]
        self._unset(node, DEVICE, group, node.pages[DEVICE][group].index(number))
        self.counts["evicted_pages"] += 1

    def _oldest(self, tier: int) -> Node | None:
        """Returns the node that was not used for longest, of those that the tier may lose."""
        heap = self._leaves[tier]
        while heap:
            used, _, node = heap[0]
            if node.used == used and self._may_lose(node, tier):
                return node
            heapq.heappop(heap)  # it is offered again when that changes
        return None

    def _may_lose(self, node: Node, tier: int) -> bool:
        """Whether a tier may lose pages of a node: none that a request holds, and no hole left."""
        if node.parent is None or node.busy or node.tier > tier:
            return False
        if node.tier < tier:
            return any(map(any, node.pages[tier]))
        return not node.peers and (tier != DEVICE or self._first_idle(node) < len(node.keys))

    def _first_idle(self, node: Node) -> int:
        """Returns the first page of a run that no request holds: none stands behind it."""
        return max([tip.offset for tip in node.tips], default=0)

    def _offer(self, node: Node) -> None:
        """Puts a node where the tiers look for what they may lose."""
        for tier in range(node.tier, len(self._pools)):
            if not self._may_lose(node, tier):
                continue
            heap = self._leaves[tier]
            self._tie += 1
            heapq.heappush(heap, (node.used, self._tie, node))
            if len(heap) > 2 * self._num_nodes + 64:  # most of it is stale
                fresh = {id(entry[2]): entry for entry in heap if entry[2].used == entry[0]}
                self._leaves[tier] = list(fresh.values())
                heapq.heapify(self._leaves[tier])

    def _trim(self, node: Node, missing: int) -> None:
        """Lets go of a leaf's last pages for good, until so many are free or the node is gone."""
        first = self._first_idle(node)
        while missing > 0 and len(node.keys) > max(first, 1):
            last = len(node.keys) - 1
            for group in range(len(self._groups)):
                missing -= node.nearest[group][last] != NULL_PAGE
                self.counts["evicted_pages"] += node.nearest[group][last] != NULL_PAGE
            self._pop(node)
        if missing > 0 and not first:
            self.counts["evicted_pages"] += sum(run[0] != NULL_PAGE for run in node.nearest)
            self._drop(node)

    def _pop(self, node: Node) -> None:
        """Takes the last page off a run of several."""
        last = len(node.keys) - 1
        for tier, runs in enumerate(node.pages):
            for group, run in enumerate(runs):
                self._unset(node, tier, group, last)
                run.pop()
        node.keys.pop()

    def _drop(self, node: Node) -> None:
        """Ends a node and all behind it; its parent may be a leaf then."""
        parent = remove_child(node)
        for lost in list(walk([node])):
            assert not lost.tips, "what a request stands behind is not dropped"
            self._cancel(lost)
            for tier in range(len(self._pools)):
                self._unset_all(lost, tier)
            lost.parent = None
            self._num_nodes -= 1
        self._offer(parent)
        self._prune_root(parent)

    def _prune_root(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.tips:
            if self._roots.get(node.space) is node:
                del self._roots[node.space]

    # Tiers

    def _to_tier(self, node: Node, tier: int) -> None:
        """Changes a node's tier, whose pages are there already."""
        parent = node.parent
        set_tier(node, tier)
        self._offer(node)
        if parent is not None:
            self._offer(parent)

    def _demote(self, node: Node) -> None:
        """Moves the last pages of a leaf a tier down, or drops them if there is no room."""
        tier, last = node.tier, len(node.keys)
        first = max(self._first_idle(node) if tier == DEVICE else 0, last - BATCH[tier])
        if first:
            self._split(node, first)
        node.busy = _MOVING
        try:
            self._copy_down(node)
        except OutOfPages:
            node.busy = 0
            self.counts["evicted_pages"] += sum(map(bool, (n for run in node.nearest for n in run)))
            self._drop(node)
            return
        node.busy = 0
        self._unset_all(node, tier)
        self._to_tier(node, tier + 1)
        children = list(node.children.values())
        if len(children) == 1 and children[0].tier == node.tier and not children[0].busy:
            if len(children[0].keys[-1]) == self._key_bytes:
                join(node)
                self._num_nodes -= 1
                self._offer(node)

    def _copy_down(self, node: Node) -> None:
        """Copies a node's pages to the next tier, those that it has not; OutOfPages copies none."""
        tier, below = node.tier, node.tier + 1
        new = self._missing_below(node)
        if not new:
            return
        self.make_room(len(new), below)
        entries = []
        for group, index in new:
            source, target = node.pages[tier][group][index], self._take(below, group)
            node.pages[below][group][index] = target
            entries.append((group, index, source, target))
        if below == HOST:
            self.moves += [Move("park", source, target) for _, _, source, target in entries]
        else:
            self._disk.put_together([number for _, _, _, number in entries])
            self.moves.append(self._segment(node, entries))
        self.counts[f"{TIERS[below]}_in_pages"] += len(new)

    def _missing_below(self, node: Node) -> list[tuple[int, int]]:
        """Returns (group, index) of a node's pages of which the next tier has no copy."""
        below = node.pages[node.tier + 1]
        return [
            (group, index)
            for group, run in enumerate(node.nearest)
            for index, number in enumerate(run)
            if number != NULL_PAGE and below[group][index] == NULL_PAGE
        ]

    def _take(self, tier: int, group: int) -> int:
        """Returns the number of a page that a tier keeps from now on."""
        pool = self._pools[tier]
        [number] = pool.take(0, group, 1)
        pool.keep(0, group, [number])
        pool.release(0, group, [number])
        return number

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
        for above in reversed(node.path()) if len(self._pools) > 1 else ():
            missing = len(self._missing_below(above))
            if copied + missing > most:
                break
            try:
                self._copy_down(above)
            except OutOfPages:
                break
            copied += missing
            self._offer(above)
        return copied

    def lift(self, match: Match, most: int) -> tuple[int, bool]:
        """Brings what a match has in lower tiers up, at most `most` pages, or one.

        Returns how many pages of the device it took, and whether more is on its way: pages on disk
        are only asked for here, and `loaded` brings them to the host.
        """
        low = match.low
        self._touch(low[-1][0])
        on_host = [(node, count) for node, count in low if node.tier == HOST]
        for node, _ in on_host:
            node.busy = _MOVING
        taken, ended = 0, False
        for node, count in on_host:
            count = min(count, max(1, (most - taken) // len(self._groups)))
            ended = count < len(node.keys)
            got = self._promote(self._split(node, count) if ended else node)
            taken += got
            ended = ended or not got or taken >= most
            if ended:
                break
        for node, _ in on_host:
            self._set_idle(node)
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
        node.busy = _MOVING
        try:
            self.make_room(len(new))
        except OutOfPages:
            self._set_idle(node)
            return 0
        node.busy = 0
        for group, index in new:
            page = self._take(DEVICE, group)
            self.moves.append(Move("restore", node.pages[HOST][group][index], page))
            node.pages[DEVICE][group][index] = page
            if self._groups[group].window is not None:
                self._node_of[page] = node
                self._loose[page] = (self._clock, group)
        self._unset_all(node, HOST)
        self._to_tier(node, DEVICE)
        self.counts["host_out_pages"] += len(new)
        self.counts["host_out_tokens"] += sum(map(len, node.keys)) // TOKEN_BYTES
        return len(new)

    def _ask(self, node: Node) -> bool:
        """Asks for a node's pages on disk; returns whether the host has room for them."""
        new = [(g, i) for g, run in enumerate(node.nearest) for i, n in enumerate(run) if n]
        node.busy = _MOVING
        try:
            self.make_room(len(new), HOST)
        except OutOfPages:
            self._set_idle(node)
            return False
        self._last_ticket += 1
        node.busy = self._last_ticket
        slots: list[Group] = [[NULL_PAGE] * len(node.keys) for _ in self._groups]
        for group, index in new:
            [slots[group][index]] = self._pools[HOST].take(0, group, 1)
        self._loads[node.busy] = (node, slots)
        numbers = [node.nearest[group][index] for group, index in new]
        targets = [slots[group][index] for group, index in new]
        self.moves.append(Load(node.busy, numbers, targets))
        return True

    def loaded(self, ticket: int, is_whole: bool) -> None:
        """Ends a `Load`. What could not be read whole is dropped, and all behind it."""
        node, slots = self._loads.pop(ticket)
        host = self._pools[HOST]
        if node is not None and is_whole and self._is_on_disk(node.parent):
            self._set_idle(node)  # another took what is before it, or it was not to be had
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
            self.counts["damaged_pages"] += sum(map(len, slots))
            self._drop(node)
            return
        self.counts["disk_out_pages"] += sum(n != NULL_PAGE for run in slots for n in run)
        self.counts["disk_out_tokens"] += sum(map(len, node.keys)) // TOKEN_BYTES
        node.pages[HOST] = slots
        self._to_tier(node, HOST)

    @staticmethod
    def _is_on_disk(node: Node | None) -> bool:
        return node is not None and node.tier == DISK

    def _cancel(self, node: Node) -> None:
        """Has a node that is asked for from disk go on without."""
        if node.busy > 0:
            _, slots = self._loads[node.busy]
            self._loads[node.busy] = (None, slots)
            self._set_idle(node)

    def _set_idle(self, node: Node) -> None:
        """Lets a node be touched again."""
        node.busy = 0
        self._offer(node)

    @property
    def is_loading(self) -> bool:
        """Whether pages are on their way up from disk."""
        return bool(self._loads)

    def lost(self, numbers: set[int]) -> None:
        """Drops what could not be written to disk, by its numbers there."""
        for node in list(self.nodes()):
            on_disk = {number for run in node.pages[DISK] for number in run}
            if node.parent is None or numbers.isdisjoint(on_disk):
                continue
            if node.tier == DISK:
                self._drop(node)
            else:
                self._unset_all(node, DISK)

    def saves(self) -> Iterator[Save]:
        """Yields all that is on the device or the host as segments, parents first."""
        for node in list(self.nodes()):
            if node.parent is not None and node.tier != DISK:
                entries = [
                    (group, index, number, NULL_PAGE)
                    for group, run in enumerate(node.nearest)
                    for index, number in enumerate(run)
                    if number != NULL_PAGE
                ]
                yield self._segment(node, entries)

    def flush(self) -> None:
        """Has all that is not on disk saved there, the most recently used first, as room allows."""
        nodes = [node for node in self.nodes() if node.parent is not None and node.tier != DISK]
        for node in sorted(nodes, key=lambda node: (-node.used, node.start)):
            entries = [
                (group, index, number, NULL_PAGE)
                for group, run in enumerate(node.nearest)
                for index, number in enumerate(run)
                if number != NULL_PAGE and node.pages[DISK][group][index] == NULL_PAGE
            ]
            if not entries:
                continue
            while self._disk.num_free(0) < len(entries):
                oldest = self._oldest(DISK)
                if oldest is None or oldest.used >= node.used:
                    return
                if oldest.tier == DISK:
                    self._drop(oldest)
                else:
                    self._unset_all(oldest, DISK)
            for place, (group, index, source, _) in enumerate(entries):
                node.pages[DISK][group][index] = number = self._take(DISK, group)
                entries[place] = (group, index, source, number)
            self._disk.put_together([number for _, _, _, number in entries])
            self.moves.append(self._segment(node, entries))

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
        there is no room, or it is there already.
        """
        size, root = self._key_bytes, self._roots.get(space)
        starts = [place * size for place in range(first)]
        keys = [tokens[start : start + size] for start in starts]
        at = first * size
        run = []
        for length in lengths:
            run.append(tokens[at : at + length * TOKEN_BYTES])
            at += length * TOKEN_BYTES
        if self._pools[tier].num_free(0) < len(entries):
            return None
        if root is None:
            root = self._roots[space] = Node(None, 0, [], self._no_pages(0), DEVICE, space)
        path = find(root, keys, b"", first * self._page_size, self._page_size).path
        node, count = path[-1] if path else (root, 0)
        if node.start + count != first or run[0] in node.children or node.tier > tier:
            self._prune_root(root)
            return None
        if count < len(node.keys):
            if node.keys[count] == run[0]:
                return None
            node = self._split(node, count)
        child = Node(node, 0, run, self._no_pages(len(run)), tier)
        numbers = []
        for group, index in entries:
            number = child.pages[tier][group][index] = self._take(tier, group)
            numbers.append(number)
            if tier == DEVICE and self._groups[group].window is not None:
                self._node_of[number] = child
                self._loose[number] = (self._clock, group)
        add_child(node, child)
        self._num_nodes += 1
        self._offer(child)
        if tier == DISK:
            self._disk.put_together(numbers)
        return numbers

    @property
    def _disk(self) -> FilePool:
        pool = self._pools[DISK]
        assert isinstance(pool, FilePool)
        return pool

    def clear(self) -> None:
        """Lets go of everything; what running requests have stays theirs and is not kept."""
        for node in list(self.nodes()):
            for tip in node.tips:
                tip.node = tip.tail = None
            node.tips.clear()
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self._drop(child)
        self._roots.clear()

    # Looking

    def nodes(self) -> Iterator[Node]:
        """Yields every node, roots too, parents first."""
        return walk(list(self._roots.values()))

    def stats(self) -> dict[str, int]:
        """Returns what was counted, and the nodes there are."""
        return {**self.counts, "nodes": self._num_nodes}

    def check(self) -> None:
        """Raises AssertionError, in words, unless the tree and the pools agree."""
        seen: list[dict[int, int]] = [{} for _ in self._pools]
        nodes = list(self.nodes())
        for node in nodes:
            self._check_node(node)
            for tier, runs in enumerate(node.pages):
                for group, run in enumerate(runs):
                    for number in run:
                        if number != NULL_PAGE:
                            assert number not in seen[tier], f"{TIERS[tier]} {number} twice"
                            seen[tier][number] = group
        count = sum(node.parent is not None for node in nodes)
        assert count == self._num_nodes, f"{count} nodes, counted {self._num_nodes}"
        for tier, pool in enumerate(self._pools):
            pool.check()
            kept = pool.kept(0)
            assert kept == seen[tier].keys(), f"{TIERS[tier]} keeps {kept}, has {seen[tier]}"
        device = self._pools[DEVICE]
        loose = {
            number
            for number, group in seen[DEVICE].items()
            if self._groups[group].window is not None and not device.is_held(0, number)
        }
        assert loose == self._loose.keys() | self._stale.keys(), "a loose page is lost"
        assert not self._loose.keys() & self._stale.keys()
        for tier, heap in enumerate(self._leaves):
            offered = {id(node) for used, _, node in heap if node.used == used}
            tails = {id(tip.tail) for node in nodes for tip in node.tips}
            for node in nodes:
                if self._may_lose(node, tier) and id(node) not in tails:
                    assert id(node) in offered, f"a node of tier {tier} is never let go"

    def _check_node(self, node: Node) -> None:
        size = len(node.keys)
        assert (node.parent is None) == (size == 0), "only roots are empty"
        assert all(len(run) == size for runs in node.pages for run in runs)
        assert sorted(node.children) == node.order
        assert node.peers == sum(child.tier == node.tier for child in node.children.values())
        short = [key for key in node.keys if len(key) < self._key_bytes]
        assert not short or (size == 1 and not node.children)
        for key, child in node.children.items():
            assert child.parent is node and child.keys[0] == key
            assert child.start == node.start + size
            assert child.tier >= node.tier, "a page is nearer than the one before it"
        for tip in node.tips:
            assert tip.node is node and tip.offset <= size and node.tier == DEVICE
            assert tip.offset > 0 or node.parent is None
        for tier in range(node.tier):
            assert not any(map(any, node.pages[tier])), "a node has pages nearer than its tier"
        for group, run in enumerate(node.nearest):
            full = self._groups[group].window is None
            assert not full or NULL_PAGE not in run, f"group {group} has a hole"

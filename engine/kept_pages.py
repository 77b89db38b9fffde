# SPDX-License-Identifier: Apache-2.0
"""The pages that are kept, by node of the trees, and which of them a tier may lose."""

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence

from engine.moves import DEVICE, DISK, Delete, Load, Move, Save
from engine.pages import NULL_PAGE, FilePool, OutOfPages, PageGroup, PagePool
from engine.radix import TOKEN_BYTES, Node, add_child, remove_child, set_tier, split, walk

# A page that is not full is of less use than any that is: it counts as used so much earlier.
_EARLIER = 1 << 62
MOVING = -1  # a node that is not to be touched, because its own pages are being moved

Group = list[int]  # the pages of one group, by place or by index in a run


class KeptPages:
    """Nodes, their pages by tier, and the order in which they are let go.

    Layers with full attention (groups without a window) have every page of a node; the others lose
    theirs one by one. A tier is emptied least recently used first and leaves first, so that no hole
    is left; what a running request has stays. What leaves a tier that has one below is handed to
    `demote`.
    """

    def __init__(
        self, groups: Sequence[PageGroup], page_size: int, pools: Sequence[PagePool]
    ) -> None:
        """`pools` number the pages of each tier that there is, from the device's on."""
        self.groups = tuple(groups)
        self.windowed = [g for g, group in enumerate(groups) if group.window is not None]
        self.page_size = page_size
        self.key_bytes = page_size * TOKEN_BYTES
        self.pools = tuple(pools)
        self.roots: dict[Hashable, Node] = {}
        self.clock = 0
        self.num_nodes = 0
        # Of each tier, a heap of (used, tie, node) that may be stale.
        self.leaves: list[list[tuple[int, int, Node]]] = [[] for _ in pools]
        self._tie = 0
        # Windowed pages on the device: the node of each. Those that nobody holds stand in `_loose`,
        # with the time of that, or in `_stale` if no match at their node's end needs them.
        self.node_of: dict[int, Node] = {}
        self.loose: dict[int, tuple[int, int]] = {}
        self.stale: dict[int, int] = {}
        self.loads: dict[int, tuple[Node | None, list[Group]]] = {}
        self.moves: list[Move | Save | Load | Delete] = []
        self.counts: Counter[str] = Counter()
        # What moves the last pages of a node down; whoever knows the tiers sets it.
        self.demote: Callable[[Node], None] = self.drop

    @property
    def disk(self) -> FilePool:
        """The pool of the disk tier, which there has to be."""
        pool = self.pools[DISK]
        assert isinstance(pool, FilePool)
        return pool

    def hold(self, group: int, numbers: Group) -> None:
        """Makes one more request a holder of kept pages."""
        self.pools[DEVICE].share(0, group, numbers)
        if self.loose or self.stale:
            for number in numbers:
                self.loose.pop(number, None)
                self.stale.pop(number, None)

    def let_go(self, group: int, numbers: Sequence[int]) -> None:
        """Takes one holder from each page."""
        cached = self.pools[DEVICE].release(0, group, numbers)
        window = self.groups[group].window
        if window is None:
            return
        for number in cached:
            node = self.node_of[number]
            place = node.start + node.pages[DEVICE][group].index(number)
            end = (node.start + len(node.keys)) * self.page_size
            if place < self.groups[group].first_cell(end) // self.page_size:
                self.stale[number] = group
            else:
                self.loose[number] = (self.clock, group)

    def touch(self, node: Node) -> None:
        """Makes a node, and those above, the most recently used ones."""
        self.clock += 1
        for above in node.path():
            is_full = len(above.keys[-1]) == self.key_bytes
            above.used = self.clock if is_full else self.clock - _EARLIER
            if len(self.pools) > 1 or above is node:
                self.offer(above)

    def no_pages(self, count: int) -> list[list[Group]]:
        """Returns the pages, by tier and group, of a run that has none yet."""
        return [[[NULL_PAGE] * count for _ in self.groups] for _ in self.pools]

    def extend(self, node: Node, keys: list[bytes], pages: list[Group]) -> None:
        """Adds pages to the end of a run."""
        node.keys += keys
        for tier, runs in enumerate(node.pages):
            for group, run in enumerate(runs):
                run += pages[group] if tier == DEVICE else [NULL_PAGE] * len(keys)
        for group, numbers in enumerate(pages):
            self.keep(node, group, numbers)

    def keep(self, node: Node, group: int, numbers: Group) -> None:
        """Keeps pages of the device that a request holds, for a node that has them."""
        if self.groups[group].window is None:
            self.pools[DEVICE].keep(0, group, numbers)
            return
        present = [number for number in numbers if number != NULL_PAGE]
        self.pools[DEVICE].keep(0, group, present)
        self.node_of.update(dict.fromkeys(present, node))

    def unset(self, node: Node, tier: int, group: int, index: int) -> None:
        """Lets a tier go of one page of a node, if it has it."""
        number = node.pages[tier][group][index]
        if number == NULL_PAGE:
            return
        node.pages[tier][group][index] = NULL_PAGE
        self.pools[tier].drop(0, group, number)
        if tier == DISK and self.disk.dead:
            self.moves += [Delete(numbers) for numbers in self.disk.dead]
            self.disk.dead.clear()
        if tier == DEVICE and self.groups[group].window is not None:
            del self.node_of[number]
            self.loose.pop(number, None)
            self.stale.pop(number, None)

    def unset_all(self, node: Node, tier: int) -> None:
        """Lets a tier go of all pages of a node."""
        for group in range(len(self.groups)):
            for index in range(len(node.keys)):
                self.unset(node, tier, group, index)

    def root(self, space: Hashable) -> Node:
        """Returns the root of a space, new if there is none."""
        if space not in self.roots:
            self.roots[space] = Node(None, 0, [], self.no_pages(0), DEVICE, space)
        return self.roots[space]

    def new_child(self, node: Node, keys: list[bytes], pages: list[Group]) -> Node:
        """Returns a new node behind another, with a request's pages."""
        child = Node(node, 0, [], self.no_pages(0), DEVICE, used=node.used)
        self.extend(child, keys, pages)
        add_child(node, child)
        self.num_nodes += 1
        return child

    def split(self, node: Node, at: int) -> Node:
        """Cuts a node in two; returns the upper part. The lower part stays the same object."""
        self.cancel(node)
        upper = split(node, at)
        for g in self.windowed:
            for number in upper.pages[DEVICE][g]:
                if number != NULL_PAGE:
                    self.node_of[number] = upper
                    # It may stand at the end of a node now, where a match needs it.
                    if self.stale.pop(number, None) is not None:
                        self.loose[number] = (node.used, g)
        self.num_nodes += 1
        if len(self.pools) > 1:
            self.offer(upper)
        return upper

    def make_room(self, count: int, tier: int = DEVICE) -> None:
        """Empties a tier until `count` of its pages are free; OutOfPages if there are not so many.

        What is least recently used goes first, to the next tier where there is one.
        """
        pool = self.pools[tier]
        while (missing := count - pool.num_free(0)) > 0:
            if tier == DEVICE and self.stale:
                number, group = next(iter(self.stale.items()))
                self._drop_windowed(number, group)
                continue
            node = self.oldest(tier)
            loose = next(iter(self.loose.items()), None) if tier == DEVICE else None
            if loose is not None and (node is None or loose[1][0] <= node.used):
                self._drop_windowed(loose[0], loose[1][1])
            elif node is None:
                raise OutOfPages(f"asked for {count} pages, {pool.num_free(0)} are free")
            elif node.tier < tier:
                self.unset_all(node, tier)
            elif tier + 1 < len(self.pools):
                self.demote(node)
            else:
                self._trim(node, missing)

    def _drop_windowed(self, number: int, group: int) -> None:
        node = self.node_of[number]
        self.unset(node, DEVICE, group, node.pages[DEVICE][group].index(number))
        self.counts["evicted_pages"] += 1

    def oldest(self, tier: int) -> Node | None:
        """Returns the node that was not used for longest, of those that the tier may lose."""
        heap = self.leaves[tier]
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
        return not node.peers and (tier != DEVICE or self.first_idle(node) < len(node.keys))

    def first_idle(self, node: Node) -> int:
        """Returns the first page of a run that no request holds: none stands behind it."""
        return max([tip.offset for tip in node.tips], default=0)

    def offer(self, node: Node) -> None:
        """Puts a node where the tiers look for what they may lose."""
        for tier in range(node.tier, len(self.pools)):
            if not self._may_lose(node, tier):
                continue
            heap = self.leaves[tier]
            self._tie += 1
            heapq.heappush(heap, (node.used, self._tie, node))
            if len(heap) > 2 * self.num_nodes + 64:  # most of it is stale
                fresh = {
                    id(entry[2]): entry
                    for entry in heap
                    if entry[2].used == entry[0] and self._may_lose(entry[2], tier)
                }
                self.leaves[tier] = list(fresh.values())
                heapq.heapify(self.leaves[tier])

    def _trim(self, node: Node, missing: int) -> None:
        """Lets go of a leaf's last pages for good, until so many are free or the node is gone."""
        first = self.first_idle(node)
        while missing > 0 and len(node.keys) > max(first, 1):
            last = len(node.keys) - 1
            for group in range(len(self.groups)):
                missing -= node.nearest[group][last] != NULL_PAGE
                self.counts["evicted_pages"] += node.nearest[group][last] != NULL_PAGE
            self._pop(node)
        if missing > 0 and not first:
            self.counts["evicted_pages"] += sum(run[0] != NULL_PAGE for run in node.nearest)
            self.drop(node)

    def _pop(self, node: Node) -> None:
        """Takes the last page off a run of several."""
        last = len(node.keys) - 1
        for tier, runs in enumerate(node.pages):
            for group, run in enumerate(runs):
                self.unset(node, tier, group, last)
                run.pop()
        node.keys.pop()

    def drop(self, node: Node) -> None:
        """Ends a node and all behind it; its parent may be a leaf then."""
        parent = remove_child(node)
        for lost in list(walk([node])):
            assert not lost.tips, "what a request stands behind is not dropped"
            self.cancel(lost)
            for tier in range(len(self.pools)):
                self.unset_all(lost, tier)
            lost.parent = None
            self.num_nodes -= 1
        self.offer(parent)
        self.prune_root(parent)

    def prune_root(self, node: Node) -> None:
        """Ends a root that nothing is behind and nobody stands at."""
        if node.parent is None and not node.children and not node.tips:
            if self.roots.get(node.space) is node:
                del self.roots[node.space]

    def to_tier(self, node: Node, tier: int) -> None:
        """Changes a node's tier, whose pages are there already."""
        parent = node.parent
        set_tier(node, tier)
        self.offer(node)
        if parent is not None:
            self.offer(parent)

    def take(self, tier: int, group: int) -> int:
        """Returns the number of a page that a tier keeps from now on."""
        pool = self.pools[tier]
        [number] = pool.take(0, group, 1)
        pool.keep(0, group, [number])
        pool.release(0, group, [number])
        return number

    def cancel(self, node: Node) -> None:
        """Has a node that is asked for from disk go on without."""
        if node.busy > 0:
            _, slots = self.loads[node.busy]
            self.loads[node.busy] = (None, slots)
            self.set_idle(node)

    def set_idle(self, node: Node) -> None:
        """Lets a node be touched again."""
        node.busy = 0
        self.offer(node)

    def nodes(self) -> Iterator[Node]:
        """Yields every node, roots too, parents first."""
        return walk(list(self.roots.values()))

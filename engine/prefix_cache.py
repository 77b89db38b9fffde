# SPDX-License-Identifier: Apache-2.0
"""Which prefixes have their keys and values in pages, and in which tier: device, host or disk.

Prefix sharing, preemption, swapping and resumption are one mechanism here: a request that lets go
of its pages leaves them in a tree, what room is needed for moves a tier down, and one that starts
takes what the tree has of its tokens. Host only: integers and bytes. What is to be moved is written
down in `kept.moves`, in the order in which it is to be done before the next step.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from engine.kept_pages import Group, KeptPages
from engine.moves import DEVICE, DISK, TIERS
from engine.pages import NULL_PAGE, PageGroup, PagePool
from engine.radix import (
    TOKEN_BYTES,
    Found,
    Node,
    Tip,
    common_run,
    find,
    find_part,
    move_tip,
    walk,
)
from engine.tiers import Tiers

# Pages that were let go for good, or not given back by the disk; moved down into a tier, and up.
COUNTED = ("evicted_pages", "damaged_pages") + tuple(
    f"{tier}_{way}" for tier in TIERS[1:] for way in ("in_pages", "out_pages", "out_tokens")
)


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
        self.kept = KeptPages(groups, page_size, pools)
        self.tiers = Tiers(self.kept)
        self.kept.demote = self.tiers.demote

    # Matching

    def match(
        self, space: Hashable, keys: Sequence[bytes], rest: bytes, most: int, deepest: int = DISK
    ) -> Match:
        """Returns what there is of a prefix, at most `most` tokens of it. Changes nothing.

        keys: those of its whole pages; rest: the tokens behind them. `deepest`: the last tier that
        is looked at.
        """
        root = self.kept.roots.get(space)
        if root is None:
            return self.nothing()
        found = find(root, keys, rest, most, self.kept.page_size)
        near = [each for each in found.path if each[0].tier <= deepest]
        if len(near) < len(found.path) or (found.source and found.source[0].tier > deepest):
            found = Found(near, 0, None)
        pages = [
            [number for node, count in found.path for number in node.nearest[group][:count]]
            for group in range(len(self.kept.groups))
        ]
        end, cells, source = len(pages[0]), len(pages[0]) * self.kept.page_size, found.source
        if not self.kept.windowed:
            return Match(found.path, pages, cells + found.part, source)
        if source is None or not self._sees_all(pages, cells + found.part, source):
            end, source = self._longest(pages, end), None
        cells = end * self.kept.page_size + (found.part if source is not None else 0)
        for group, kind in enumerate(self.kept.groups):
            passed = min(end, kind.first_cell(cells) // self.kept.page_size)
            pages[group] = [NULL_PAGE] * passed + pages[group][passed:end]
        path = [(n, min(count, end - n.start)) for n, count in found.path if n.start < end]
        return Match(path, pages, cells, source)

    def nothing(self) -> Match:
        """Returns a match of nothing."""
        return Match([], [[] for _ in self.kept.groups], 0, None)

    def _sees_all(self, pages: list[Group], cells: int, source: tuple[Node, int]) -> bool:
        """Whether the query at `cells`, in a copy of the source, finds all that it sees."""
        node, index = source
        for g in self.kept.windowed:
            first = self.kept.groups[g].first_cell(cells) // self.kept.page_size
            if NULL_PAGE in pages[g][first:] or node.nearest[g][index] == NULL_PAGE:
                return False
        return True

    def _longest(self, pages: list[Group], last: int) -> int:
        """Returns the most whole pages, up to `last`, behind which a query finds what it sees."""
        holes, best, size = [0] * len(self.kept.windowed), 0, self.kept.page_size
        for end in range(1, last + 1):
            fits = True
            for index, g in enumerate(self.kept.windowed):
                if pages[g][end - 1] == NULL_PAGE:
                    holes[index] = end
                first = self.kept.groups[g].first_cell(end * size) // size
                fits = fits and holes[index] <= first
            best = end if fits else best
        return best

    # Requests that come and go

    def enter(self, space: Hashable, match: Match) -> Tip:
        """Returns the place of a request that starts behind `match`."""
        if match.path:
            tip = Tip(*match.path[-1])
        else:
            tip = Tip(self.kept.root(space), 0)
        assert tip.node is not None
        tip.node.tips.add(tip)
        return tip

    def stands_at(self, tip: Tip, space: Hashable, match: Match) -> bool:
        """Whether a request's place is that of one that would start behind `match`."""
        if match.path:
            return (tip.node, tip.offset) == match.path[-1]
        return tip.node is not None and tip.node is self.kept.roots.get(space)

    def pin(self, source: tuple[Node, int]) -> tuple[Tip, Group]:
        """Holds a page until `unpin`, as a request would; returns the pin and the page by group."""
        node, index = source
        tip, numbers = Tip(node, index + 1), [pages[index] for pages in node.nearest]
        node.tips.add(tip)
        for group, number in enumerate(numbers):
            self.kept.hold(group, [number])
        return tip, numbers

    def unpin(self, tip: Tip, numbers: Group) -> None:
        """Ends `pin`."""
        for group, number in enumerate(numbers):
            self.kept.let_go(group, [number])
        if tip.node is not None:
            tip.node.tips.remove(tip)
            self.kept.offer(tip.node)

    def leave(self, tip: Tip) -> None:
        """Ends a request's place. What it was behind is the most recently used now."""
        node = tip.node
        if node is None:
            return
        node.tips.remove(tip)
        if 0 < tip.offset < len(node.keys):
            node = self.kept.split(node, tip.offset)
        last = tip.tail if tip.tail is not None and tip.tail.parent is not None else node
        tip.node = tip.tail = None
        self.kept.touch(last)
        self.kept.prune_root(node)

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
                node = self.kept.split(node, offset)
            elif (child := node.children.get(keys[done])) is not None:
                if child.tier != DEVICE:
                    child = self._claim(child, keys, pages, done)
                    move_tip(tip, child, len(child.keys))
                    done += len(child.keys)
                else:
                    move_tip(tip, child, 0)
                continue
            elif node.parent is not None and not node.children:
                self.kept.extend(node, keys[done:], [own[done:] for own in pages])
                tip.offset = len(node.keys)
                break
            child = self.kept.new_child(node, keys[done:], [own[done:] for own in pages])
            move_tip(tip, child, len(child.keys))
            break
        return had

    def put_tail(self, tip: Tip, key: bytes, pages: Group) -> None:
        """Leaves a page that is not full behind `tip`, to be copied, unless one there will do."""
        self._drop_tail(tip)
        node = tip.node
        assert node is not None and 0 < len(key) < self.kept.key_bytes
        tokens, _ = find_part(node, tip.offset, key)
        if tokens == len(key) // TOKEN_BYTES or NULL_PAGE in pages:
            return
        if tip.offset < len(node.keys):
            node = self.kept.split(node, tip.offset)
        tip.tail = self.kept.new_child(node, [key], [[number] for number in pages])

    def detach(self, tip: Tip) -> None:
        """Ends a request's place without a trace: what follows is not to be kept."""
        if tip.node is not None:
            self._drop_tail(tip)
            node, tip.node = tip.node, None
            node.tips.remove(tip)
            self.kept.offer(node)
            self.kept.prune_root(node)

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
                    self.kept.keep(node, group, [own[done + index]])
        return had

    def _claim(self, node: Node, keys: list[bytes], pages: list[Group], done: int) -> Node:
        """Gives a node of a lower tier, as far as its keys match, a request's own pages."""
        count = common_run(node.keys, keys, done, len(keys))
        if count < len(node.keys):
            node = self.kept.split(node, count)
        self.kept.cancel(node)
        for group, own in enumerate(pages):
            node.pages[DEVICE][group] = own[done : done + count]
            self.kept.keep(node, group, own[done : done + count])
        self.kept.to_tier(node, DEVICE)
        return node

    def _drop_tail(self, tip: Tip) -> None:
        if tip.tail is not None and tip.tail.parent is not None:
            self.kept.drop(tip.tail)
        tip.tail = None

    def clear(self, spaces: Iterable[Hashable] | None = None) -> None:
        """Lets go of all, or of all in `spaces`; what running requests have stays theirs alone."""
        for space in list(self.kept.roots if spaces is None else spaces):
            root = self.kept.roots.get(space)
            if root is None:
                continue
            for node in walk([root]):
                for tip in node.tips:
                    tip.node = tip.tail = None
                node.tips.clear()
            for child in list(root.children.values()):
                self.kept.drop(child)
            self.kept.roots.pop(space, None)

    # Looking

    def stats(self) -> dict[str, int]:
        """Returns what was counted, and the nodes there are."""
        return {**dict.fromkeys(COUNTED, 0), **self.kept.counts, "nodes": self.kept.num_nodes}

    def check(self) -> None:
        """Raises AssertionError, in words, unless the tree and the pools agree."""
        seen: list[dict[int, int]] = [{} for _ in self.kept.pools]
        nodes = list(self.kept.nodes())
        for node in nodes:
            self._check_node(node)
            for tier, runs in enumerate(node.pages):
                for group, run in enumerate(runs):
                    for number in run:
                        if number != NULL_PAGE:
                            assert number not in seen[tier], f"{TIERS[tier]} {number} twice"
                            seen[tier][number] = group
        count = sum(node.parent is not None for node in nodes)
        assert count == self.kept.num_nodes, f"{count} nodes, counted {self.kept.num_nodes}"
        for tier, pool in enumerate(self.kept.pools):
            pool.check()
            kept = pool.kept(0)
            assert kept == seen[tier].keys(), f"{TIERS[tier]} keeps {kept}, has {seen[tier]}"
        device = self.kept.pools[DEVICE]
        loose = {
            number
            for number, group in seen[DEVICE].items()
            if self.kept.groups[group].window is not None and not device.is_held(0, number)
        }
        assert loose == self.kept.loose.keys() | self.kept.stale.keys(), "a loose page is lost"
        assert not self.kept.loose.keys() & self.kept.stale.keys()
        for tier, heap in enumerate(self.kept.leaves):
            offered = {id(node) for used, _, node in heap if node.used == used}
            tails = {id(tip.tail) for node in nodes for tip in node.tips}
            for node in nodes:
                if self.kept._may_lose(node, tier) and id(node) not in tails:
                    assert id(node) in offered, f"a node of tier {tier} is never let go"

    def _check_node(self, node: Node) -> None:
        size = len(node.keys)
        assert (node.parent is None) == (size == 0), "only roots are empty"
        assert all(len(run) == size for runs in node.pages for run in runs)
        assert sorted(node.children) == node.order
        assert node.peers == sum(child.tier == node.tier for child in node.children.values())
        short = [key for key in node.keys if len(key) < self.kept.key_bytes]
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
            full = self.kept.groups[group].window is None
            assert not full or NULL_PAGE not in run, f"group {group} has a hole"

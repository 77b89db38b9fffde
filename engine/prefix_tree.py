# SPDX-License-Identifier: Apache-2.0
"""Which prefixes have their keys and values in pages: a radix tree over page-sized runs of tokens.

Prefix sharing, preemption and resumption are one mechanism here: a request that lets go of its
pages leaves them in the tree, and one that starts takes what the tree has of its tokens. As in
RadixAttention (arXiv 2312.07104), but nodes hold whole pages, and what matches of one page more
is there to be copied. Host only: integers and bytes.
"""

import dataclasses
import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence

from engine.pages import NULL_PAGE, OutOfPages, PageGroup, PagePool

TOKEN_BYTES = 4
_STALE = -1  # the time of a page that no match at the end of its node needs


def page_key(tokens: Sequence[int]) -> bytes:
    """Returns the key of a page of these tokens."""
    return array("i", tokens).tobytes()


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A run of pages, after those of its parent.

    keys: the tokens of each page. pages: [group][page of the run], NULL_PAGE where it was let go.
    children, by their first key; `order` has those keys sorted. A short page (of fewer tokens) is
    alone in its node, which has no children.
    """

    parent: "Node | None"
    start: int  # pages before the run
    keys: list[bytes]
    pages: list[list[int]]
    space: Hashable = None  # of a root
    children: dict[bytes, "Node"] = dataclasses.field(default_factory=dict)
    order: list[bytes] = dataclasses.field(default_factory=list)
    tips: "set[Tip]" = dataclasses.field(default_factory=set)
    used: int = 0  # when a request last left it or what is behind it


@dataclasses.dataclass(slots=True, eq=False)
class Tip:
    """Where a running request stands: behind `offset` pages of `node`, or nowhere any more.

    `tail`: the short page that it left for others to copy.
    """

    node: Node | None
    offset: int
    tail: Node | None = None


@dataclasses.dataclass(slots=True)
class Match:
    """What the tree has of a request's tokens: `cells` of them.

    Behind `offset` pages of `node` (None where the tree has nothing). pages: [group][place], of
    whole pages; NULL_PAGE where no later query sees them. source: the node and index of the page
    whose first cells are those behind the whole pages, None if there is none.
    """

    node: Node | None
    offset: int
    pages: list[list[int]]
    cells: int
    source: tuple[Node, int] | None


class PrefixTree:
    """The pages that the cache keeps, by the tokens that they are a function of.

    Each `space` (a tenant, and what else pages depend on beside tokens) has a root of its own, so
    that nothing is shared between two. Layers with full attention (groups without a window) have
    every page of a node; the others lose theirs one by one, and no match ends where one is missing
    that it needs.
    Cached pages are let go when room is needed, least recently used first and leaves first, so that
    no hole is left. What a running request has is never let go.
    """

    def __init__(self, groups: Sequence[PageGroup], page_size: int, pool: PagePool) -> None:
        self._groups = tuple(groups)
        self._windowed = [g for g, group in enumerate(groups) if group.window is not None]
        self._page_size = page_size
        self._key_bytes = page_size * TOKEN_BYTES
        self._pool = pool
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._num_nodes = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (used, tie, node); may be stale
        self._tie = 0
        # Windowed pages: the node of each, and the ones nobody holds with the time of that.
        self._node_of: dict[int, Node] = {}
        self._loose: dict[int, tuple[int, int]] = {}
        self._stale: dict[int, int] = {}
        self.evicted = 0

    # Matching

    def match(self, space: Hashable, keys: Sequence[bytes], rest: bytes, most: int) -> Match:
        """Returns what is there of a prefix, at most `most` tokens of it.

        keys: those of its whole pages; rest: the tokens behind them. Changes nothing.
        """
        root = node = self._roots.get(space)
        path: list[tuple[Node, int]] = []
        place, offset, whole = 0, 0, most // self._page_size
        while node is not None and place < whole:
            child = node.children.get(keys[place])
            if child is None:
                break
            count = _common(child.keys, keys, place, whole)
            path.append((child, count))
            node, offset = child, count
            place += count
            if count < len(child.keys):
                break
        wanted = keys[place] if place < len(keys) else rest
        wanted = wanted[: (most - place * self._page_size) * TOKEN_BYTES]
        cells, source = place * self._page_size, None
        if node is not None and wanted:
            tokens, source = self._part(node, offset, wanted)
            cells += tokens
        if not self._windowed:
            pages = [_joined(path, group) for group in range(len(self._groups))]
            return Match(node, offset, pages, cells, source)
        return self._windowed_match(root, path, cells, source)

    def _part(self, node: Node, offset: int, wanted: bytes) -> tuple[int, tuple[Node, int] | None]:
        """Returns how many tokens of `wanted` a page behind the place has, and that page."""
        best, source = 0, None
        for child, index in self._next_pages(node, offset, wanted):
            tokens = common_tokens(child.keys[index], wanted)
            if tokens > best:
                best, source = tokens, (child, index)
        return best, source

    def _next_pages(self, node: Node, offset: int, wanted: bytes) -> Iterator[tuple[Node, int]]:
        """Yields (node, index) of the pages behind a place that may share most with `wanted`."""
        if offset < len(node.keys):
            yield node, offset
            return
        # In sorted order, what shares most with a key stands next to where it would.
        near = bisect_left(node.order, wanted)
        for key in node.order[max(0, near - 1) : near + 1]:
            yield node.children[key], 0

    def _windowed_match(
        self,
        root: Node | None,
        path: list[tuple[Node, int]],
        cells: int,
        source: tuple[Node, int] | None,
    ) -> Match:
        """Returns the longest match whose next query finds all that it sees."""
        pages = [_joined(path, group) for group in range(len(self._groups))]
        W, end = self._page_size, len(pages[0])
        if source is None or not self._sees_all(pages, cells, source):
            end, source = self._longest(pages, end), None
            cells = end * W
        for group, kind in enumerate(self._groups):
            passed = min(end, kind.first_cell(cells) // W)
            pages[group] = [NULL_PAGE] * passed + pages[group][passed:end]
        node, offset = root, 0
        for child, count in path:
            if child.start < end:
                node, offset = child, min(count, end - child.start)
        return Match(node, offset, pages, cells, source)

    def _sees_all(self, pages: list[list[int]], cells: int, source: tuple[Node, int]) -> bool:
        """Whether the query at `cells`, in a copy of the source, finds all that it sees."""
        node, index = source
        for g in self._windowed:
            first = self._groups[g].first_cell(cells) // self._page_size
            if NULL_PAGE in pages[g][first:] or node.pages[g][index] == NULL_PAGE:
                return False
        return True

    def _longest(self, pages: list[list[int]], last: int) -> int:
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
        node = match.node
        if node is None:
            node = self._roots.get(space)
        if node is None:
            node = self._roots[space] = Node(None, 0, [], [[] for _ in self._groups], space)
        tip = Tip(node, match.offset)
        node.tips.add(tip)
        return tip

    def pin(self, source: tuple[Node, int]) -> tuple[Tip, list[int]]:
        """Holds a page until `unpin`, as a request would; returns the pin and the page by group."""
        node, index = source
        tip, numbers = Tip(node, index + 1), [pages[index] for pages in node.pages]
        node.tips.add(tip)
        for group, number in enumerate(numbers):
            self.hold(group, [number])
        return tip, numbers

    def unpin(self, tip: Tip, numbers: Sequence[int]) -> None:
        """Ends `pin`."""
        for group, number in enumerate(numbers):
            self.let_go(group, [number])
        if tip.node is not None:
            tip.node.tips.remove(tip)
            self._push_if_leaf(tip.node)

    def hold(self, group: int, numbers: Sequence[int]) -> None:
        """Makes one more request a holder of kept pages."""
        self._pool.share(0, group, numbers)
        if self._loose or self._stale:
            for number in numbers:
                self._loose.pop(number, None)
                self._stale.pop(number, None)

    def let_go(self, group: int, numbers: Sequence[int]) -> None:
        """Takes one holder from each page."""
        cached = self._pool.release(0, group, numbers)
        window = self._groups[group].window
        if window is None:
            return
        for number in cached:
            node = self._node_of[number]
            place = node.start + node.pages[group].index(number)
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
        self._clock += 1
        above: Node | None = last
        while above is not None:
            above.used = self._clock
            above = above.parent
        self._push_if_leaf(last)
        self._prune_root(node)

    # Growing

    def insert(
        self, tip: Tip, keys: list[bytes], pages: list[list[int]]
    ) -> list[tuple[int, int, int]]:
        """Adds pages behind `tip`, which moves on.

        pages: [group][index], the request's own, NULL_PAGE where it has let go. Returns (group,
        index, number) where the tree had a page, which the request is to hold in place of its own.
        """
        self._drop_tail(tip)
        had: list[tuple[int, int, int]] = []
        done = 0
        while done < len(keys):
            node, offset = tip.node, tip.offset
            assert node is not None
            if offset < len(node.keys):
                count = _common(node.keys[offset:], keys, done, len(keys))
                if count:
                    had += self._adopt(node, offset, count, pages, done)
                    tip.offset += count
                    done += count
                    continue
                node = self._split(node, offset)
            elif child := node.children.get(keys[done]):
                self._move(tip, child, 0)
                continue
            elif node.parent is not None and not node.children:
                self._extend(node, keys[done:], [own[done:] for own in pages])
                tip.offset = len(node.keys)
                break
            child = self._add_child(node, keys[done:], [own[done:] for own in pages])
            self._move(tip, child, len(child.keys))
            break
        return had

    def put_tail(self, tip: Tip, key: bytes, pages: Sequence[int]) -> None:
        """Leaves a page that is not full behind `tip`, to be copied, unless one there will do."""
        self._drop_tail(tip)
        node = tip.node
        assert node is not None and 0 < len(key) < self._key_bytes
        tokens, _ = self._part(node, tip.offset, key)
        if tokens == len(key) // TOKEN_BYTES or NULL_PAGE in pages:
            return
        if tip.offset < len(node.keys):
            node = self._split(node, tip.offset)
        tip.tail = self._add_child(node, [key], [[number] for number in pages])

    def detach(self, tip: Tip) -> None:
        """Ends a request's place without a trace: what follows is not to be kept."""
        if tip.node is not None:
            self._drop_tail(tip)
            node, tip.node = tip.node, None
            node.tips.remove(tip)
            self._push_if_leaf(node)
            self._prune_root(node)

    def _adopt(
        self, node: Node, offset: int, count: int, pages: list[list[int]], done: int
    ) -> list[tuple[int, int, int]]:
        """Gives a run the pages that it lacks; returns those that it had, as `insert` does."""
        had = []
        for group, own in enumerate(pages):
            run = node.pages[group]
            for index in range(count):
                number = run[offset + index]
                if number != NULL_PAGE:
                    had.append((group, done + index, number))
                elif own[done + index] != NULL_PAGE:
                    run[offset + index] = own[done + index]
                    self._keep(node, group, [own[done + index]])
        return had

    def _extend(self, node: Node, keys: list[bytes], pages: list[list[int]]) -> None:
        """Adds pages to the end of a run."""
        node.keys += keys
        for group, numbers in enumerate(pages):
            node.pages[group] += numbers
            self._keep(node, group, numbers)

    def _keep(self, node: Node, group: int, numbers: list[int]) -> None:
        if self._groups[group].window is None:
            self._pool.keep(0, group, numbers)
            return
        present = [number for number in numbers if number != NULL_PAGE]
        self._pool.keep(0, group, present)
        self._node_of.update(dict.fromkeys(present, node))

    def _unset(self, node: Node, group: int, index: int) -> None:
        number = node.pages[group][index]
        if number == NULL_PAGE:
            return
        node.pages[group][index] = NULL_PAGE
        self._pool.drop(0, group, number)
        if self._groups[group].window is not None:
            del self._node_of[number]
            self._loose.pop(number, None)
            self._stale.pop(number, None)

    def _add_child(self, node: Node, keys: list[bytes], pages: list[list[int]]) -> Node:
        start = node.start + len(node.keys)
        child = Node(node, start, [], [[] for _ in pages], used=node.used)
        self._extend(child, keys, pages)
        node.children[keys[0]] = child
        insort(node.order, keys[0])
        self._num_nodes += 1
        return child

    def _drop_tail(self, tip: Tip) -> None:
        if tip.tail is not None and tip.tail.parent is not None:
            self._pop_page(tip.tail)
            self._remove(tip.tail)
        tip.tail = None

    def _move(self, tip: Tip, node: Node, offset: int) -> None:
        assert tip.node is not None
        tip.node.tips.remove(tip)
        tip.node, tip.offset = node, offset
        node.tips.add(tip)

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node in two; returns the upper part. The lower part stays the same object."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.keys)
        upper = Node(
            parent, node.start, node.keys[:at], [p[:at] for p in node.pages], used=node.used
        )
        parent.children[upper.keys[0]] = upper
        del node.keys[:at]
        for pages in node.pages:
            del pages[:at]
        node.parent, node.start = upper, node.start + at
        upper.children[node.keys[0]] = node
        upper.order.append(node.keys[0])
        for tip in [tip for tip in node.tips if tip.offset <= at]:
            self._move(tip, upper, tip.offset)
        for tip in node.tips:
            tip.offset -= at
        for g in self._windowed:
            for number in upper.pages[g]:
                if number != NULL_PAGE:
                    self._node_of[number] = upper
                    # It may stand at the end of a node now, where a match needs it.
                    if self._stale.pop(number, None) is not None:
                        self._loose[number] = (node.used, g)
        self._num_nodes += 1
        return upper

    # Eviction

    def make_room(self, count: int) -> None:
        """Lets go of cached pages until `count` are free; OutOfPages if there are not so many."""
        pool = self._pool
        while pool.num_free(0) < count:
            if self._stale:
                number, group = next(iter(self._stale.items()))
                self._drop_loose(number, group)
                continue
            leaf = self._oldest_leaf()
            loose = next(iter(self._loose.items()), None)
            if loose is not None and (leaf is None or loose[1][0] <= leaf.used):
                self._drop_loose(loose[0], loose[1][1])
            elif leaf is not None:
                self._trim(leaf, count)
            else:
                raise OutOfPages(f"asked for {count} pages, {pool.num_free(0)} are free")

    def _drop_loose(self, number: int, group: int) -> None:
        node = self._node_of[number]
        self._unset(node, group, node.pages[group].index(number))
        self.evicted += 1

    def _oldest_leaf(self) -> Node | None:
        """Returns the leaf that was not used for longest and whose last page nobody needs."""
        while self._leaves:
            used, _, node = self._leaves[0]
            if node.used == used and self._is_leaf(node) and self._is_idle(node):
                return node
            heapq.heappop(self._leaves)  # it comes back when whoever needs it leaves
        return None

    def _is_leaf(self, node: Node) -> bool:
        return node.parent is not None and not node.children

    def _is_idle(self, node: Node) -> bool:
        """Whether no request stands behind the last page of a leaf: so nobody holds it."""
        return all(tip.offset < len(node.keys) for tip in node.tips)

    def _trim(self, node: Node, count: int) -> None:
        """Lets go of a leaf's last pages, until `count` pages are free or the node is gone."""
        while node.keys and self._pool.num_free(0) < count and self._is_idle(node):
            self.evicted += self._pop_page(node)
        if not node.keys:
            self._remove(node)

    def _pop_page(self, node: Node) -> int:
        """Takes the last page off a leaf's run; returns how many groups had it."""
        last = len(node.keys) - 1
        count = sum(pages[last] != NULL_PAGE for pages in node.pages)
        for group, pages in enumerate(node.pages):
            self._unset(node, group, last)
            pages.pop()
        if last or node.parent is None:
            node.keys.pop()
        else:  # its first key names it in its parent
            key = node.keys.pop()
            del node.parent.children[key]
            del node.parent.order[bisect_left(node.parent.order, key)]
        return count

    def _remove(self, node: Node) -> None:
        """Ends a node that has lost its pages; its parent may be a leaf now."""
        parent, node.parent = node.parent, None
        assert parent is not None and not node.tips
        self._num_nodes -= 1
        self._push_if_leaf(parent)
        self._prune_root(parent)

    def _push_if_leaf(self, node: Node) -> None:
        if not self._is_leaf(node):
            return
        self._tie += 1
        heapq.heappush(self._leaves, (node.used, self._tie, node))
        if len(self._leaves) > 2 * self._num_nodes + 64:  # most of it is stale
            fresh = {id(n): (used, tie, n) for used, tie, n in self._leaves if n.used == used}
            self._leaves = list(fresh.values())
            heapq.heapify(self._leaves)

    def _prune_root(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.tips:
            if self._roots.get(node.space) is node:
                del self._roots[node.space]

    def clear(self) -> None:
        """Lets go of everything; what running requests have stays theirs and is not kept."""
        for node in list(self.nodes()):
            for tip in list(node.tips):
                tip.node = tip.tail = None
            node.tips.clear()
            for group in range(len(self._groups)):
                for index in range(len(node.keys)):
                    self._unset(node, group, index)
            node.parent = None
        self._roots.clear()
        self._leaves.clear()
        self._num_nodes = 0

    # Looking

    def nodes(self) -> Iterator[Node]:
        """Yields every node, roots too, parents first."""
        found = list(self._roots.values())
        while found:
            node = found.pop()
            yield node
            found.extend(node.children.values())

    def check(self) -> None:
        """Raises AssertionError, in words, unless the tree and the pool agree."""
        seen: dict[int, int] = {}
        count = 0
        for node in self.nodes():
            count += node.parent is not None
            self._check_node(node)
            for group, pages in enumerate(node.pages):
                for number in pages:
                    if number != NULL_PAGE:
                        assert number not in seen, f"page {number} is in the tree twice"
                        seen[number] = group
        assert count == self._num_nodes, f"{count} nodes, counted {self._num_nodes}"
        kept = {n for n, is_kept in enumerate(self._pool._kept[0]) if is_kept}
        assert kept == seen.keys(), f"the pool keeps {kept}, the tree has {seen.keys()}"
        loose = {
            number
            for number, group in seen.items()
            if self._groups[group].window is not None and not self._pool.is_held(0, number)
        }
        assert loose == self._loose.keys() | self._stale.keys(), "a loose page is lost"
        assert not self._loose.keys() & self._stale.keys()

    def _check_node(self, node: Node) -> None:
        size = len(node.keys)
        assert (node.parent is None) == (size == 0), "only roots are empty"
        assert all(len(pages) == size for pages in node.pages)
        assert sorted(node.children) == node.order
        short = [key for key in node.keys if len(key) < self._key_bytes]
        assert not short or (size == 1 and not node.children)
        for key, child in node.children.items():
            assert child.parent is node and child.keys[0] == key
            assert child.start == node.start + size
        for tip in node.tips:
            assert tip.node is node and tip.offset <= size
            assert tip.offset > 0 or node.parent is None
        for group, pages in enumerate(node.pages):
            full = self._groups[group].window is None
            assert not full or NULL_PAGE not in pages, f"group {group} has a hole"


def _common(run: list[bytes], keys: Sequence[bytes], start: int, stop: int) -> int:
    """Returns how many keys of a run are those of `keys` from `start` on, up to `stop`."""
    count = min(len(run), stop - start)
    if keys[start : start + count] == (run if count == len(run) else run[:count]):
        return count
    return next(index for index in range(count) if run[index] != keys[start + index])


def common_tokens(one: bytes, other: bytes) -> int:
    """Returns how many tokens two keys have in common at their start."""
    size = min(len(one), len(other))
    differs = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return (size - (differs.bit_length() + 7) // 8) // TOKEN_BYTES


def _joined(path: list[tuple[Node, int]], group: int) -> list[int]:
    """Returns a group's pages along a path."""
    return [number for node, count in path for number in node.pages[group][:count]]

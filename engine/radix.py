# SPDX-License-Identifier: Apache-2.0
"""A radix tree over page-sized runs of tokens: its shape, and what of it a sequence matches.

As in RadixAttention (arXiv 2312.07104), but nodes hold whole pages, and what matches of one page
more can be told, so that it may be copied. Integers and bytes; who holds pages is not known here.
"""

import dataclasses
from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence

TOKEN_BYTES = 4


def page_key(tokens: Sequence[int]) -> bytes:
    """Returns the key of a page of these tokens."""
    return array("i", tokens).tobytes()


def key_tokens(key: bytes) -> list[int]:
    """Returns the tokens of a key."""
    return array("i", key).tolist()


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A run of pages, after those of its parent.

    keys: the tokens of each page. pages: [tier][group][page of the run], 0 where the tier has none.
    tier: the nearest one, that has the run; it is none nearer than the parent's. Lower ones may
    have copies. children, by their first key; `order` has those keys sorted; `peers` of them are of
    the node's own tier. A short page (of fewer tokens) is alone in its node, without children.
    """

    parent: "Node | None"
    start: int  # pages before the run
    keys: list[bytes]
    pages: list[list[list[int]]]
    tier: int
    space: Hashable = None  # of a root
    children: dict[bytes, "Node"] = dataclasses.field(default_factory=dict)
    order: list[bytes] = dataclasses.field(default_factory=list)
    peers: int = 0
    tips: "set[Tip]" = dataclasses.field(default_factory=set)
    used: int = 0  # when a request last left it or what is behind it
    busy: int = 0  # the ticket of a load from disk; -1 while its pages are just being moved

    @property
    def nearest(self) -> list[list[int]]:
        """The pages in the node's own tier, [group][page of the run]."""
        return self.pages[self.tier]

    def path(self) -> "list[Node]":
        """Returns the nodes from the first below the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def root(self) -> "Node":
        """Returns the root above, or this node if it is one."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node


@dataclasses.dataclass(slots=True, eq=False)
class Tip:
    """Where a running request stands: behind `offset` pages of `node`, or nowhere any more.

    `tail`: the short page that it left for others to copy.
    """

    node: Node | None
    offset: int
    tail: Node | None = None


@dataclasses.dataclass(slots=True)
class Found:
    """What a sequence matches: so many pages of each node of a path, and then part of one more.

    `part`: how many tokens of the page `source` (a node and an index in it) are the next ones.
    """

    path: list[tuple[Node, int]]
    part: int
    source: tuple[Node, int] | None


def find(root: Node, keys: Sequence[bytes], rest: bytes, most: int, page_size: int) -> Found:
    """Returns what the tree has of a sequence, at most `most` tokens of it. Changes nothing.

    keys: those of its whole pages; rest: the tokens behind them.
    """
    path: list[tuple[Node, int]] = []
    node, place, offset, whole = root, 0, 0, most // page_size
    while place < whole and (child := node.children.get(keys[place])) is not None:
        count = common_run(child.keys, keys, place, whole)
        path.append((child, count))
        node, offset = child, count
        place += count
        if count < len(child.keys):
            break
    wanted = keys[place] if place < len(keys) else rest
    return Found(path, *find_part(node, offset, wanted[: (most - place * page_size) * TOKEN_BYTES]))


def find_part(node: Node, offset: int, wanted: bytes) -> tuple[int, tuple[Node, int] | None]:
    """Returns how many tokens of `wanted` a page behind a place has, and which page that is."""
    best, source = 0, None
    if wanted:
        for child, index in _next_pages(node, offset, wanted):
            tokens = common_tokens(child.keys[index], wanted)
            if tokens > best:
                best, source = tokens, (child, index)
    return best, source


def _next_pages(node: Node, offset: int, wanted: bytes) -> Iterator[tuple[Node, int]]:
    """Yields the pages behind a place that may have most of `wanted`."""
    if offset < len(node.keys):
        yield node, offset
        return
    # In sorted order, what has most in common with a key stands next to where it would.
    near = bisect_left(node.order, wanted)
    for key in node.order[max(0, near - 1) : near + 1]:
        yield node.children[key], 0


def common_run(run: list[bytes], keys: Sequence[bytes], start: int, stop: int) -> int:
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


def move_tip(tip: Tip, node: Node, offset: int) -> None:
    """Puts a tip elsewhere."""
    assert tip.node is not None
    tip.node.tips.remove(tip)
    tip.node, tip.offset = node, offset
    node.tips.add(tip)


def add_child(node: Node, child: Node) -> None:
    """Hangs a node with its keys under another."""
    child.parent, child.start = node, node.start + len(node.keys)
    node.children[child.keys[0]] = child
    insort(node.order, child.keys[0])
    node.peers += child.tier == node.tier


def remove_child(child: Node) -> Node:
    """Takes a node off its parent, which is returned."""
    parent = child.parent
    assert parent is not None
    child.parent = None
    del parent.children[child.keys[0]]
    del parent.order[bisect_left(parent.order, child.keys[0])]
    parent.peers -= child.tier == parent.tier
    return parent


def set_tier(node: Node, tier: int) -> None:
    """Changes a node's tier, and who counts as whose peer."""
    parent = node.parent
    assert parent is not None
    parent.peers += (tier == parent.tier) - (node.tier == parent.tier)
    node.tier = tier
    node.peers = sum(child.tier == tier for child in node.children.values())


def split(node: Node, at: int) -> Node:
    """Cuts a node in two; returns the upper part. The lower part stays the same object."""
    parent = node.parent
    assert parent is not None and 0 < at < len(node.keys)
    pages = [[run[:at] for run in runs] for runs in node.pages]
    upper = Node(parent, node.start, node.keys[:at], pages, node.tier, used=node.used, peers=1)
    upper.busy = node.busy
    parent.children[upper.keys[0]] = upper
    del node.keys[:at]
    for runs in node.pages:
        for run in runs:
            del run[:at]
    node.parent, node.start = upper, node.start + at
    upper.children[node.keys[0]] = node
    upper.order.append(node.keys[0])
    for tip in [tip for tip in node.tips if tip.offset <= at]:
        move_tip(tip, upper, tip.offset)
    for tip in node.tips:
        tip.offset -= at
    return upper


def join(node: Node) -> None:
    """Makes one node of a node and its only child, which are of one tier and hold no tips."""
    [child] = node.children.values()
    assert child.tier == node.tier and not node.tips and not child.tips
    node.keys += child.keys
    for runs, below in zip(node.pages, child.pages, strict=True):
        for run, more in zip(runs, below, strict=True):
            run += more
    node.children, node.order, node.peers = child.children, child.order, child.peers
    for grandchild in node.children.values():
        grandchild.parent = node
    node.used = max(node.used, child.used)
    child.parent = None
    child.keys, child.pages, child.children = [], [], {}  # who still lists it holds no memory


def walk(roots: Sequence[Node]) -> Iterator[Node]:
    """Yields the nodes of the trees, roots too, parents first."""
    found = list(roots)
    while found:
        node = found.pop()
        yield node
        found.extend(node.children.values())

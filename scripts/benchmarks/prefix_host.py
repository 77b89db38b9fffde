# SPDX-License-Identifier: Apache-2.0
"""Of the suite prefix: what the tree of prefixes costs the host, beside a plain dictionary."""

import itertools
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from engine.pages import PageGroup, PagePool
from engine.prefix_cache import PrefixCache
from engine.radix import page_key
from scripts.benchmarks.goals import WITH, WITHOUT, Goal, compare
from scripts.benchmarks.prefix_engines import page_size
from scripts.benchmarks.rounds import Figures, Run
from scripts.benchmarks.settings import Settings

PAGES = 100_000
SHARED = (0, 16, 64)  # pages that a text begins with, of one that all know
OWN = (20, 160)  # pages of its own, the least and the most
REQUESTS = 100  # of a run; each goes on from within a text, by
NEW = 40  # pages
VOCABULARY = 50_000

Keys = list[bytes]


class Texts:
    """Texts of so many pages in all, by keys, and requests that go on from them."""

    def __init__(self, size: int) -> None:
        self._size = size
        rng = random.Random(0)
        common = self.new_keys(rng, max(SHARED))
        self.all: list[Keys] = []
        left = PAGES
        while left > 0:
            own = min(left, rng.randint(*OWN))
            self.all.append(common[: rng.choice(SHARED)] + self.new_keys(rng, own))
            left -= own

    def new_keys(self, rng: random.Random, count: int) -> Keys:
        size = self._size
        return [page_key([rng.randrange(VOCABULARY) for _ in range(size)]) for _ in range(count)]

    def requests(self, seed: int) -> list[Keys]:
        """Returns the keys of new requests, each made anew as a request makes its own."""
        rng = random.Random(seed)
        return [
            [bytes(bytearray(key)) for key in text[: rng.randrange(len(text))]]
            + self.new_keys(rng, NEW)
            for text in rng.sample(self.all, min(REQUESTS, len(self.all)))
        ]


class Tree:
    """The cache as a request meets it: match, take pages, insert, leave."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool = PagePool(PAGES + 2 * NEW, 1, 1)
        self.cache = PrefixCache([PageGroup(None)], size, [self._pool])

    def run(self, keys: Keys) -> float:
        """Returns the seconds of match and insert, whoever makes room for the pages."""
        start = time.perf_counter()
        match = self.cache.match(None, keys, b"", len(keys) * self._size)
        match_s = time.perf_counter() - start
        [held] = match.pages
        tip = self.cache.enter(None, match)
        self.cache.kept.hold(0, held)
        new = keys[len(held) :]
        self.cache.kept.make_room(len(new))
        own = self._pool.take(0, 0, len(new))
        start = time.perf_counter()
        self.cache.insert(tip, new, [own])
        insert_s = time.perf_counter() - start
        self.cache.kept.let_go(0, held + own)
        self.cache.leave(tip)
        return match_s + insert_s


def measure_host(settings: Settings) -> dict[str, Any]:
    """Returns the host's time a page: match and insert, and get and set of the same keys."""
    size = page_size(settings)
    texts, tree = Texts(size), Tree(size)
    for keys in texts.all:
        tree.run(keys)
    known = {key: 0 for keys in texts.all for key in keys}
    runs: dict[str, Run] = {
        WITH: partial(run_tree, tree, texts, itertools.count(1)),
        WITHOUT: partial(run_dictionary, known, texts, itertools.count(1)),
    }
    goal = Goal("page_s", (WITH, WITHOUT), 4.0, is_least=False)
    return compare(settings, runs, [goal], 11) | {"facts": {"pages of the tree": PAGES}}


def run_tree(tree: Tree, texts: Texts, seeds: Iterator[int]) -> Figures:
    requests = texts.requests(next(seeds))
    return {"page_s": sum(map(tree.run, requests)) / sum(map(len, requests))}


def run_dictionary(known: dict[bytes, int], texts: Texts, seeds: Iterator[int]) -> Figures:
    requests = texts.requests(next(seeds))
    start = time.perf_counter()
    for keys in requests:
        for key in keys:
            known.get(key)
        for key in keys:
            known[key] = 0
    return {"page_s": (time.perf_counter() - start) / sum(map(len, requests))}

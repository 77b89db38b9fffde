# SPDX-License-Identifier: Apache-2.0
"""Hits on traces with known sharing: all there can be, and with little room at least an LRU's."""

import random

import pytest

from engine.request import Status
from scripts.benchmarks.traces import (
    Lengths,
    TracedRequest,
    chats,
    few_shot,
    most_hit_tokens,
    thoughts,
)
from tests.engine.fake_device import Harness, Setup

COUNT = 16  # requests of a trace
KINDS = {
    "system prompt": lambda rng, lengths: few_shot(rng, COUNT, 1, lengths),
    "few-shot": lambda rng, lengths: few_shot(rng, COUNT, 4, lengths),
    "chat": lambda rng, lengths: chats(rng, COUNT, 5, lengths),
    "tree of thoughts": lambda rng, lengths: thoughts(rng, COUNT, 3, lengths),
}
ANY = Lengths(shared=(20, 40), own=(1, 15), new=(1, 12))
# Of pages of up to 8 tokens, whole ones are shared.
WHOLE = Lengths(shared=(24, 24), own=(8, 8), new=(8, 8))
BUSY = [  # rows, tokens of a step, steps planned before one is read
    dict(max_num_seqs=4, budget=16, lag=1),
    dict(max_num_seqs=8, budget=64, lag=0),
    dict(max_num_seqs=32, budget=256, lag=2),
]


class Quiet(Harness):
    """A harness that looks at all pages only at the end: histories are checked elsewhere."""

    def check_state(self):
        pass


def make_trace(kind, lengths, seed):
    return KINDS[kind](random.Random(seed), lengths)


def play(trace, *, at_once=False, num_pages=4000, **options):
    """Runs a trace, one request after the other or as many at once as may; returns the harness."""
    setup = Setup(num_pages=num_pages, max_model_len=1200, prefix_cache=True, **options)
    harness, requests = Quiet(setup), {}
    left = dict(enumerate(trace))
    while left or harness.scheduler.has_work:
        for index, one in list(left.items()):
            if not at_once and harness.scheduler.has_work:
                break
            before = requests.get(one.follows)
            if one.follows is not None and (before is None or before.status != Status.FINISHED):
                continue
            start = before.prompt_token_ids + before.output_token_ids if before else []
            requests[index] = setup.request(
                len(requests), start + one.tokens, max_tokens=one.new_tokens
            )
            harness.add(requests[index])
            del left[index]
        harness.step()
    Harness.check_state(harness)
    harness.check_results()
    assert harness.scheduler.stats()["preemptions"] == 0
    return harness


def hit_tokens(harness):
    return harness.scheduler.stats()["cache"].get("hit_tokens", 0)


def texts(harness):
    return [(r.prompt_token_ids, r.output_token_ids) for r in harness.requests]


# --- enough room ---


@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_one_after_the_other_all_that_is_shared_is_a_hit(kind, page_size):
    for seed in range(2):
        harness = play(make_trace(kind, ANY, seed), page_size=page_size, budget=64)
        assert hit_tokens(harness) == most_hit_tokens(texts(harness)) > 0


@pytest.mark.parametrize("options", BUSY)
@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_at_once_all_that_is_shared_in_whole_pages_is_a_hit(kind, page_size, options):
    """Who shares a page or more with one that is being computed waits for it."""
    harness = play(make_trace(kind, WHOLE, 0), at_once=True, page_size=page_size, **options)
    assert hit_tokens(harness) == most_hit_tokens(texts(harness)) > 0


@pytest.mark.parametrize("options", BUSY)
@pytest.mark.parametrize("kind", KINDS)
def test_at_once_each_request_loses_less_than_a_page(kind, options):
    """It does not wait for less than a page, and computes that beside the other one."""
    harness = play(make_trace(kind, ANY, 0), at_once=True, page_size=8, **options)
    lost = most_hit_tokens(texts(harness)) - hit_tokens(harness)
    assert 0 <= lost <= 7 * len(harness.requests)


def test_the_most_there_can_be():
    """The last token of a prompt is computed, that of an output is not stored."""
    assert most_hit_tokens([([1, 2, 3], [4]), ([1, 2, 3], [4])]) == 2
    assert most_hit_tokens([([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6])]) == 3
    assert most_hit_tokens([([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7])]) == 4
    assert most_hit_tokens([([1, 2], [3]), ([2, 1], [3]), ([1, 3, 2], [3])]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_one_of_its_seed_and_in_order(kind):
    trace = make_trace(kind, ANY, 5)
    assert trace == make_trace(kind, ANY, 5) != make_trace(kind, ANY, 6)
    assert len(trace) == COUNT and all(1 <= one.new_tokens <= 12 for one in trace)
    assert all(one.follows is None or one.follows < index for index, one in enumerate(trace))


# --- too little room ---


class LruPages:
    """A cache of whole pages, each known by all tokens up to its end, that forgets in LRU order.

    A request touches all pages of its own text when it ends. What goes is the page that was not
    touched for longest, of those that none follows.
    """

    def __init__(self, num_pages, page_size):
        self.num_pages, self.page_size = num_pages, page_size
        self.touched = {}
        self.turn = 0

    def run(self, prompt, output):
        """Returns how many tokens of the prompt are hits."""
        stored, size = (*prompt, *output[:-1]), self.page_size
        pages = [stored[:end] for end in range(size, len(stored) + 1, size)]
        hits = 0
        while hits < (len(prompt) - 1) // size and pages[hits] in self.touched:
            hits += 1
        taken = -(-len(stored) // size) - hits
        while len(self.touched) + taken > self.num_pages:
            del self.touched[self.oldest(held=set(pages[:hits]))]
        self.turn += 1
        self.touched |= dict.fromkeys(pages, self.turn)
        return hits * size

    def oldest(self, held):
        followed = {page[: -self.page_size] for page in self.touched}
        free = [page for page in self.touched if page not in followed | held]
        return min(free, key=self.touched.__getitem__)


def compare_with_lru(trace, *, num_pages, page_size):
    """Returns the hits of ours, of the oracle and of a cache of any size.

    num_pages: those that can be used.
    """
    harness = play(trace, num_pages=num_pages + 1, page_size=page_size, budget=256, max_num_seqs=1)
    oracle = LruPages(num_pages, page_size)
    lru = sum(oracle.run(*text) for text in texts(harness))
    return hit_tokens(harness), lru, most_hit_tokens(texts(harness))


def longest(trace):
    """Returns the cells of the longest request."""
    total = []
    for one in trace:
        before = 0 if one.follows is None else total[one.follows]
        total.append(before + len(one.tokens) + one.new_tokens)
    return max(total)


@pytest.mark.parametrize(
    "kind, page_size",
    [
        ("few-shot", 1),
        ("few-shot", 4),
        ("chat", 4),
    ],
)
def test_with_little_room_there_are_as_many_hits_as_with_an_lru(kind, page_size):
    too_little = 0
    for seed in range(4):
        trace = make_trace(kind, ANY, seed)
        for more in (20, 80):
            num_pages = -(-(longest(trace) + more) // page_size)
            ours, lru, most = compare_with_lru(trace, num_pages=num_pages, page_size=page_size)
            assert lru <= ours <= most, f"seed {seed}, {num_pages} pages"
            too_little += ours < most
    assert too_little > 4


def test_what_is_whole_outlives_what_is_not():
    """Four pages: what three requests have of their own takes no room from the first one's head."""
    heads = [[10 * head + place for place in range(4)] for head in (0, 1, 2, 0)]
    trace = [TracedRequest([*head, 90 + index], 1) for index, head in enumerate(heads)]
    assert compare_with_lru(trace, num_pages=4, page_size=4) == (4, 4, 4)

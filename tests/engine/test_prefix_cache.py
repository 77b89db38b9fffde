# SPDX-License-Identifier: Apache-2.0
"""The tree of what is kept, by itself: what it costs, and what it lets go of."""

import random

import pytest

from engine.moves import DEVICE, DISK, HOST
from engine.pages import FilePool, PageGroup, PagePool
from engine.prefix_cache import PrefixCache
from engine.request import Status
from tests.engine.fake_device import VOCABULARY, Harness, Setup


def served(harness, lengths, seed=0, **fields):
    """Runs requests of random tokens one after another."""
    rng = random.Random(seed)
    for length in lengths:
        ids = [rng.randrange(VOCABULARY) for _ in range(length)]
        harness.add(harness.setup.request(len(harness.requests), ids, 2, **fields))
        harness.run()
    harness.check_results()
    return harness.scheduler.cache


def test_what_is_gone_leaves_the_heaps_too():
    """A tier that takes in more and more forgets the nodes that were joined or let go."""
    setup = Setup(num_pages=60, page_size=1, prefix_cache=True, host_pages=4000)
    cache = served(Harness(setup), [50] * 60)
    for heap in cache.kept.leaves:
        assert len(heap) <= 2 * cache.kept.num_nodes + 64
        listed = {id(node): len(node.keys) for _, _, node in heap}
        assert sum(listed.values()) <= 60 * 52, "more than there ever was"
    harness = Harness(Setup(num_pages=400, page_size=1, prefix_cache=True))
    for _ in range(4):
        cache = served(harness, [9] * 40)
        cache.clear()
    assert cache.kept.num_nodes == 0 and len(cache.kept.leaves[DEVICE]) <= 64 + 40


def test_clearing_one_space_leaves_the_others():
    harness = Harness(Setup(num_pages=60, prefix_cache=True))
    for space in ("a", "b"):
        served(harness, [20], space=space)
    cache, scheduler = harness.scheduler.cache, harness.scheduler
    cache.clear(["a", "nobody's"])
    cache.check()
    one, two = (
        harness.setup.request(9, harness.requests[i].prompt_token_ids, space=s)
        for i, s in enumerate("ab")
    )
    assert scheduler._reuse.cells(one) == 0 and scheduler._reuse.cells(two) == 19


@pytest.mark.parametrize("groups", [(PageGroup(),), (PageGroup(), PageGroup(8))])
@pytest.mark.parametrize("length", [50, 100, 200])
def test_who_is_preempted_has_its_last_pages_parked(length, groups):
    """Up to 64, whatever the runs of the tree; those before them stay on the device."""
    options = {"num_pages": 500, "max_model_len": 256, "host_pages": 400, "preemption": "park"}
    setup = Setup(groups=groups, page_size=1, max_num_seqs=2, prefix_cache=True, **options)
    harness, scheduler = Harness(setup), None
    harness.add(setup.request(0, [i % VOCABULARY for i in range(length)], 20))
    [request] = harness.requests
    scheduler = harness.scheduler
    while request.stored < length:
        harness.step()
    rows = scheduler._rows
    rows.close(request, 64)
    parked = scheduler.stats()["cache"]["host_in_pages"]
    scheduler.cache.check()
    assert 50 <= parked <= 64 if length == 50 else parked > 64 - len(groups)
    last = max(scheduler.cache.kept.nodes(), key=lambda node: node.start + len(node.keys))
    assert all(last.pages[HOST][0]) and all(last.pages[DEVICE][0])


def test_a_text_that_ends_late_may_cut_off_what_was_stored():
    """Of a fork, whose tokens so far ran as its prompt's do; a stop text then takes some back."""
    setup = Setup(num_pages=60, max_num_seqs=2, budget=32, prefix_cache=True)
    harness = Harness(setup)
    request = setup.request(0, list(range(1, 8)), 20)
    request.output_token_ids = [1, 2, 3, 4, 5, 6, 7]
    harness.add(request)
    while not request.target or request.stored < request.target:
        harness.step()
    del request.output_token_ids[3:]
    harness.scheduler.finish(request, "stop", "x")
    harness.check_state()
    other = setup.request(1, [*range(1, 8), 1, 2, 3, 9])
    assert harness.scheduler._reuse.cells(other) >= 8


def test_no_segment_is_without_pages():
    """Where all layers have windows, all of a run's pages may have been let go."""
    setup = Setup(groups=(PageGroup(4),), num_pages=14, page_size=2, prefix_cache=True)
    harness, rng = Harness(setup), random.Random(1)
    base, seen = [rng.randrange(VOCABULARY) for _ in range(40)], 0
    for number in range(60):
        ids = base[: rng.randint(3, 30)] + [rng.randrange(VOCABULARY) for _ in range(5)]
        harness.add(setup.request(number, ids, 2))
        harness.run()
        nodes = [node for node in harness.scheduler.cache.kept.nodes() if node.parent is not None]
        seen += sum(not any(map(any, node.nearest)) for node in nodes)
        assert all(save.entries for save in harness.scheduler.cache.tiers.saves())
    assert seen, "the trial has no such run"
    pools = PagePool(20, 1, 1), PagePool(20, 1, 1), FilePool(20, 1)
    cache = PrefixCache((PageGroup(4),), 4, pools)
    assert cache.tiers.add_saved(DISK, ("s", ()), bytes(16), 0, [4], []) is None


def test_a_scheduler_carries_on_from_one_before():
    harness = Harness(Setup(num_pages=20, prefix_cache=True))
    served(harness, [20, 20, 30, 9])
    harness.scheduler.set_policy("priority")
    before = harness.scheduler.stats()
    after = harness.setup.scheduler()
    after.carry_on(harness.scheduler)
    now = after.stats()
    assert after._policy == after._waiting._policy == "priority"
    assert now["steps"] == before["steps"] > 0 and before["cache"]["evicted_pages"] > 0
    assert now["cache"] == before["cache"] | {"nodes": 0}


def test_who_waits_costs_nothing_while_no_row_is_free(monkeypatch):
    """And of many that lack pages, only some are looked up in a step, each of them in turn."""
    options = {"num_pages": 60, "max_model_len": 128, "policy": "longest_prefix"}
    setup = Setup(max_num_seqs=1, prefix_cache=True, patience=1 << 20, **options)
    harness = Harness(setup)
    looked_up = []
    match = harness.scheduler._rows.match

    def watched(request, *rest):
        looked_up.append(request.id)
        return match(request, *rest)

    for number in range(20):
        harness.add(setup.request(number, [number % VOCABULARY] * 9, 20))
    harness.step()
    monkeypatch.setattr(harness.scheduler._rows, "match", watched)
    for _ in range(5):
        harness.step()
    assert not looked_up
    setup = Setup(max_num_seqs=64, budget=64, prefix_cache=True, patience=1 << 20, num_pages=12)
    harness = Harness(setup)
    for number in range(60):
        harness.add(setup.request(number, [number % VOCABULARY] * 30, 20))
    harness.step()
    match = harness.scheduler._rows.match
    monkeypatch.setattr(harness.scheduler._rows, "match", watched)
    for _ in range(16):
        looked_up.clear()
        harness.step()
        running = sum(request.status is Status.RUNNING for request in harness.requests)
        assert len(looked_up) <= 8 + 60 // 8 + 1 + running
    harness.run()
    harness.check_results()

# SPDX-License-Identifier: Apache-2.0
"""Every page is in exactly one state, whatever is called."""

import random

import pytest

from engine.pages import HOT, NULL_PAGE, Handle, OutOfPages, PageGroup, PagePool


@pytest.mark.parametrize("seed", range(10))
def test_pool_stays_consistent_under_any_sequence_of_calls(seed):
    rng = random.Random(seed)
    partitions, groups = rng.randint(1, 3), rng.randint(1, 3)
    pool = PagePool(rng.randint(2, 20), partitions, groups)
    held = []  # (partition, group, number)
    for _ in range(300):
        partition, group = rng.randrange(partitions), rng.randrange(groups)
        want = rng.randint(0, 4)
        if rng.random() < 0.5 and want <= pool.num_free(partition):
            held += [(partition, group, n) for n in pool.take(partition, group, want)]
        elif held:
            pool.release(*(key := held.pop(rng.randrange(len(held))))[:2], [key[2]])
        pool.check()
        assert sorted(pool.held()) == sorted(Handle(p, g, HOT, n) for p, g, n in held)
        for p in range(partitions):
            counts = [pool.counts(p, g) for g in range(groups)]
            assert counts[0].free + sum(c.held + c.cached for c in counts) + 1 == pool.num_pages


def test_taking_too_many_takes_none_and_says_how_many_there_are():
    pool = PagePool(5)
    pool.take(0, 0, 1)
    with pytest.raises(OutOfPages, match="asked for 4 pages of partition 0, 3 of 4 are free"):
        pool.take(0, 0, 4)
    assert pool.counts(0, 0) == (3, 1, 0)
    assert NULL_PAGE not in pool.take(0, 0, 3)
    pool.check()


def test_a_page_is_released_once_and_by_its_holder():
    pool = PagePool(5, num_groups=2)
    (page,) = pool.take(0, 1, 1)
    with pytest.raises(ValueError, match=f"page {page} of partition 0 is not held by group 0"):
        pool.release(0, 0, [page])
    pool.release(0, 1, [page])
    with pytest.raises(ValueError, match="release a page once"):
        pool.release(0, 1, [page])
    with pytest.raises(ValueError, match="page 0 .* is not held"):
        pool.release(0, 1, [NULL_PAGE])
    pool.check()


def test_check_notices_a_lost_page():
    pool = PagePool(5)
    pool._free[0].pop()
    with pytest.raises(AssertionError, match="partition 0 accounts for 4 of 5 pages"):
        pool.check()


def test_a_pool_needs_a_page_beside_the_null_page():
    with pytest.raises(ValueError, match="num_pages=1 leaves no page"):
        PagePool(1)


def test_a_window_counts_the_current_token():
    assert [PageGroup(1).first_cell(q) for q in (0, 1, 5)] == [0, 1, 5]
    assert [PageGroup(4).first_cell(q) for q in (0, 3, 4, 9)] == [0, 0, 1, 6]
    assert PageGroup(None).first_cell(99) == 0
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        PageGroup(0)

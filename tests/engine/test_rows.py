# SPDX-License-Identifier: Apache-2.0
"""The page arithmetic of rows against counting them one by one."""

import random

import numpy as np
import pytest

from engine.pages import NULL_PAGE, PageGroup, PagePool
from engine.rows import Rows
from tests.engine.fake_device import Setup

WINDOWS = [1, 2, 3, 4, 5, 8, 9, 13]


def make_rows(groups, page_size, num_pages=999, step_tokens=16):
    pool = PagePool(num_pages, 1, len(groups))
    rows = Rows(
        num_rows=2,
        max_num_seqs=2,
        page_size=page_size,
        max_model_len=64,
        step_tokens=step_tokens,
        groups=groups,
        pool=pool,
    )
    return rows, pool


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_least_pages_are_those_of_a_request_that_stores_one_cell_a_step(window, page_size):
    for groups in [(PageGroup(window),), (PageGroup(None), PageGroup(window))]:
        rows, _ = make_rows(groups, page_size)
        setup = Setup(groups=groups, page_size=page_size)
        for cells in range(1, 65):
            assert rows.least_pages(cells) == setup.least_pages(cells)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_step_pages_bound_what_any_chunks_hold_and_narrow_steps_hold_the_least(window, page_size):
    groups = (PageGroup(None), PageGroup(window))
    rng = random.Random(window)
    for narrow in (False, True):
        rows, pool = make_rows(groups, page_size)
        bound = rows.least_pages if narrow else rows.step_pages
        request = Setup().request(0, [1] * 60, 0)
        rows.open(request, rows.match(request, 0))
        while request.computed < 60:
            rows.drop_passed(request)
            stop = request.computed + rng.randint(1, 16)
            stop = min(stop, 60, rows.page_end(request.computed) if narrow else 60)
            rows.extend(request, stop)
            request.computed = stop
            assert sum(1 for _ in pool.held()) <= bound(stop)
            pool.check()


def test_rows_show_the_device_what_they_hold_and_nothing_after():
    rows, pool = make_rows((PageGroup(None), PageGroup(5)), page_size=4)
    request = Setup().request(0, [1] * 20, 0)
    rows.open(request, rows.match(request, 0))
    assert rows.missing_pages(request, 13) == 8
    rows.extend(request, 13)
    assert rows.missing_pages(request, 16) == 0
    request.computed = 13
    rows.set_lengths(request)
    rows.drop_passed(request)
    row = request.row
    assert rows.tables[0, row, :4].all() and not rows.tables[0, row, 4:].any()
    # The next query, at 13, sees cells 9 to 13: pages 2 and 3.
    assert (rows.tables[1, row, :4] == NULL_PAGE).tolist() == [True, True, False, False]
    assert rows.lengths[:, row].tolist() == [13, 13]
    assert [pool.counts(0, group).held for group in (0, 1)] == [4, 2]
    rows.close(request)
    assert not rows.tables.any() and not rows.lengths.any() and not list(pool.held())
    assert rows.tables.dtype == rows.lengths.dtype == np.int32
    assert rows.tables.shape == (2, 3, 16) and rows.lengths.shape == (2, 3)

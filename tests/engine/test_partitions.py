# SPDX-License-Identifier: Apache-2.0
"""Several schedulers under one body a step: who gets a request, and who has the step."""

import pytest

from engine.buckets import Group, Ladder
from engine.pages import PageGroup, PagePool
from engine.params import SamplingParams
from engine.partitions import Partitions
from engine.request import Request
from engine.scheduler import Scheduler
from engine.waiting import Admission, QueueFull

PAGE, ROWS, LENGTH = 8, 2, 4096


def partitions(count=2, budget=64, rows=ROWS, ring=0, multiple=1, **admission):
    ladder = Ladder(rows, budget, ring=ring, multiple=multiple)
    parts = [
        Scheduler(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            page_size=PAGE,
            max_model_len=LENGTH,
            groups=(PageGroup(None),),
            pool=PagePool(1200, 1, 1),
            ladder=ladder,
            admission=Admission(**admission),
            prefix_cache=True,
        )
        for _ in range(count)
    ]
    return Partitions(parts, ladder)


def add(parts, number, length, most=4, first=1):
    params = SamplingParams(max_tokens=most, temperature=0)
    tokens = [first, *(100 * number + 2 + n % 90 for n in range(length - 1))]
    return put(parts, number, tokens, params)


def put(parts, number, tokens, params):
    request = Request(
        id=number,
        prompt_token_ids=list(tokens),
        params=params,
        seed=0,
        end_ids=(),
        limit=len(tokens) + params.max_tokens,
    )
    parts.add(request)
    return request


def run(parts, most=10_000):
    """Runs all that is there; returns the steps."""
    steps = []
    while len(steps) < most and (step := parts.schedule()) is not None:
        steps.append(step)
        for p, plan in step.some:
            for request, _ in parts.parts[p].update(plan, [7] * len(plan.sampled)):
                if request.finish_reason is not None:
                    parts.forget(request)
    return steps


def test_requests_go_to_the_partition_with_fewest():
    parts = partitions()
    for number in range(4):
        add(parts, number, 20)
    assert [part.num_requests for part in parts.parts] == [2, 2]
    run(parts)
    assert not parts._home and [part.num_requests for part in parts.parts] == [0, 0]


def test_a_token_that_all_begin_with_decides_nothing():
    parts = partitions()
    add(parts, 0, 20)
    run(parts)
    for number in range(1, 5):
        add(parts, number, 20)
    assert [part.num_requests for part in parts.parts] == [2, 2]


def test_a_page_that_is_kept_decides_while_there_is_a_row():
    parts = partitions()
    first = add(parts, 0, 40)
    run(parts)
    for number in range(1, 4):
        put(parts, number, first.prompt_token_ids, first.params)
    assert [part.num_requests for part in parts.parts] == [2, 1]


def test_the_queue_is_that_of_all_partitions():
    parts = partitions(max_num_waiting=2)
    for number in range(2):
        add(parts, number, 20)
    with pytest.raises(QueueFull, match="2 requests wait already"):
        add(parts, 2, 20)
    assert parts.stats()["refused"] == 1


def test_a_long_prompt_and_the_pieces_of_others_have_the_steps_in_turn():
    parts = partitions(ring=64, rows=16)
    long = add(parts, 0, 1024, most=1)
    others = [add(parts, number, 20, most=1) for number in range(1, 30, 2)]
    steps = run(parts, 6)
    rings = [step.body[0].kind == "ring" for step in steps]
    assert rings == [True, False, True, False, True, True]
    assert long.finish_reason is None
    assert sum(request.finish_reason is not None for request in others) == 8
    run(parts)
    assert all(request.finish_reason == "length" for request in (long, *others))


@pytest.mark.parametrize("decoding", [0, 1, 2])
def test_rings_go_on_beside_decodes(decoding):
    """A piece as long as the budget begins and ends where pages do, whatever decodes."""
    parts = partitions(count=1, ring=64, rows=4)
    for number in range(decoding):
        add(parts, number, 10, most=200)
    run(parts, 3)
    add(parts, 10, 1024, most=1)
    pieces = [piece for step in run(parts, 20) for _, plan in step.some for piece in plan.pieces]
    rings = [piece for piece in pieces if piece.stop - piece.start > 32]
    assert sum(piece.stop - piece.start for piece in rings) >= 0.9 * 1024


@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("budget", [32, 64, 100, 200, 512])
@pytest.mark.parametrize("rows", [1, 2, 5, 32])
def test_only_wide_pieces_take_a_ring(rows, budget, multiple):
    ring = budget // 16 * 16
    ladder = Ladder(rows, budget, ring=ring, multiple=multiple)
    for decodes in range(ladder.rows + 1):
        for pieces in range(1, ladder.pieces + 1):
            body = ladder.choose(decodes, pieces, ladder.width)
            assert "ring" not in {group.kind for group in body}
        if ring > ladder.width:
            assert ladder.choose(decodes, 1, ring)[0] == Group("ring", 1, ring)
    for body in ladder.bodies:
        assert all(group.rows % multiple == 0 for group in body if group.kind != "ring")

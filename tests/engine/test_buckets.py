# SPDX-License-Identifier: Apache-2.0
"""Few programs, and always one that is large enough."""

import pytest

from engine.buckets import MAX_BODIES, MAX_HEADS, Group, Ladder

SEQS = [1, 2, 3, 4, 5, 7, 8, 15, 16, 24, 31, 32, 33, 48, 64, 100, 128, 256, 1000]
BUDGETS = [1, 2, 3, 5, 7, 8, 13, 16, 17, 32, 63, 64, 65, 100, 128, 500, 512, 2048, 8192]


def size(body):
    return sum(group.rows * group.width for group in body)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("seqs", SEQS)
def test_every_step_has_a_body_and_programs_are_few(seqs, budget):
    ladder = Ladder(seqs, budget)
    assert len(ladder.bodies) == len(set(ladder.bodies)) <= MAX_BODIES
    heads = ladder.heads()
    assert len(heads) == len(set(heads)) <= MAX_HEADS
    assert ladder.rows == max(head.rows for head in heads if head.kind == "greedy")
    assert ladder.pieces * ladder.width >= budget, "a step can use the whole budget"
    for decodes in {0, 1, ladder.rows // 2, ladder.rows}:
        for pieces in {0, 1, ladder.pieces // 2, ladder.pieces}:
            for widest in {1, ladder.width} if pieces else {0}:
                if not decodes and not pieces:
                    continue
                body = ladder.choose(decodes, pieces, widest)
                kinds = {group.kind: group for group in body}
                assert not decodes or kinds["decode"].rows >= decodes
                assert not pieces or kinds["chunk"].rows >= pieces
                assert not pieces or kinds["chunk"].width >= widest


def test_the_default_ladder():
    ladder = Ladder(32, 512)
    rows = [body[0].rows for body in ladder.bodies if body[0].kind == "decode"]
    assert rows == [1, 2, 4, 8, 16, 32]
    chunks = [body[0][1:] for body in ladder.bodies if len(body) == 1 and body[0].kind == "chunk"]
    assert chunks == [(1, 16), (1, 32), (2, 32), (4, 32)]
    mixed = [(body[0].rows, body[1].rows) for body in ladder.bodies if len(body) == 2]
    assert mixed == [(2, 8), (8, 8), (16, 8), (2, 32), (8, 32), (16, 32)]
    assert [(head.kind, head.rows) for head in ladder.heads()] == [
        *(("greedy", rows) for rows in (1, 8, 32)),
        *(("sample", rows) for rows in (8, 32)),
        *(("logprobs", rows) for rows in (8, 32)),
        ("score", 64),
    ]


@pytest.mark.parametrize("seqs", SEQS)
def test_decode_rows_hold_one_and_all_and_are_at_most_six(seqs):
    ladder = Ladder(seqs, 8192)
    rows = [body[0].rows for body in ladder.bodies if body[0].kind == "decode"]
    assert rows == sorted(rows) and rows[0] == 1 and rows[-1] == seqs and len(rows) <= 6


def test_the_largest_chunks_run_alone_where_there_is_room():
    bodies = Ladder(2, 64).bodies
    assert (Group("chunk", 2, 32),) in bodies and (Group("chunk", 1, 32),) in bodies


def test_short_prompts_share_a_step_under_a_small_budget():
    assert Ladder(32, 7).pieces == 4
    assert Ladder(2, 7).pieces == 2
    assert Ladder(32, 1).pieces == 1


def test_the_smallest_body_is_chosen():
    ladder = Ladder(32, 512)
    assert ladder.choose(3, 0, 0) == (Group("decode", 4, 1),)
    assert ladder.choose(0, 1, 16) == (Group("chunk", 1, 16),)
    assert ladder.choose(0, 2, 17) == (Group("chunk", 2, 32),)
    assert ladder.choose(0, 5, 32) == (Group("chunk", 8, 32), Group("decode", 8, 1))
    assert ladder.choose(1, 1, 3) == (Group("chunk", 2, 32), Group("decode", 8, 1))
    for decodes in range(33):
        for pieces in range(17):
            if decodes or pieces:
                body = ladder.choose(decodes, pieces, 32 if pieces else 0)
                more = ladder.choose(32, max(pieces, 1), 32)
                assert size(body) <= size(more)


def test_a_step_outside_the_limits_is_refused_with_the_limits():
    with pytest.raises(ValueError, match="no body for 5 decodes .* at most 4 decodes and 4 piec"):
        Ladder(4, 16).choose(5, 0, 0)
    with pytest.raises(ValueError, match="pieces of up to 17 tokens"):
        Ladder(4, 16).choose(0, 1, 17)

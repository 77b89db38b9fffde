# SPDX-License-Identifier: Apache-2.0
"""The engine's modes: deterministic to the bit, several steps in one dispatch, strict."""

import logging

import jax
import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine import deterministic as deterministic_module
from engine.strict import StrictError, no_compilation, no_warnings
from tests.engine.conftest import engine_on, greedy, make_prompts, run, watch_plans
from tests.fixtures import byte_tokenizer, write_tiny

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_pages": 80}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), tokenizer=byte_tokenizer()))


@pytest.fixture(scope="module")
def pinned(own_cache, folder):
    return LLM(folder, deterministic=True, **SMALL)


def bits(output):
    completion = output.outputs[0]
    ids, entries = completion.token_ids, completion.logprobs
    values = [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]
    return completion.token_ids, values


def jobs_of(rng, count, **fields):
    prompts = make_prompts(rng, count, 1, 90)
    return [
        (p, SamplingParams(seed=i, max_tokens=20, logprobs=0, ignore_eos=True, **fields))
        for i, p in enumerate(prompts)
    ]


@pytest.mark.optimized
def test_deterministic_is_bitwise_in_any_company(pinned):
    jobs = jobs_of(np.random.default_rng(0), 20)
    alone = [bits(run(pinned, engine_on(pinned), [job])[0]) for job in jobs]
    for order in (range(20), reversed(range(20)), np.random.default_rng(1).permutation(20)):
        order = list(order)
        outputs = run(pinned, engine_on(pinned), [jobs[i] for i in order])
        assert [bits(output) for output in outputs] == [alone[i] for i in order]


@pytest.mark.optimized
def test_deterministic_is_bitwise_through_preemption_and_without_overlap(pinned):
    jobs = jobs_of(np.random.default_rng(2), 10)
    alone = [bits(run(pinned, engine_on(pinned), [job])[0]) for job in jobs]
    for pages, overlap in ((12, True), (12, False), (30, True)):
        engine = engine_on(pinned, num_pages=pages, overlap=overlap)
        assert [bits(output) for output in run(pinned, engine, jobs)] == alone
        assert engine.stats()["preemptions"] > 0 or pages == 30


def test_deterministic_never_mixes_and_ends_chunks_at_the_width(pinned):
    engine = engine_on(pinned)
    plans = watch_plans(engine)
    run(pinned, engine, jobs_of(np.random.default_rng(3), 12))
    assert len({plan.body for plan in plans}) == 2
    width = pinned.built.ladder.width
    for plan in plans:
        assert not (plan.pieces and plan.decodes)
        for piece in plan.pieces:
            assert piece.start % width == 0
            assert piece.stop % width == 0 or piece.stop == piece.request.target


def test_a_platform_that_does_not_keep_it_is_refused(pinned, folder, monkeypatch):
    results = iter(range(100))

    def drifting(engine, prompts, order, space):
        return {index: next(results) for index in order}

    monkeypatch.setattr(deterministic_module, "_run", drifting)
    with pytest.raises(ValueError, match="deterministic=True: on .* a row's numbers depend on"):
        LLM(folder, deterministic=True, **SMALL)


@pytest.mark.parametrize("name, value", [("decode_steps", 2), ("batching", "static")])
def test_what_does_not_go_with_deterministic_is_refused(folder, name, value):
    with pytest.raises(ValueError, match=f"{name}=.*deterministic=True"):
        LLM(folder, deterministic=True, **{name: value})


@pytest.fixture(scope="module")
def stepping(own_cache, folder):
    return LLM(folder, decode_steps=4, **SMALL)


def test_several_steps_in_one_dispatch_say_the_same(stepping, tiny):
    rng = np.random.default_rng(4)
    prompts = make_prompts(rng, 12, 1, 60)
    params = [
        SamplingParams(seed=i, max_tokens=n, temperature=i % 2, **fields)
        for i, (n, fields) in enumerate(
            zip(
                [1, 2, 3, 4, 5, 8, 9, 20, 30, 40, 41, 42],
                [{}, {"presence_penalty": 1.0}, {"top_p": 0.8}, {"min_tokens": 3}] * 3,
                strict=True,
            )
        )
    ]
    want = tiny.generate(prompts, params)
    got = stepping.generate(prompts, params)
    for a, b in zip(got, want, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason


def test_several_steps_are_taken_only_where_nothing_can_change_the_plan(stepping):
    engine = engine_on(stepping)
    plans = watch_plans(engine)
    for fields, repeats in (
        ({}, True),
        ({"stop": ["zzz"]}, False),
        ({"logprobs": 1}, False),
        ({"presence_penalty": 0.5}, True),
    ):
        plans.clear()
        run(stepping, engine, [([5, 6, 7], greedy(21, **fields))])
        taken = [plan.repeat for plan in plans]
        assert (max(taken) == 4) == repeats, fields
        assert sum(taken) == 21, "one from the prompt, twenty after it"
    pages = engine.stats()["pages"][0]
    assert pages["held"] == 0


def test_strict_mode_lets_no_warning_and_no_compilation_pass(folder, caplog):
    with pytest.raises(StrictError, match="strict: it is odd"), no_warnings(True):
        logging.getLogger("headrace").warning("it is %s", "odd")
    with no_warnings(False):
        logging.getLogger("headrace").warning("it is odd")
    llm = LLM(folder, strict=True, **SMALL)
    llm.generate(["the mill"], greedy(4))
    counter = llm.engine._counter
    with pytest.raises(StrictError, match="1 programs were compiled in a step"):
        with no_compilation(counter):
            jax.jit(lambda x: x * 3.25)(np.float32(1))


def test_a_strict_engine_notices_a_step_that_compiles(folder):
    llm = LLM(folder, strict=True, **SMALL)
    real = llm.engine._dispatch

    def compiling(plan):
        jax.jit(lambda x: x * 4.5)(np.float32(1))
        return real(plan)

    llm.engine._dispatch = compiling
    with pytest.raises(StrictError, match="compiled in a step"):
        llm.generate(["the mill"], greedy(4))

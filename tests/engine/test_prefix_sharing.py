# SPDX-License-Identifier: Apache-2.0
"""What is kept of requests serves others on the real engine: nothing changes but the work."""

import random

import pytest

from engine import SamplingParams
from tests.engine.conftest import engine_on, greedy, run

PAGE = 16


def prompts_of(seed, count, longest=70):
    """Returns prompts that begin alike, and then differ."""
    rng = random.Random(seed)
    base = [rng.randrange(300) for _ in range(longest)]
    return [
        base[: rng.randrange(longest)] + [rng.randrange(300) for _ in range(rng.randrange(1, 20))]
        for _ in range(count)
    ]


def checked(engine):
    engine.scheduler.cache.check()


def cached(outputs):
    return [output.metrics.cached_tokens for output in outputs]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


PARAMS = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"logprobs": 3, "temperature": 0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 5},
    {"prompt_logprobs": 1, "temperature": 0},
    {"stop": "e", "seed": 1},
]


@pytest.mark.parametrize(("pages", "budget"), [(None, None), (40, 16), (20, 7)])
def test_outputs_are_those_without_a_cache(tiny, pages, budget):
    rng = random.Random(7)
    jobs = [
        (prompt, SamplingParams(max_tokens=rng.randrange(1, 30), ignore_eos=True, **fields))
        for prompt, fields in zip(prompts_of(0, 24), PARAMS * 4, strict=True)
    ]
    jobs = [(p, s) if s.seed is not None else (p, greedy(s.max_tokens)) for p, s in jobs]
    plain = run(tiny, engine_on(tiny), jobs)
    engine = engine_on(tiny, prefix_cache=True, num_pages=pages, budget=budget)
    for _ in range(2):
        outputs = run(tiny, engine, jobs, check=checked)
        assert tokens(outputs) == tokens(plain)
        assert sum(cached(outputs)) > 300
    assert engine.scheduler.stats()["cache"]["copied_pages"] > 0


def test_a_prompt_that_is_kept_computes_its_last_token_only(tiny):
    engine = engine_on(tiny, prefix_cache=True)
    for length in (1, 2, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 3):
        prompt = list(range(100, 100 + length))
        for most in (1, 5):
            first = run(tiny, engine, [(prompt, greedy(most))])
            again = run(tiny, engine, [(prompt, greedy(most))])
            assert cached(again) == [length - 1]
            assert tokens(again) == tokens(first)
        [other] = run(tiny, engine, [([*prompt[:-1], 7], greedy(1))])
        assert other.metrics.cached_tokens == length - 1


def test_siblings_in_flight_share_what_the_first_computes(tiny):
    prefix = list(range(60, 113))
    jobs = [([*prefix, token], greedy(4)) for token in range(10)]
    engine = engine_on(tiny, prefix_cache=True)
    outputs = run(tiny, engine, jobs, check=checked)
    assert cached(outputs) == [0] + [len(prefix)] * 9
    assert tokens(outputs) == tokens(run(tiny, engine_on(tiny), jobs))


def test_several_outputs_of_a_prompt_share_all_of_it(tiny):
    prompt = list(range(50, 103))
    params = SamplingParams(n=4, max_tokens=6, seed=1, ignore_eos=True)
    tiny.cache.clear()
    before = tiny.cache.stats()
    [output] = tiny.generate([prompt], params)
    after = tiny.cache.stats()
    assert len({tuple(one.token_ids) for one in output.outputs}) == 4
    assert after["hit_tokens"] - before.get("hit_tokens", 0) == 3 * (len(prompt) - 1)


def test_a_salt_keeps_tenants_apart(tiny):
    prompt = list(range(40, 104))
    engine = engine_on(tiny, prefix_cache=True)

    def hit(ids, salt):
        params = SamplingParams(temperature=0, max_tokens=2, cache_salt=salt)
        [output] = run(tiny, engine, [(ids, params)])
        return output.metrics.cached_tokens

    assert [hit(prompt, salt) for salt in ("a", "a", "b", None, "b")] == [0, 63, 0, 0, 63]
    assert hit([99, *prompt[:20]], "ab") == 0
    assert hit([98, 99, *prompt[:20]], "a") == 0  # a salt is no part of the tokens


def test_scores_of_kept_prompts_are_whole(tiny):
    """CASES S-10: positions that are kept have no logits, so they are computed again."""
    prompt = list(range(20, 20 + 5 * PAGE + 3))
    want = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    [alone] = run(tiny, engine_on(tiny), [(prompt, want)])
    engine = engine_on(tiny, prefix_cache=True, budget=7)
    run(tiny, engine, [(prompt, greedy(1))])
    for _ in range(2):
        [output] = run(tiny, engine, [(prompt, want)])
        assert len(output.prompt_logprobs) == len(prompt)
        for one, other in zip(output.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
            assert one.keys() == other.keys()
            assert all(abs(one[t].logprob - other[t].logprob) < 1e-4 for t in one)


def test_a_fork_goes_on_from_where_a_request_is(tiny):
    engine = engine_on(tiny, prefix_cache=True)
    prompt = list(range(30, 63))
    request, _ = tiny.make_request(prompt, greedy(24))
    engine.add_request(request)
    while len(request.output_token_ids) < 9:
        engine.step()
    held = engine.scheduler.stats()["pages"][0]["held"]
    fork = engine.fork(request.id)
    outputs = {}
    engine.step()
    engine.step()
    assert engine.scheduler.stats()["pages"][0]["held"] == held + 1  # the page it writes to
    while engine.has_work:
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        checked(engine)
    assert outputs[fork].outputs[0].token_ids == outputs[request.id].outputs[0].token_ids
    assert outputs[fork].outputs[0].text == outputs[request.id].outputs[0].text
    assert outputs[fork].metrics.cached_tokens == len(prompt)
    assert engine.fork(request.id) is None


def test_what_is_not_finite_is_not_kept(tiny):
    engine = engine_on(tiny, prefix_cache=True)
    request, _ = tiny.make_request(list(range(40)), greedy(2))
    engine.add_request(request)
    plan = engine.scheduler.schedule()
    engine.scheduler.update(plan, [5] * len(plan.sampled), broken=[0])
    assert engine.scheduler.cache.stats()["nodes"] == 0
    checked(engine)
    engine.scheduler.abort(request.id)
    assert engine.scheduler.cache.stats()["nodes"] == 0

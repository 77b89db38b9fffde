# SPDX-License-Identifier: Apache-2.0
"""The engine against full recomputation: in any company, any chunks, any pressure, any order."""

import random

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.scheduler import Scheduler
from tests.engine.conftest import Oracle, engine_on, golden, greedy, make_prompts, request_of, run


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def check_pages(engine):
    """Invariant 3, through the pool's own account and through the counts that users see."""
    pool = engine.scheduler._pool
    engine.scheduler.cache.check()
    counts = engine.stats()["pages"]
    taken = sum(group["held"] + group["cached"] for group in counts)
    assert counts[0]["free"] + taken == pool.capacity


@pytest.mark.optimized
def test_alone_in_company_shuffled_and_chunked_give_the_same(tiny, oracle):
    """CASES N-01: 64 prompts alone, in batches of 2, 8 and 64, shuffled, in chunks of 8.

    And from the cache, which has them all after the first time.
    """
    rng = np.random.default_rng(1)
    prompts = make_prompts(rng, 64, high=24)
    params = greedy(10)
    alone = [ids for p in prompts for ids in token_ids(tiny.generate([p], params))]
    compared = sum(oracle.check_greedy(p, ids) for p, ids in zip(prompts, alone, strict=True))
    assert compared > 0.95 * sum(map(len, alone)), "the fixture's margins are too small to tell"
    for size in (2, 8, 64):
        batches = [prompts[i : i + size] for i in range(0, 64, size)]
        assert [t for b in batches for t in token_ids(tiny.generate(b, params))] == alone
    order = rng.permutation(64)
    shuffled = token_ids(tiny.generate([prompts[i] for i in order], params))
    assert shuffled == [alone[i] for i in order]
    jobs = [(prompt, params) for prompt in prompts]
    assert token_ids(run(tiny, engine_on(tiny, budget=8), jobs)) == alone
    assert token_ids(run(tiny, engine_on(tiny, overlap=False), jobs)) == alone
    assert token_ids(run(tiny, engine_on(tiny, prefix_cache=False), jobs)) == alone
    engine = engine_on(tiny)
    assert token_ids(run(tiny, engine, jobs)) == token_ids(run(tiny, engine, jobs)) == alone
    assert engine.stats()["cache"]["hit_tokens"] > 64


def test_static_batches_give_the_tokens_of_continuous_batching(tiny):
    rng = np.random.default_rng(12)
    jobs = [(p, greedy(int(rng.integers(1, 24)))) for p in make_prompts(rng, 24)]
    seeded = SamplingParams(temperature=1.0, seed=4, max_tokens=9, ignore_eos=True)
    jobs += [(p, seeded) for p in make_prompts(rng, 4)]
    continuous = token_ids(run(tiny, engine_on(tiny), jobs))
    for options in ({"budget": 8}, {"budget": 8, "num_pages": 12}):
        static = engine_on(tiny, static=True, **options)
        assert token_ids(run(tiny, static, jobs, check=check_pages)) == continuous
        assert static.stats()["steps"] > 28 * 2


def test_a_sampling_neighbour_changes_nothing(tiny):
    rng = np.random.default_rng(2)
    prompts = make_prompts(rng, 6)
    sampled = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
    mixed = [greedy(12), sampled] * 3
    alone = [tiny.generate([p], m)[0] for p, m in zip(prompts, mixed, strict=True)]
    assert token_ids(tiny.generate(prompts, mixed)) == token_ids(alone)
    other = tiny.generate([prompts[1]], SamplingParams(seed=6, max_tokens=12, ignore_eos=True))
    assert token_ids(other) != token_ids(alone[1:2])


def test_chunk_borders_and_idle_rows(tiny, oracle):
    """CASES K-01: prompts around multiples of the chunk, one and five tokens."""
    rng = np.random.default_rng(3)
    lengths = (1, 7, 8, 9, 15, 16, 17, 24)
    prompts = [[int(t) for t in rng.integers(3, 300, n)] for n in lengths]
    for max_tokens in (1, 5):
        jobs = [(prompt, greedy(max_tokens)) for prompt in prompts]
        whole = token_ids(run(tiny, engine_on(tiny), jobs))
        assert token_ids(run(tiny, engine_on(tiny, budget=8), jobs)) == whole
        assert all(len(ids) == max_tokens for ids in whole)
        for prompt, ids in zip(prompts, whole, strict=True):
            oracle.check_greedy(prompt, ids)


@pytest.mark.parametrize("budget", [8, 64])
def test_preempted_equals_never_preempted(tiny, budget):
    """CASES C-01: together they need three times the pool; greedy, seeded and logprobs.

    With chunks of 8 a replay crosses chunk borders inside the output (CASES K-01).
    """
    rng = np.random.default_rng(4)
    prompts = make_prompts(rng, 8, low=20, high=40)
    seeded = SamplingParams(seed=9, max_tokens=40, ignore_eos=True)
    params = [greedy(40, logprobs=2), seeded, greedy(40, prompt_logprobs=1), greedy(40)] * 2
    jobs = list(zip(prompts, params, strict=True))
    large = run(tiny, engine_on(tiny), jobs)
    engine = engine_on(tiny, num_pages=12, budget=budget)
    small = run(tiny, engine, jobs, check=check_pages)
    assert token_ids(small) == token_ids(large)
    assert engine.stats()["preemptions"] > 0
    assert sum(output.metrics.preemptions for output in small) == engine.stats()["preemptions"]
    for a, b in zip(large, small, strict=True):
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason == "length"
        for x, y in ((a.outputs[0].logprobs, b.outputs[0].logprobs),):
            assert (x is None) == (y is None)
            for one, two in zip(x or [], y or [], strict=True):
                assert one.keys() == two.keys()
                assert all(abs(one[t].logprob - two[t].logprob) < 1e-4 for t in one)
    for output in small:
        assert output.metrics.cached_tokens <= len(output.prompt_token_ids)
    check_prompt_logprobs(large[2], small[2])


def test_a_list_of_mixed_lengths_comes_back_in_order(tiny, monkeypatch):
    """CASES C-05: 200 prompts on a pool for one of the longest; nobody is starved."""
    rng = np.random.default_rng(6)
    prompts = [
        [int(i) for i in rng.integers(3, 300, length)]
        for length in rng.choice([2, 5, 10, 30, 90], 200)
    ]
    params = [greedy(int(n)) for n in rng.choice([1, 4, 20], 200)]
    expected = token_ids(tiny.generate(prompts, params))
    engine = engine_on(tiny, num_pages=12)
    monkeypatch.setattr(tiny, "engine", engine)
    outputs = tiny.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert token_ids(outputs) == expected
    assert [len(ids) for ids in expected] == [one.max_tokens for one in params]
    assert engine.stats()["preemptions"] > 0
    assert max(output.metrics.preemptions for output in outputs) <= 5
    check_pages(engine)


def check_prompt_logprobs(a, b):
    assert len(a.prompt_logprobs) == len(b.prompt_logprobs) == len(a.prompt_token_ids)
    assert a.prompt_logprobs[0] is b.prompt_logprobs[0] is None
    for one, two in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
        assert all(abs(one[t].logprob - two[t].logprob) < 1e-4 for t in one.keys() & two.keys())


def test_prompt_logprobs_equal_the_oracle_in_any_chunks(tiny, oracle):
    """CASES S-10 with nothing cached: no value is missing or shifted, also under preemption."""
    rng = np.random.default_rng(5)
    prompts = make_prompts(rng, 4, low=60, high=90)
    jobs = [(prompt, greedy(4, prompt_logprobs=1)) for prompt in prompts]
    for engine in (engine_on(tiny), engine_on(tiny, budget=7), engine_on(tiny, num_pages=9)):
        for output in run(tiny, engine, jobs):
            prompt = output.prompt_token_ids
            logprobs = oracle.logprobs(tuple(prompt))
            assert len(output.prompt_logprobs) == len(prompt)
            for place in range(1, len(prompt)):
                entry = output.prompt_logprobs[place][prompt[place]]
                assert entry.logprob == pytest.approx(logprobs[place - 1, prompt[place]], abs=1e-4)
                rank = 1 + int((logprobs[place - 1] > logprobs[place - 1, prompt[place]]).sum())
                assert abs(entry.rank - rank) <= 1


def test_context_limit(tiny):
    """CASES L-01, with max_model_len 64: also the last cell of a full table is used."""
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 64}
    llm = LLM(tiny.config.model, num_pages=5, **options)
    rng = np.random.default_rng(6)
    prompt = [int(t) for t in rng.integers(3, 300, 64)]
    [expected] = tiny.generate([prompt[:62]], greedy(2))
    for length, max_tokens, generated in [
        (62, 0, 0), (62, 1, 1), (62, 5, 2), (63, 5, 1), (64, 0, 0), (64, 1, 0), (64, 5, 0)
    ]:  # fmt: skip
        for scored in (None, 0):
            [output] = llm.generate([prompt[:length]], greedy(max_tokens, prompt_logprobs=scored))
            completion = output.outputs[0]
            assert len(completion.token_ids) == generated
            assert completion.finish_reason == "length"
            if length == 62:
                assert completion.token_ids == expected.outputs[0].token_ids[:generated]
            assert (output.prompt_logprobs is None) == (scored is None)
            if scored is not None:
                assert len(output.prompt_logprobs) == length
                assert all(entry is not None for entry in output.prompt_logprobs[1:])
            assert output.metrics.e2e_s is not None
    with pytest.raises(ValueError, match="65 tokens and max_model_len is 64"):
        llm.generate([[*prompt, 5]], greedy(1))


def test_empty_prompts(tiny):
    """CASES L-03: nothing in, nothing out; an empty text runs from BOS where there is one."""
    assert tiny.generate([]) == []
    [empty] = tiny.generate([""], greedy(3))
    [bos] = tiny.generate([[1]], greedy(3))
    assert empty.prompt_token_ids == [1] and token_ids([empty]) == token_ids([bos])
    assert len(tiny.generate([" \n"], greedy(2))[0].outputs[0].token_ids) == 2
    without = tiny.tokenizer
    try:
        object.__setattr__(without, "bos_id", None)
        for prompts in (["ok", ""], ["ok", []]):
            with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
                tiny.generate(prompts, greedy(2))
    finally:
        object.__setattr__(without, "bos_id", 1)
    assert len(tiny.generate("ok", greedy(2))) == 1


def test_bad_input_is_refused_before_anything_runs(tiny):
    steps = tiny.engine.stats()["steps"]
    for prompts, params, match in [
        ([[5], [300]], greedy(1), "prompt 1: token 0 of the prompt is 300; ids are from 0 to 299"),
        ([[5], [-1]], greedy(1), "prompt 1: token 0 of the prompt is -1"),
        ([[5], [True]], greedy(1), "prompt 1: token 0 of the prompt is True"),
        ([[5], [1] * 129], greedy(1), "prompt 1: the prompt has 129 tokens and max_model_len"),
        ([[5], [6]], [greedy(1)], "2 prompts came with 1 params"),
        ([[5]], ["greedy"], "prompt 0: params must be SamplingParams, not str"),
    ]:
        with pytest.raises(ValueError, match=match):
            tiny.generate(prompts, params)
    with pytest.raises(TypeError, match="prompts must be text"):
        tiny.generate(5)
    with pytest.raises(TypeError, match="unexpected keyword"):
        LLM("smollm2-135m", no_such_option=1)
    assert tiny.engine.stats()["steps"] == steps and not tiny.engine.has_work


def test_abort_at_any_stage(tiny):
    rng = np.random.default_rng(7)
    prompts = make_prompts(rng, 6, low=30, high=60)
    jobs = [(prompt, greedy(20)) for prompt in prompts]
    expected = token_ids(run(tiny, engine_on(tiny), jobs))
    for step in range(14):
        engine = engine_on(tiny, budget=32)
        requests = [request_of(tiny, prompt, params) for prompt, params in jobs]
        for request in requests:
            engine.add_request(request)
        outputs = {}
        for turn in range(200):
            if turn == step:
                assert engine.abort(requests[2].id)
            for delta in engine.step():
                if delta.output is not None:
                    outputs[delta.request_id] = delta.output
            check_pages(engine)
            if not engine.has_work:
                break
        aborted = outputs.pop(requests[2].id).outputs[0]
        assert aborted.finish_reason == "abort"
        assert aborted.token_ids == expected[2][: len(aborted.token_ids)]
        assert not engine.abort(requests[2].id)
        rest = [r for r in requests if r is not requests[2]]
        assert token_ids([outputs[r.id] for r in rest]) == expected[:2] + expected[3:]


def test_who_does_not_stream_gets_one_delta_with_everything(tiny):
    fields = [{}, {"stop": ["zzz"]}, {"logprobs": 1}]
    requests = [request_of(tiny, [5, 6, 7], greedy(20, **f)) for f in fields]
    engine = engine_on(tiny)
    for request in requests:
        engine.add_request(request, streams=False)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    streamed = run(tiny, engine_on(tiny), [([5, 6, 7], request.params) for request in requests])
    assert [delta.request_id for delta in deltas] == [0, 1, 2]
    for delta, output in zip(deltas, streamed, strict=True):
        [completion] = output.outputs
        assert delta.output.outputs == [completion] and delta.finish_reason == "length"
        assert (delta.text, delta.token_ids) == (completion.text, completion.token_ids)
        assert delta.logprobs == completion.logprobs


def test_stream_equals_generate(tiny):
    text = "the water turns the wheel"
    [whole] = tiny.generate(text, greedy(20))
    deltas = list(tiny.stream(text, greedy(20)))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [t for delta in deltas for t in delta.token_ids] == whole.outputs[0].token_ids
    assert deltas[-1].output.outputs[0].text == whole.outputs[0].text
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    stream = tiny.stream(text, greedy(20))
    next(stream)
    stream.close()
    assert token_ids(tiny.generate(text, greedy(20))) == token_ids([whole])


def test_metrics_and_logprobs_of_a_result(tiny):
    params = greedy(6, logprobs=0, cache_salt="metrics")
    [output] = tiny.generate([[5, 6, 7]], params)
    metrics, completion = output.metrics, output.outputs[0]
    assert len(metrics.itl_s) == 5 and metrics.preemptions == 0 and metrics.cached_tokens == 0
    assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.e2e_s
    assert metrics.e2e_s == pytest.approx(metrics.ttft_s + 5 * metrics.tpot_s)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert list(entry) == [token] and entry[token].rank == 1 and entry[token].logprob <= 0
        assert entry[token].decoded_token == tiny.tokenizer.decode([token], False)


def test_end_tokens_end_it(tiny, oracle):
    """The model's end token is kept in token_ids and named; its text is not shown."""
    rng = np.random.default_rng(8)
    [prompt] = make_prompts(rng, 1)
    [output] = tiny.generate([prompt], greedy(12))
    ids = output.outputs[0].token_ids
    end = ids[5]
    before = tiny.maker._eos_ids
    try:
        tiny.maker._eos_ids = (end,)
        params = SamplingParams(temperature=0, max_tokens=12)
        [ended] = tiny.generate([prompt], params)
        completion = ended.outputs[0]
        assert completion.token_ids == ids[: ids.index(end) + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", end)
        assert tiny.generate([prompt], greedy(12))[0].outputs[0].token_ids == ids
    finally:
        tiny.maker._eos_ids = before


def test_never_fits_is_refused_and_outgrowing_ends_with_capacity(tiny):
    engine = engine_on(tiny, num_pages=4)
    with pytest.raises(ValueError, match="needs 4 pages of 16 tokens, the pool has 3"):
        engine.add_request(request_of(tiny, [5] * 50, greedy(1)))
    [output] = run(tiny, engine, [([5] * 40, greedy(40))], check=check_pages)
    assert output.outputs[0].finish_reason == "capacity"
    assert output.outputs[0].token_ids == token_ids(tiny.generate([[5] * 40], greedy(9)))[0]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("place", ["body", "head", "read"])
def test_a_step_that_fails_loses_no_request(tiny, monkeypatch, fault, place):
    """The device state goes with a donated buffer; all requests run again from their tokens."""
    rng = np.random.default_rng(11)
    jobs = [(prompt, greedy(12, logprobs=1, prompt_logprobs=1)) for prompt in make_prompts(rng, 4)]
    expected = run(tiny, engine_on(tiny), jobs)
    for when in (1, 3, 6):
        engine = engine_on(tiny, budget=48)
        calls = []

        def failing(*arguments, at=when, real=None, calls=calls):
            calls.append(None)
            if len(calls) == at:
                if real is not None:
                    real(*arguments)  # its result, and so the donated state, is lost
                raise fault("planted")
            return real(*arguments) if real is not None else None

        if place == "read":
            real_update = Scheduler.update

            def update(self, *step, calls=calls, at=when, real_update=real_update):
                calls.append(None)
                progressed = real_update(self, *step)
                if len(calls) == at:
                    raise fault("planted")
                return progressed

            monkeypatch.setattr(Scheduler, "update", update)
        else:
            programs = engine.worker.programs

            class Faulty(dict):
                seconds = programs.seconds

                def __getitem__(self, key, programs=programs, failing=failing):
                    is_head = hasattr(key, "kind")
                    if key == "start" or is_head != (place == "head"):
                        return programs[key]
                    return lambda *arguments: failing(*arguments, real=programs[key])

            engine.worker.programs = Faulty()
        requests = [request_of(tiny, prompt, params) for prompt, params in jobs]
        for request in requests:
            engine.add_request(request)
        outputs, raised = {}, 0
        for _ in range(200):
            try:
                for delta in engine.step():
                    if delta.output is not None:
                        outputs[delta.request_id] = delta.output
            except fault:
                raised += 1
            check_pages(engine)
            if not engine.has_work:
                break
        assert raised == 1
        got = [outputs[request.id] for request in requests]
        assert token_ids(got) == token_ids(expected)
        for a, b in zip(expected, got, strict=True):
            assert [e.keys() for e in a.outputs[0].logprobs] == [
                e.keys() for e in b.outputs[0].logprobs
            ]
            check_prompt_logprobs(a, b)
        monkeypatch.undo()


def test_a_stream_whose_end_another_call_took_says_so(tiny):
    stream = tiny.stream([5, 6], greedy(3))
    next(stream)
    tiny.generate([[7, 8]], greedy(20))
    with pytest.raises(RuntimeError, match="another call took this stream's end"):
        list(stream)


HISTORY = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "num_pages": st.integers(5, 40),
        "budget": st.sampled_from([3, 7, 8, 17, 64]),
        "overlap": st.booleans(),
        "requests": st.integers(1, 10),
        "abort": st.floats(0, 0.1),
    }
)


def check_history(tiny, oracle, history):
    """Runs one random history; every token is the oracle's, every page is accounted for."""
    chance = random.Random(history["seed"])
    rng = np.random.default_rng(history["seed"])
    engine = engine_on(
        tiny,
        num_pages=history["num_pages"],
        budget=history["budget"],
        overlap=history["overlap"],
    )
    # Every prompt can run alone: each group may need the pages of the whole prompt.
    high = min(60, (history["num_pages"] - 1) // len(engine.stats()["pages"]) * 16)
    waiting = make_prompts(rng, history["requests"], high=high)
    running, done = {}, []
    while waiting or engine.has_work:
        while waiting and (chance.random() < 0.4 or not engine.has_work):
            request = request_of(tiny, waiting.pop(), greedy(chance.randint(0, 24)))
            running[engine.add_request(request)] = request
        if running and chance.random() < history["abort"]:
            engine.abort(chance.choice(list(running)))
        for delta in engine.step():
            if delta.output is not None:
                running.pop(delta.request_id)
                done.append(delta.output)
        check_pages(engine)
    assert len(done) == history["requests"] and not running
    for output in done:
        completion = output.outputs[0]
        oracle.check_greedy(output.prompt_token_ids, completion.token_ids)
        assert completion.finish_reason in ("length", "abort", "capacity")
    assert engine.stats()["pages"][0]["held"] == 0


RELAXED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=20, **RELAXED)
@given(history=HISTORY)
def test_any_history_equals_the_oracle(tiny, oracle, history):
    check_history(tiny, oracle, history)


@settings(max_examples=10, **RELAXED)
@given(history=HISTORY)
def test_any_history_with_windows_equals_the_oracle(own_cache, history):
    """Four page groups in one small pool, three of which free pages behind their windows."""
    check_history(golden("gemma3"), Oracle(golden("gemma3")), {**history, "budget": 64})


@pytest.mark.slow
@settings(max_examples=200, **RELAXED)
@given(history=HISTORY)
def test_any_of_many_histories_equals_the_oracle(tiny, oracle, history):
    check_history(tiny, oracle, history)


def test_nothing_compiles_after_warm_up_nor_at_a_second_start(tiny):
    """Invariant 4: 300 varied requests, then a second engine of the same settings."""
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        rng = np.random.default_rng(9)
        prompts = make_prompts(rng, 300, high=100)
        params = [
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.7])),
                top_k=int(rng.choice([0, 5, 100])),
                top_p=float(rng.choice([0.5, 1.0])),
                max_tokens=int(rng.integers(0, 20)),
                logprobs=[None, 3][int(rng.integers(2))],
                prompt_logprobs=[None, 2][int(rng.integers(2))],
            )
            for _ in prompts
        ]
        tiny.generate(prompts, params)
        assert tiny.engine.stats()["programs_compiled"] > 0
        assert compiled == []
        again = LLM(str(tiny.config.model), **tiny_options(tiny))
        again.engine.worker.programs.wait()
        stats = again.engine.stats()
        assert stats["programs_compiled"] == 0 and stats["programs_loaded"] == stats["programs"]
        assert token_ids(again.generate(prompts[:3], greedy(5))) == token_ids(
            tiny.generate(prompts[:3], greedy(5))
        )
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def tiny_options(llm):
    names = ("max_num_seqs", "max_num_batched_tokens", "num_pages")
    return {name: getattr(llm.config, name) for name in names}

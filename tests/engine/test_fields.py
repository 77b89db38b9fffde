# SPDX-License-Identifier: Apache-2.0
"""Each sampling field through the public API: honoured exactly, or refused by name."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from tests.engine.conftest import engine_on, run

ROW = [40, 41, 42, 43, 44, 45]
LOGITS = np.log([0.35, 0.25, 0.15, 0.12, 0.08, 0.05])


def flat_table(logits=LOGITS, ids=ROW, low=-40.0):
    """Returns the table of a model that draws from `ids` with `logits` after any token."""
    table = np.full((300, 300), low, np.float32)
    table[:, ids] = logits
    return table


def exact(fields, counts, prompt_counts):
    """Returns float64 probabilities over ROW after outputs of `counts` of each, by the rules."""
    logits = LOGITS.astype(np.float64).copy()
    for token, bias in (fields.get("logit_bias") or {}).items():
        logits[ROW.index(token)] += bias
    if (allowed := fields.get("allowed_token_ids")) is not None:
        logits[[token not in allowed for token in ROW]] = -np.inf
    penalty = fields.get("repetition_penalty", 1.0)
    seen = (counts + prompt_counts) > 0
    logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - counts * fields.get("frequency_penalty", 0.0)
    logits = logits - (counts > 0) * fields.get("presence_penalty", 0.0)
    logits = logits / fields.get("temperature", 1.0)
    p = np.exp(logits - logits.max())
    p = np.where(p >= fields.get("min_p", 0.0), p, 0)
    order = np.argsort(-p, kind="stable")
    k = fields.get("top_k", 0)
    if 0 < k < len(p):
        p[order[k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= fields.get("top_p", 1.0)]] = 0
    return p / p.sum()


DISTRIBUTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.6},
    {"frequency_penalty": -0.4},
    {"logit_bias": {41: 0.8, 44: -1.0}},
    {"allowed_token_ids": [41, 43, 45]},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.8, "presence_penalty": 0.5, "logit_bias": {45: 1.5}, "top_p": 0.95},
]


def chi_square_p(got, want):
    """Returns the chance of counts at least so far from `want` (Wilson-Hilferty)."""
    kept = want > 0
    assert got[~kept].sum() == 0, "only what can be drawn is drawn"
    if kept.sum() == 1:
        return 1.0
    freedom = kept.sum() - 1
    statistic = ((got[kept] - want[kept]) ** 2 / want[kept]).sum()
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    return 0.5 * math.erfc(z / 2**0.5)


TOKENS = 50  # of each output


def draws_of(script, fields, count):
    """Returns [count, TOKENS] drawn tokens, in a batch whose other rows have other fields."""
    jobs = [
        ([0, 42], SamplingParams(seed=seed, max_tokens=TOKENS, **fields)) for seed in range(count)
    ]
    others = [{}, {"temperature": 0}, {"top_k": 2}, {"presence_penalty": 1.0}, {"min_p": 0.5}]
    mixed = []
    for place, job in enumerate(jobs):
        mixed.append(job)
        if place % 3 == 0:
            other = others[place // 3 % len(others)]
            mixed.append(([0], SamplingParams(max_tokens=TOKENS, **other)))
    outputs = run(script.llm, engine_on(script.llm), mixed, most_steps=10**6)
    asked = {id(params) for _, params in jobs}
    wanted = [o for o, (_, params) in zip(outputs, mixed, strict=True) if id(params) in asked]
    return np.array([output.outputs[0].token_ids for output in wanted])


@pytest.mark.parametrize("fields", DISTRIBUTIONS, ids=str)
def test_draws_follow_the_exact_distribution(script, fields):
    """A tenth of the draws of the slow test."""
    check_distribution(script, fields, 40)


@pytest.mark.slow
@pytest.mark.parametrize("fields", DISTRIBUTIONS, ids=str)
def test_twenty_thousand_draws_follow_the_exact_distribution(script, fields):
    check_distribution(script, fields, 400)


def check_distribution(script, fields, count):
    """Checks the tokens against the sum of the distributions that each had, given those before."""
    script.show(flat_table())
    drawn = draws_of(script, fields, count) - ROW[0]
    prompt = np.array([token == 42 for token in ROW], int)
    each = np.eye(len(ROW), dtype=int)
    before = np.cumsum(each[drawn], axis=1) - each[drawn]
    want = sum(exact(fields, counts, prompt) for row in before for counts in row)
    assert chi_square_p(np.bincount(drawn.ravel(), minlength=len(ROW)), want) > 0.001


def test_alone_and_in_company_are_the_same(script):
    script.show(flat_table())
    params = [SamplingParams(seed=n, max_tokens=12, **f) for n, f in enumerate(DISTRIBUTIONS)]
    together = script.llm.generate([[0, 42]] * len(params), params)
    for one, output in zip(params, together, strict=True):
        alone = script.llm.generate([[0, 42]], one)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids, one


def test_n_outputs_differ_and_come_again(script):
    script.show(flat_table())
    params = SamplingParams(seed=5, n=4, max_tokens=12)
    [first] = script.llm.generate([[0]], params)
    [second] = script.llm.generate([[0]], params)
    ids = [c.token_ids for c in first.outputs]
    assert ids == [c.token_ids for c in second.outputs]
    assert len({tuple(i) for i in ids}) == 4 and [c.index for c in first.outputs] == [0, 1, 2, 3]
    [single] = script.llm.generate([[0]], dataclasses.replace(params, n=1))
    assert single.outputs[0].token_ids == ids[0], "the first of n is what n=1 gives"
    deltas = list(script.llm.stream([0], params))
    for index in range(4):
        assert [t for d in deltas if d.index == index for t in d.token_ids] == ids[index]
    assert [d.output is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [c.token_ids for c in deltas[-1].output.outputs] == ids


def test_a_drawn_seed_is_returned_and_gives_the_output_again(script):
    script.show(flat_table())
    [a], [b] = (script.llm.generate([[0]], SamplingParams(max_tokens=20)) for _ in range(2))
    assert a.seed != b.seed and a.outputs[0].token_ids != b.outputs[0].token_ids
    again = script.llm.generate([[0]], SamplingParams(max_tokens=20, seed=a.seed))[0]
    assert again.outputs[0].token_ids == a.outputs[0].token_ids


def test_logit_bias_forces_and_forbids_an_added_token(script):
    """CASES S-03: the edges of the vocabulary, and an added token."""
    script.say([30, 31, 32])
    note = script.llm.tokenizer.backend.token_to_id("<note>")
    assert note == 299
    assert script.run(logit_bias={note: 100}, max_tokens=3).token_ids == [note] * 3
    table = flat_table(np.float64([3, 5]), ids=[31, note])
    script.show(table)
    assert script.run(max_tokens=2).token_ids == [note] * 2
    assert script.run(logit_bias={note: -100}, max_tokens=2).token_ids == [31, 31]


def test_bad_words_of_one_and_of_several_tokens(script):
    tokenizer = script.llm.tokenizer
    several = tokenizer.encode("wheel of", add_special_tokens=False)
    assert 1 < len(several) <= 8
    script.show(flat_table(np.float64([5, 3]), ids=[40, 41]))
    word = tokenizer.decode([40])
    assert script.run(bad_words=[word], max_tokens=3).token_ids == [41] * 3
    ids = list(dict.fromkeys(several))
    assert ids == several, "a script can say it"
    script.say(ids)
    assert script.run().token_ids[: len(ids)] == ids
    out = script.run(bad_words=["wheel of"]).token_ids
    assert out[: len(ids) - 1] == ids[:-1] and out[len(ids) - 1] != ids[-1]
    assert "wheel of" not in tokenizer.decode(out)


def test_processed_logprobs_are_of_what_is_drawn(script):
    script.show(flat_table())
    for fields in DISTRIBUTIONS:
        params = SamplingParams(
            seed=1, max_tokens=1, logprobs=20, logprobs_mode="processed", **fields
        )
        [output] = script.llm.generate([[0, 42]], params)
        entry = output.outputs[0].logprobs[0]
        prompt = np.array([token == 42 for token in ROW], int)
        want = exact(fields, np.zeros(len(ROW), int), prompt)
        got = {token: math.exp(entry[token].logprob) for token in ROW if token in entry}
        for token, p in zip(ROW, want, strict=True):
            assert got.get(token, 0.0) == pytest.approx(p, abs=1e-5), (fields, token)
        assert all(math.isfinite(e.logprob) for e in entry.values())
        raw = dataclasses.replace(params, logprobs_mode="raw")
        entry = script.llm.generate([[0, 42]], raw)[0].outputs[0].logprobs[0]
        assert math.exp(entry[40].logprob) == pytest.approx(0.35, abs=1e-5)


def test_text_fields(script):
    """skip_special_tokens, add_special_tokens and truncate_prompt_tokens."""
    script.say([30, 1, 31])
    decode = script.llm.tokenizer.decode
    assert script.run().text == decode([30, 31])
    shown = script.run(skip_special_tokens=False)
    assert shown.text == decode([30, 1, 31], skip_special_tokens=False)
    [output] = script.llm.generate([[7, 8, 9, 10]], SamplingParams(truncate_prompt_tokens=2))
    assert output.prompt_token_ids == [9, 10]
    [output] = script.llm.generate([[7, 8]], SamplingParams(truncate_prompt_tokens=5))
    assert output.prompt_token_ids == [7, 8]


def test_add_special_tokens(fallback_script):
    llm = fallback_script.llm
    fallback_script.say([30, 31])
    for add, first in ((True, 1), (False, None)):
        params = SamplingParams(temperature=0, max_tokens=1, add_special_tokens=add)
        ids = llm.generate(["mill"], params)[0].prompt_token_ids
        assert (ids[0] == 1) == (first == 1)


REFUSED = [
    ({"logit_bias": {300: 5}}, "logit_bias has the token id 300; ids are below 300"),
    ({"logit_bias": {-1: 5}}, "logit_bias has -1, which is not a token id"),
    ({"logit_bias": {"abc": 5}}, "logit_bias has 'abc', which is not a token id"),
    ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\]=nan must be a finite number"),
    ({"stop_token_ids": [999]}, "stop_token_ids has the token id 999; ids are below 300"),
    ({"allowed_token_ids": [999]}, "allowed_token_ids has the token id 999"),
    ({"allowed_token_ids": []}, "allowed_token_ids=.* allows nothing"),
    ({"stop_token_ids": list(range(40))}, "are 40 ids; at most 32 fit"),
    ({"bad_words": ["x" * 40]}, "at most 8 can be forbidden together"),
    ({"bad_words": [""]}, r"bad_words\[0\]='' must be a text that is not empty"),
    ({"stop": ""}, r"stop\[0\]='' must be a text that is not empty"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 must be at most max_tokens=4"),
    ({"n": 0}, "n=0 must be from 1 to 1024"),
    ({"min_p": 1.5}, "min_p=1.5 must be from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 must be above 0"),
    ({"presence_penalty": 2.5}, "presence_penalty=2.5 must be from -2 to 2"),
    ({"frequency_penalty": math.inf}, "frequency_penalty=inf must be a finite number"),
    ({"logprobs_mode": "cooked"}, "logprobs_mode='cooked' is not known"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 must be at least 1"),
    ({"skip_special_tokens": 1}, "skip_special_tokens=1 must be True or False"),
]


@pytest.mark.parametrize("fields, message", REFUSED, ids=str)
def test_what_cannot_be_is_refused_by_name_and_the_engine_serves_on(script, fields, message):
    script.say([30, 31])
    with pytest.raises(ValueError, match=message):
        script.llm.generate([[0]], SamplingParams(**fields))
    assert script.run().token_ids == [30, 31, 2]
    assert not script.llm.engine.scheduler.has_work


def test_a_bad_prompt_id_is_refused_before_any_work(script):
    script.say([30])
    with pytest.raises(ValueError, match="prompt 1: token 0 of the prompt is 300"):
        script.llm.generate([[0], [300]], SamplingParams(max_tokens=2))
    assert script.llm.generate([[299]], SamplingParams(temperature=0))[0].outputs[0].token_ids


ids = st.lists(st.integers(-1, 301), max_size=4)
ODD = {
    "temperature": st.sampled_from([0, 1e-30, 0.7, 2.0, -1, math.nan, math.inf, True, "1"]),
    "top_k": st.sampled_from([-5, -1, 0, 1, 299, 300, 10**7, 1.5]),
    "top_p": st.sampled_from([0, 1e-9, 0.5, 1, 1.5, math.nan]),
    "min_p": st.sampled_from([0, 0.2, 1, -0.1, math.nan]),
    "repetition_penalty": st.sampled_from([0, 1e-3, 1.3, 5, -1]),
    "presence_penalty": st.sampled_from([-2, 0, 1.5, 3]),
    "frequency_penalty": st.sampled_from([-2, 0, 1.5, 3]),
    "logit_bias": st.one_of(
        st.none(), st.dictionaries(st.integers(-1, 301), st.floats(-100, 100), max_size=4)
    ),
    "allowed_token_ids": st.one_of(st.none(), ids),
    "bad_words": st.lists(st.sampled_from(["mill", "the wheel", "", "\x00"]), max_size=3),
    "seed": st.sampled_from([None, 0, 2**64 - 1, -1]),
    "n": st.sampled_from([1, 2, 0, 1.5]),
    "max_tokens": st.sampled_from([0, 1, 5, None, -1]),
    "min_tokens": st.sampled_from([0, 2, 7, -1]),
    "stop": st.sampled_from([(), "mill", ["a", "ab"], "", [""], 5]),
    "stop_token_ids": ids,
    "ignore_eos": st.sampled_from([True, False, 1]),
    "logprobs": st.sampled_from([None, 0, 3, 20, 21]),
    "prompt_logprobs": st.sampled_from([None, 0, 20, -1]),
    "logprobs_mode": st.sampled_from(["raw", "processed", ""]),
    "truncate_prompt_tokens": st.sampled_from([None, 1, 3, 0]),
}


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=st.lists(st.fixed_dictionaries({}, optional=ODD), min_size=1, max_size=4))
def test_any_set_of_fields_is_refused_or_honoured(tiny, rows):
    """Never a crash: a ValueError, or outputs of finite log-probabilities within the limits."""
    params = []
    for fields in rows:
        try:
            params.append(SamplingParams(**fields))
        except ValueError:
            continue
    try:
        outputs = tiny.generate([[5, 6, 7, 8]] * len(params), params)
    except ValueError as error:
        assert str(error).startswith("prompt "), "refused by index"
        assert not tiny.engine.scheduler.has_work
        return
    for one, output in zip(params, outputs, strict=True):
        assert len(output.outputs) == one.n
        for completion in output.outputs:
            count = len(completion.token_ids)
            if completion.finish_reason == "error":
                assert one.allowed_token_ids is not None, "else something can be drawn"
                continue
            assert completion.finish_reason in ("stop", "length"), completion
            assert one.max_tokens is None or count <= one.max_tokens
            assert completion.finish_reason == "length" or count >= one.min_tokens
            allowed = one.allowed_token_ids
            assert allowed is None or set(completion.token_ids) <= set(allowed)
            for entry in completion.logprobs or ():
                assert all(math.isfinite(e.logprob) for e in entry.values())

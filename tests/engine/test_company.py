# SPDX-License-Identifier: Apache-2.0
"""Every sampling field in any company: alone, mixed, in chunks, preempted, n > 1, either loop.

The siblings of CASES S-01, C-01, K-01 and N-01, on TINY (F2) and on small pools (F4).
"""

import dataclasses

import numpy as np
import pytest

from engine import LLM, SamplingParams
from tests.engine.conftest import engine_on, greedy, make_prompts, open_on_demand, run
from tests.fixtures import byte_tokenizer, write_script

FIELDS = {
    "greedy": {"temperature": 0},
    "seeded": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "repetition": {"temperature": 0, "repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "bias": {"logit_bias": {17: 9.0, 40: -100.0}},
    "allowed": {"allowed_token_ids": [*range(30, 70), 2]},
    "bad_words": {"temperature": 0, "bad_words": ["the mill", "a", "wheel"]},
    "min_tokens": {"min_tokens": 12, "logit_bias": {2: 6.0}},
    "stop": {"stop": ["e", "zz", "th"]},
    "stop ids": {"stop_token_ids": list(range(30, 50))},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "processed": {"top_k": 4, "logprobs": 3, "logprobs_mode": "processed"},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2},
    "n": {"n": 3},
    "all": {
        "temperature": 0.9,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {9: 1.0},
        "stop": ["qq"],
        "logprobs": 1,
        "n": 2,
    },
}


def jobs_of(rng, low=20, high=40, new_tokens=24):
    """Returns {name: [(prompt, SamplingParams of one output, its sample)]}."""
    prompts = make_prompts(rng, len(FIELDS), low, high)
    return {
        name: (prompt, SamplingParams(seed=seed, max_tokens=new_tokens, **fields))
        for seed, (prompt, (name, fields)) in enumerate(zip(prompts, FIELDS.items(), strict=True))
    }


def outputs_of(llm, engine, jobs):
    """Returns {(name, sample): RequestOutput} of jobs that run together."""
    requests, streamed, outputs = {}, {}, {}
    for name, (prompt, params) in jobs.items():
        for request in llm.prepare(prompt, params)[0]:
            engine.add_request(request)
            requests[request.id] = (name, request.sample)
            streamed[request.id] = ""
    while engine.has_work:
        for delta in engine.step():
            streamed[delta.request_id] += delta.text
            if delta.output is not None:
                outputs[requests[delta.request_id]] = delta.output
                text = delta.output.outputs[0].text
                assert streamed[delta.request_id] == text, "no repeats, gaps or withdrawn text"
    return outputs


def same(a, b):
    """Asserts that two results are the Same: ids, text, reasons, and log-probabilities."""
    (one,), (two,) = a.outputs, b.outputs
    assert one.token_ids == two.token_ids and one.text == two.text
    assert (one.finish_reason, one.stop_reason) == (two.finish_reason, two.stop_reason)
    for x, y in ((one.logprobs, two.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
        assert (x is None) == (y is None)
        for left, right in zip(x or (), y or (), strict=True):
            if left is not None:
                for token in left.keys() & right.keys():
                    assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-4)


@pytest.fixture(scope="module")
def alone(tiny):
    """Each job by itself, on an engine of its own."""
    found = {}
    for name, job in jobs_of(np.random.default_rng(8)).items():
        found |= outputs_of(tiny, engine_on(tiny), {name: job})
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"budget": 7},
        {"budget": 7, "overlap": False},
        {"num_pages": 14},
        {"num_pages": 14, "overlap": False},
        {"num_pages": 10, "budget": 9},
    ],
    ids=str,
)
def test_every_field_is_the_same_in_company(tiny, alone, options):
    engine = engine_on(tiny, **options)
    together = outputs_of(tiny, engine, jobs_of(np.random.default_rng(8)))
    assert together.keys() == alone.keys()
    for key in alone:
        same(alone[key], together[key])
    if "num_pages" in options:
        assert engine.stats()["preemptions"] > 0, "the trial bites"
    pages = engine.stats()["pages"][0]
    assert pages["held"] == 0


def test_each_field_shows_that_it_is_on(alone, tiny):
    """So that the comparison above compares something."""
    ids = {name: alone[name, 0].outputs[0].token_ids for name in FIELDS}
    assert set(ids["allowed"]) <= {*range(30, 70), 2}
    assert 40 not in ids["bias"] and 17 in ids["bias"]
    assert alone["stop", 0].outputs[0].finish_reason == "stop"
    assert alone["stop ids", 0].outputs[0].stop_reason in range(30, 50)
    assert len(ids["min_tokens"]) >= 12
    assert len({tuple(alone["n", sample].outputs[0].token_ids) for sample in range(3)}) == 3
    for name in ("presence", "frequency"):
        plain, params = jobs_of(np.random.default_rng(8))[name]
        off = dataclasses.replace(params, presence_penalty=0.0, frequency_penalty=0.0)
        [output] = run(tiny, engine_on(tiny), [(plain, off)])
        assert output.outputs[0].token_ids != ids[name]


def test_ids_without_a_tokenizer_entry(own_cache, tmp_path):
    """CASES T-03: never sampled, and log-probabilities are over what can be sampled."""
    table = np.zeros((320, 320), np.float32)
    table[:, 310] = 20.0
    table[:, 30] = 10.0
    folder = write_script(tmp_path / "padded", table, tokenizer=byte_tokenizer())
    llm = LLM(str(folder), max_num_seqs=1, max_num_batched_tokens=8, num_pages=17)
    for prompt in ([299], [310], [319]):
        [output] = llm.generate([prompt], greedy(3, logprobs=5))
        assert output.outputs[0].token_ids == [30] * 3
        entry = output.outputs[0].logprobs[0]
        assert 310 not in entry and entry[30].rank == 1
        want = 10 - np.log(np.exp(10.0) + 299)
        assert entry[30].logprob == pytest.approx(want, abs=1e-4)
    with pytest.raises(ValueError, match="token 0 of the prompt is 320; ids are from 0 to 319"):
        llm.generate([[320]], greedy(1))
    sampled = llm.generate([[5]] * 2, SamplingParams(temperature=100.0, max_tokens=50, seed=1))
    assert max(max(output.outputs[0].token_ids) for output in sampled) < 300


# Where bfloat16 may first differ: between two tokens whose logits are this near. README says so.
BFLOAT16_MARGIN = 0.05


@pytest.mark.slow
def test_bfloat16_differs_only_between_tokens_that_are_near(tiny_folder):
    """CASES N-01: the bound that is published, measured on 64 prompts in any company."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_pages": 80}
    llm = open_on_demand(tiny_folder, dtype="bfloat16", **options)
    prompts = make_prompts(np.random.default_rng(9), 64, 1, 40)
    jobs = [(prompt, greedy(16, logprobs=2)) for prompt in prompts]
    alone = [run(llm, engine_on(llm), [job])[0].outputs[0] for job in jobs]
    together = [o.outputs[0] for o in run(llm, engine_on(llm, budget=9), jobs)]
    widest = 0.0
    for one, two in zip(alone, together, strict=True):
        differ = [a != b for a, b in zip(one.token_ids, two.token_ids, strict=True)]
        if any(differ):
            entry = one.logprobs[differ.index(True)]
            first, second = sorted((e.logprob for e in entry.values()), reverse=True)[:2]
            widest = max(widest, first - second)
    print(f"widest margin at a first difference: {widest:.4f}")
    assert widest < BFLOAT16_MARGIN

# SPDX-License-Identifier: Apache-2.0
"""The edges of temperature and top_k through the public API (CASES S-06, S-07)."""

import math

import numpy as np
import pytest

from engine import SamplingParams
from tests.engine.conftest import SCRIPT_OPTIONS, Script, make_prompts, open_on_demand
from tests.fixtures import byte_tokenizer, script_table, write_script

TEMPERATURES = [0, 1e-30, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3]
PATH = [30, 31, 32, 33]


def steep_table(near):
    """Returns a table that says PATH, its logits of 60 followed by those of `near` ids: 59.5."""
    table = np.full((300, 300), -60.0, np.float32)
    for here, there in zip([0, *PATH], [*PATH, 2], strict=True):
        table[here, near] = 59.5
        table[here, there] = 60.0
    return table


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def scripted(request, script, tmp_path_factory):
    """A scripted model that computes in a dtype."""
    if request.param == "float32":
        return script
    folder = tmp_path_factory.mktemp(request.param)
    write_script(folder, script_table([5, 6, 7]), tokenizer=byte_tokenizer())
    return Script(open_on_demand(folder, dtype=request.param, **SCRIPT_OPTIONS))


def test_tiny_temperatures_are_greedy_in_a_mixed_batch(scripted):
    scripted.show(steep_table([7, 200]))
    params = [SamplingParams(temperature=t, logprobs=2, seed=1) for t in TEMPERATURES]
    params.append(SamplingParams(temperature=1.0, top_k=1, logprobs=2, seed=2))
    for output in scripted.llm.generate([[0]] * len(params), params):
        [completion] = output.outputs
        assert completion.token_ids == [*PATH, 2]
        for entry in completion.logprobs:
            assert all(math.isfinite(one.logprob) for one in entry.values())
    tied = steep_table([7])
    tied[:, [40, 41]] = 60.0  # with the one of PATH, or alone: the lowest id is said
    scripted.show(tied)
    for fields in ({"temperature": 0}, {"temperature": 1.0, "top_k": 1}):
        assert scripted.run(**fields).token_ids == [*PATH, 2]
        assert scripted.run([[9]], max_tokens=3, **fields)[0].token_ids == [40] * 3


@pytest.mark.parametrize("temperature", [-1, math.nan, math.inf])
def test_a_temperature_that_cannot_be_is_refused(temperature):
    with pytest.raises(ValueError, match=f"temperature={temperature!r} must be "):
        SamplingParams(temperature=temperature)


def test_top_k_edges_in_a_mixed_batch(tiny):
    fields = [{"temperature": 0}, *({"top_k": k} for k in (0, -1, 1, 299, 300, 10_000_000))]
    params = [SamplingParams(seed=3, max_tokens=12, ignore_eos=True, **f) for f in fields]
    outputs = tiny.generate([[5, 6, 7]] * len(params), params)
    ids = [output.outputs[0].token_ids for output in outputs]
    assert ids[3] == ids[0], "the likeliest alone"
    assert ids[1] == ids[2] == ids[5] == ids[6] != ids[0], "at the vocabulary's size it is off"
    for one, together in zip(params, ids, strict=True):
        assert tiny.generate([[5, 6, 7]], one)[0].outputs[0].token_ids == together
    with pytest.raises(ValueError, match="top_k=-5 must be at least -1"):
        SamplingParams(top_k=-5)


@pytest.mark.parametrize("k", [2, 7])
def test_five_hundred_draws_are_of_the_true_top_k(tiny, oracle, k):
    prompts = make_prompts(np.random.default_rng(k), 10, low=5, high=20)
    params = SamplingParams(temperature=5.0, top_k=k, max_tokens=50, ignore_eos=True)
    drawn = set()
    for output in tiny.generate(prompts, params):
        prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
        logits = oracle.logits((*prompt, *ids))[len(prompt) - 1 : -1]
        rank = (logits > np.take_along_axis(logits, np.array(ids)[:, None], 1) + 1e-4).sum(axis=1)
        assert len(ids) == 50 and rank.max() < k
        drawn |= set(rank.tolist())
    assert drawn == set(range(k)), "each of them is drawn at times"

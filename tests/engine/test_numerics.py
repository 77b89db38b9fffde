# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite end their own request, and nobody else's (CASES Q-10, in part)."""

import numpy as np
import pytest

from engine import SamplingParams
from engine.params import NOT_FINITE
from tests.engine.conftest import engine_on, greedy, make_prompts, run
from tests.fixtures import script_table

OVERFLOWS = 1e39  # as a logit; its weight is a float32


@pytest.mark.parametrize("bad", [OVERFLOWS, -OVERFLOWS])
def test_a_row_of_bad_logits_ends_with_an_error(script, bad):
    """An infinite logit, or a row of nothing but minus infinity."""
    table = script_table([30, 31, 32]).astype(np.float64)
    table[50] = min(bad, 0)
    table[50, 7] = bad
    script.show(table)
    outputs = script.llm.generate([[0], [0, 50], [0]], SamplingParams(temperature=0, seed=1))
    firsts = [output.outputs[0] for output in outputs]
    assert [c.finish_reason for c in firsts] == ["stop", "error", "stop"]
    assert firsts[1].token_ids == [] and firsts[1].stop_reason == NOT_FINITE
    assert firsts[0].token_ids == firsts[2].token_ids == [30, 31, 32, 2]
    assert not script.llm.engine.scheduler.has_work


def test_a_later_token_ends_it_with_what_it_had(script):
    table = script_table([30, 31, 32]).astype(np.float64)
    table[31, 9] = OVERFLOWS
    script.show(table)
    out = script.run()
    assert (out.token_ids, out.finish_reason) == ([30, 31], "error")


def test_a_mask_that_forbids_everything_ends_it(script):
    script.say([30, 31])
    out = script.run(allowed_token_ids=[2], min_tokens=3)
    assert (out.token_ids, out.finish_reason) == ([], "error")


@pytest.fixture
def broken(tiny):
    """TINY, whose token 13 has an embedding that is not finite."""
    params = tiny.engine.worker.params
    embedding = np.asarray(params["embedding"]).copy()
    embedding[13, 5] = np.nan
    tiny.engine.worker.params = {**params, "embedding": embedding}
    yield tiny
    tiny.engine.worker.params = params


def test_a_bad_prompt_token_ends_its_request_and_leaves_its_pages_clean(broken, tiny):
    """In one chunk or several, first or last; whoever has the pages next is not touched."""
    rng = np.random.default_rng(0)
    good = [[t if t != 13 else 14 for t in p] for p in make_prompts(rng, 6, 20, 50)]
    engine = engine_on(broken, num_pages=30, budget=16)
    for place in (0, 7, 40):
        bad = [20] * 45
        bad[place] = 13
        jobs = [(bad, greedy(8)), *((prompt, greedy(8)) for prompt in good), (bad, greedy(8))]
        outputs = [output.outputs[0] for output in run(broken, engine, jobs)]
        assert {(outputs[i].finish_reason, outputs[i].stop_reason) for i in (0, -1)} == {
            ("error", NOT_FINITE)
        }
        assert outputs[0].token_ids == outputs[-1].token_ids == []
        alone = [run(broken, engine_on(broken), [(p, greedy(8))])[0].outputs[0] for p in good]
        assert [o.token_ids for o in outputs[1:-1]] == [o.token_ids for o in alone]
    counts = engine.stats()["pages"][0]
    assert counts["free"] + counts["cached"] == 29 and counts["held"] == 0


def test_scores_and_hidden_states_of_a_bad_prompt_are_errors(broken):
    with pytest.raises(ValueError, match="pair 1: the model's numbers are not finite"):
        broken.score([([5, 6], [7]), ([5, 13, 6], [7])])
    with pytest.raises(ValueError, match="prompt 0: the model's numbers are not finite"):
        broken.encode([[5, 13, 6]])
    assert not broken.engine.scheduler.has_work
    assert broken.score([([5, 6], [7])])[0].token_ids == [7]

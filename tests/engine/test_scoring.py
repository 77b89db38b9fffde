# SPDX-License-Identifier: Apache-2.0
"""Scores of continuations, hidden states and embeddings: those of a plain forward pass."""

import numpy as np
import pytest

from engine import SamplingParams
from tests.engine.conftest import engine_on, greedy, make_prompts


def test_scores_are_the_oracles(tiny, oracle):
    rng = np.random.default_rng(0)
    pairs = [
        (context, continuation)
        for context, continuation in zip(
            make_prompts(rng, 30, 1, 70), make_prompts(rng, 30, 1, 30), strict=True
        )
    ]
    for (context, continuation), score in zip(pairs, tiny.score(pairs), strict=True):
        logprobs = oracle.logprobs((*context, *continuation))
        rows = logprobs[len(context) - 1 : -1]
        want = rows[np.arange(len(continuation)), continuation]
        assert score.token_ids == continuation
        np.testing.assert_allclose(score.token_logprobs, want, atol=1e-4)
        assert score.sum_logprob == pytest.approx(want.sum(), abs=1e-3)
        assert score.is_greedy == (rows.argmax(axis=1) == continuation).all()


def test_what_greedy_says_is_greedy(tiny):
    prompt = [5, 6, 7]
    said = tiny.generate([prompt], greedy(6))[0].outputs[0].token_ids
    other = [*said[:-1], (said[-1] + 1) % 300]
    right, wrong = tiny.score([(prompt, said), (prompt, other)])
    assert right.is_greedy and not wrong.is_greedy
    assert right.sum_logprob > wrong.sum_logprob


def test_pairs_of_text(tiny, fallback_script):
    tokenizer = tiny.tokenizer
    [a, b] = tiny.score([("the mill ", "turns"), ("the mill", " turns")])
    assert a.token_ids == b.token_ids, "spaces belong to the continuation"
    # A token that spans the two: they are encoded apart.
    whole = tokenizer.encode("the water", add_special_tokens=False)
    cut = next(
        n
        for n in range(1, 9)
        if tokenizer.encode("the water"[:n]) != whole[: len(tokenizer.encode("the water"[:n]))]
    )
    [score] = tiny.score([("the water"[:cut], "the water"[cut:])])
    assert score.token_ids == tokenizer.encode("the water"[cut:], add_special_tokens=False)
    [score] = fallback_script.llm.score([("", "mill")])  # from BOS
    assert tokenizer.decode and fallback_script.llm.tokenizer.decode(score.token_ids) == "mill"


@pytest.mark.parametrize(
    "pair, message",
    [
        (([5], []), "pair 0: the continuation has no tokens"),
        (("", "x"), "pair 0: the prompt is empty and the model has no BOS"),
        (("a", [5]), "pair 0: context and continuation must both be text"),
        (([5], [300]), "pair 0: token 0 of the prompt is 300"),
        (([5] * 100, [6] * 29), "pair 0: the prompt has 129 tokens and max_model_len is 128"),
    ],
)
def test_pairs_that_cannot_be_scored_are_refused(tiny, pair, message):
    if pair[0] == "":
        tokenizer, tiny.maker._tokenizer = tiny.maker._tokenizer, without_bos(tiny.tokenizer)
        try:
            with pytest.raises(ValueError, match=message):
                tiny.score([pair])
        finally:
            tiny.maker._tokenizer = tokenizer
        return
    with pytest.raises(ValueError, match=message):
        tiny.score([pair])


def without_bos(tokenizer):
    import dataclasses

    return dataclasses.replace(tokenizer, bos_id=None)


def test_hidden_states_are_the_plain_passes(tiny):
    rng = np.random.default_rng(1)
    prompts = make_prompts(rng, 9, 1, 100)
    states = tiny.encode(prompts)
    from engine.models.decoder import final_norm

    for prompt, got in zip(prompts, states, strict=True):
        _, hidden = tiny.forward(prompt, hidden_states=True)
        want = np.asarray(final_norm(tiny.engine.worker.params, tiny.model_config, hidden[-1]))
        assert got.dtype == np.float32 and got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=1e-3)
    mean = tiny.embed(prompts)
    np.testing.assert_allclose(mean, [s.mean(axis=0) for s in states], atol=1e-5)
    last = tiny.embed(prompts, pooling="last", normalize=True)
    np.testing.assert_allclose(np.linalg.norm(last, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(last, [s[-1] / np.linalg.norm(s[-1]) for s in states], atol=1e-5)
    assert tiny.embed([]).shape == (0, tiny.model_config.width)
    with pytest.raises(ValueError, match="pooling='max' is not known; use one of mean, last"):
        tiny.embed(prompts, pooling="max")


def test_hidden_states_and_scores_survive_preemption(tiny):
    """With a pool too small for all, in company that decodes."""
    rng = np.random.default_rng(2)
    prompts = make_prompts(rng, 6, 40, 60)
    pairs = [(prompt[:20], prompt[20:]) for prompt in prompts]
    want_states, want_scores = tiny.encode(prompts), tiny.score(pairs)
    engine, small = tiny.engine, engine_on(tiny, num_pages=12, budget=8)
    tiny.engine = small
    try:
        for prompt in make_prompts(rng, 3, 10, 20):
            small.add_request(tiny.make_request(prompt, greedy(40))[0])
        states = tiny.encode(prompts)
        scores = tiny.score(pairs)
    finally:
        tiny.engine = engine
    assert small.stats()["preemptions"] > 0
    for got, want in zip(states, want_states, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    for got, want in zip(scores, want_scores, strict=True):
        np.testing.assert_allclose(got.token_logprobs, want.token_logprobs, atol=1e-4)


def test_a_scored_prompt_of_the_whole_context(tiny, oracle):
    """CASES L-01: a prompt as long as the context can be scored, and says nothing."""
    rng = np.random.default_rng(3)
    [prompt] = make_prompts(rng, 1, 128, 128)
    [output] = tiny.generate([prompt], SamplingParams(max_tokens=5, prompt_logprobs=0))
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    want = oracle.logprobs(tuple(prompt))
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 128
    for place in range(1, 128):
        got = output.prompt_logprobs[place][prompt[place]].logprob
        assert got == pytest.approx(want[place - 1, prompt[place]], abs=1e-4)

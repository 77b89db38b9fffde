# SPDX-License-Identifier: Apache-2.0
"""Every number against golden references, through the plain forward and through the pages."""

import json

import numpy as np
import pytest

from engine import LLM, SamplingParams
from tests.engine.conftest import GOLDEN, engine_on, greedy, run

TINY = json.loads((GOLDEN / "tiny.json").read_text())["archs"]
SMOLLM2 = json.loads((GOLDEN / "smollm2-135m-instruct.json").read_text())


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    high = logits.max(axis=-1, keepdims=True)
    return logits - high - np.log(np.exp(logits - high).sum(axis=-1, keepdims=True))


def assert_greedy(name, token_ids, expected, margins, least=0.02):
    """Invariant 1: equal up to the first margin under `least`."""
    small = next((i for i, margin in enumerate(margins) if margin < least), len(margins))
    assert token_ids[:small] == expected[:small], name


@pytest.fixture(scope="session", params=TINY)
def tiny_golden(request):
    return request.getfixturevalue(f"golden_{request.param}"), TINY[request.param]


def test_tiny_forward(tiny_golden):
    llm, golden = tiny_golden
    for case in golden["cases"]:
        logits = llm.forward(case["ids"])
        np.testing.assert_allclose(logits[:, case["cols"]], case["logits"], atol=1e-3)
        np.testing.assert_array_equal(logits.argmax(axis=-1), case["argmax"])
        total = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
        np.testing.assert_allclose(total, case["logsumexp"], atol=1e-3)


def test_hidden_states_are_every_layers(golden_llama):
    ids = TINY["llama"]["cases"][0]["ids"]
    logits, hidden = golden_llama.forward(ids, hidden_states=True)
    config, params = golden_llama.model_config, golden_llama.engine.params
    assert hidden.shape == (config.num_layers + 1, len(ids), config.width)
    np.testing.assert_array_equal(hidden[0], np.asarray(params["embedding"])[ids])
    last = hidden[-1].astype(np.float64)
    last /= np.sqrt((last**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    last *= np.asarray(params["final_norm"])
    np.testing.assert_allclose(last @ np.asarray(params["head"]).T, logits, atol=1e-4)


@pytest.mark.parametrize("budget", [7, 64])
def test_tiny_engine(tiny_golden, budget):
    """Chunks of 7 run padded in wider programs; windows free their pages on the way."""
    llm, golden = tiny_golden
    cases = golden["cases"]
    params = greedy(16, logprobs=3, prompt_logprobs=3)
    outputs = run(llm, engine_on(llm, budget=budget), [(case["ids"], params) for case in cases])
    for case, output in zip(cases, outputs, strict=True):
        completion = output.outputs[0]
        assert_greedy("tiny", completion.token_ids, case["greedy_ids"], case["greedy_margins"])
        assert completion.finish_reason == "length"
        columns = dict(zip(case["cols"], range(len(case["cols"])), strict=True))
        assert output.prompt_logprobs[0] is None
        for place, entry in enumerate(output.prompt_logprobs[1:]):
            assert case["ids"][place + 1] in entry
            best = min(entry, key=lambda token: entry[token].rank)
            assert best == case["argmax"][place]
            for token in entry.keys() & columns.keys():
                expected = case["logits"][place][columns[token]] - case["logsumexp"][place]
                assert entry[token].logprob == pytest.approx(expected, abs=1e-3)


def check_smollm2(llm):
    """Asserts all golden figures of SmolLM2 through the paged engine of `llm`."""
    prompts = SMOLLM2["prompts"]
    params = greedy(48, logprobs=5, prompt_logprobs=0)
    outputs = llm.generate([prompt["ids"] for prompt in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert_greedy(prompt["name"], completion.token_ids, prompt["greedy_ids"], prompt["margins"])
        for token, logit in prompt["top5"]:
            expected = logit - prompt["logsumexp"]
            assert completion.logprobs[0][token].logprob == pytest.approx(expected, abs=2e-3)
        small = next((i for i, m in enumerate(prompt["margins"]) if m < 0.02), 48)
        for place, expected in enumerate(prompt["logprobs"][:small]):
            entry = completion.logprobs[place][completion.token_ids[place]]
            assert entry.logprob == pytest.approx(expected, abs=2e-3), (prompt["name"], place)
    forced = SMOLLM2["teacher_forced"]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
    [output] = llm.generate(forced["ids"], scored)
    for place, expected in enumerate(forced["logprobs"]):
        entry = output.prompt_logprobs[place + 1]
        assert entry[forced["ids"][place + 1]].logprob == pytest.approx(expected, abs=2e-3)
        best = min(entry, key=lambda token: entry[token].rank)
        assert best == forced["argmax_ids"][place]
    for prompt in prompts:
        assert llm.tokenizer.encode(prompt["text"]) == prompt["ids"], prompt["name"]
        text = llm.tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=False)
        assert text == prompt["greedy_text"], prompt["name"]


def check_smollm2_forward(llm):
    """Asserts the golden figures of SmolLM2 through the plain forward of `llm`."""
    forced = SMOLLM2["teacher_forced"]
    logprobs = log_softmax(llm.forward(forced["ids"]))
    picked = logprobs[np.arange(len(forced["ids"]) - 1), forced["ids"][1:]]
    np.testing.assert_allclose(picked, forced["logprobs"], atol=2e-3)
    for prompt in SMOLLM2["prompts"]:
        last = llm.forward(prompt["ids"])[-1]
        top = np.argsort(-last, kind="stable")[:5]
        assert [int(token) for token in top] == [token for token, _ in prompt["top5"]]
        np.testing.assert_allclose(last[top], [x for _, x in prompt["top5"]], atol=2e-3)
        first = log_softmax(last)[prompt["greedy_ids"][0]]
        assert first == pytest.approx(prompt["logprobs"][0], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [7, 64])
def test_smollm2_gguf(smollm2_path, budget):
    llm = LLM(str(smollm2_path), max_num_seqs=2, max_num_batched_tokens=budget)
    check_smollm2(llm)
    if budget == 64:
        check_smollm2_forward(llm)


@pytest.mark.slow
def test_smollm2_huggingface_folder(smollm2_path, tmp_path):
    """Written by gguf-py; the programs are the GGUF's, so nothing is compiled for it."""
    from tests.engine.gguf_to_folder import write_folder  # gguf-py is a development package

    folder = str(write_folder(smollm2_path, tmp_path))
    for budget in (7, 64):
        llm = LLM(folder, max_num_seqs=2, max_num_batched_tokens=budget)
        assert llm.built.model.checkpoint.kind == "huggingface"
        check_smollm2(llm)
    check_smollm2_forward(llm)

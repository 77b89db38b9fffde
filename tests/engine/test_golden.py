# SPDX-License-Identifier: Apache-2.0
"""Every number against golden references, through the plain forward and through the pages."""

import functools
import json
import shutil

import numpy as np
import pytest

from checkpoints.huggingface_writer import write_huggingface
from checkpoints.orbax_writer import write_orbax
from engine import SamplingParams
from engine.export import Export
from engine.loading import open_model
from tests.engine.conftest import (
    GOLDEN,
    engine_on,
    golden,
    greedy,
    make_together,
    open_on_demand,
    parameters,
    run,
    same_parameters,
)

TINY = json.loads((GOLDEN / "tiny.json").read_text())["archs"]
REAL = {  # by the name in the store
    "smollm2-135m": "smollm2-135m-instruct.json",
    "gemma3-270m": "gemma3-270m.json",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct.json",
}
ATOL = 2e-3  # of logits and log-probabilities of the real models


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    high = logits.max(axis=-1, keepdims=True)
    return logits - high - np.log(np.exp(logits - high).sum(axis=-1, keepdims=True))


def assert_greedy(name, token_ids, expected, margins, least=0.02):
    """Invariant 1: equal up to the first margin under `least`."""
    small = next((i for i, margin in enumerate(margins) if margin < least), len(margins))
    assert token_ids[:small] == expected[:small], name


@pytest.fixture(scope="session", params=TINY)
def tiny_golden(request, own_cache):
    """One family after the other, so that few engines are there at a time."""
    llm, figures = golden(request.param), TINY[request.param]
    heads = [head for head in llm.built.ladder.heads() if head.kind in ("logprobs", "score")]
    keys = [*llm.built.ladder.bodies[:2], *heads[-2:]]
    forwards = [functools.partial(llm.forward, case["ids"]) for case in figures["cases"]]
    make_together(
        [*forwards, *(functools.partial(llm.engine.worker.programs.__getitem__, k) for k in keys)]
    )
    return llm, figures


def test_tiny_forward(tiny_golden):
    llm, figures = tiny_golden
    for case in figures["cases"]:
        logits = llm.forward(case["ids"])
        np.testing.assert_allclose(logits[:, case["cols"]], case["logits"], atol=1e-3)
        np.testing.assert_array_equal(logits.argmax(axis=-1), case["argmax"])
        total = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
        np.testing.assert_allclose(total, case["logsumexp"], atol=1e-3)


def test_hidden_states_are_every_layers(own_cache):
    golden_llama = golden("llama")
    ids = TINY["llama"]["cases"][0]["ids"]
    logits, hidden = golden_llama.forward(ids, hidden_states=True)
    config, params = golden_llama.model_config, golden_llama.engine.worker.params
    assert hidden.shape == (config.num_layers + 1, len(ids), config.width)
    np.testing.assert_array_equal(hidden[0], np.asarray(params["embedding"])[ids])
    last = hidden[-1].astype(np.float64)
    last /= np.sqrt((last**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    last *= np.asarray(params["final_norm"])
    np.testing.assert_allclose(last @ np.asarray(params["head"]).T, logits, atol=1e-4)


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_tiny_engine(tiny_golden, budget):
    """Chunks of 7 run padded in wider programs; windows free their pages on the way."""
    assert_tiny_engine(*tiny_golden, budget)


SOME = ("llama", "gpt_oss", "deepseek_v3")  # the others are long


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[pytest.mark.long] * (arch not in SOME)) for arch in TINY]
)
def test_tiny_engine_of_interpreted_kernels(arch, own_cache):
    llm = golden(arch, attention_backend="pallas", matmul_backend="pallas")
    assert llm.built.factory.cfg.attention.kind == "tpu"
    assert_tiny_engine(llm, TINY[arch], budget=7)


def assert_tiny_engine(llm, figures, budget):
    cases = figures["cases"]
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


def test_tiny_scores(tiny_golden):
    """`llm.score`: each token of the golden columns after each beginning of a text."""
    llm, figures = tiny_golden
    for case in figures["cases"]:
        places = range(0, len(case["ids"]), 5)
        pairs = [(case["ids"][: p + 1], [token]) for p in places for token in case["cols"]]
        expected = [logit - case["logsumexp"][p] for p in places for logit in case["logits"][p]]
        scores = llm.score(pairs)
        got = [score.sum_logprob for score in scores]
        np.testing.assert_allclose(got, expected, atol=1e-3)
        for score, (context, [token]) in zip(scores, pairs, strict=True):
            assert score.is_greedy == (token == case["argmax"][len(context) - 1])


class Deviations:
    """Collects how far figures are from the golden ones; `check` asserts that all are near."""

    def __init__(self):
        self.largest = 0.0

    def add(self, got, expected):
        # NumPy's maximum, unlike Python's, keeps a NaN, which no bound accepts.
        apart = np.max(np.abs(np.subtract(got, expected)))
        self.largest = float(np.maximum(self.largest, apart))

    def check(self, what):
        print(f"{what}: the largest deviation is {self.largest:.1e}")
        assert self.largest < ATOL, what


def test_a_nan_is_no_small_deviation():
    for figures in ([0.0, np.nan], [np.nan, 0.0]):
        deviations = Deviations()
        for figure in figures:
            deviations.add(figure, 0.0)
        with pytest.raises(AssertionError):
            deviations.check("planted")


def check_engine(llm, figures, budget, what):
    """Asserts all golden figures of a real model through pages, in chunks of `budget` tokens."""
    deviations = Deviations()
    prompts = figures["prompts"]
    params = greedy(48, logprobs=5, prompt_logprobs=0)
    jobs = [(prompt["ids"], params) for prompt in prompts]
    outputs = run(llm, engine_on(llm, budget=budget), jobs)
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert_greedy(prompt["name"], completion.token_ids, prompt["greedy_ids"], prompt["margins"])
        for token, logit in prompt["top5"]:
            deviations.add(completion.logprobs[0][token].logprob, logit - prompt["logsumexp"])
        small = next((i for i, m in enumerate(prompt["margins"]) if m < 0.02), 48)
        for place, expected in enumerate(prompt["logprobs"][:small]):
            entry = completion.logprobs[place][completion.token_ids[place]]
            deviations.add(entry.logprob, expected)
    forced = figures["teacher_forced"]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
    [output] = run(llm, engine_on(llm, budget=budget), [(forced["ids"], scored)])
    for place, expected in enumerate(forced["logprobs"]):
        entry = output.prompt_logprobs[place + 1]
        deviations.add(entry[forced["ids"][place + 1]].logprob, expected)
        best = min(entry, key=lambda token: entry[token].rank)
        assert best == forced["argmax_ids"][place]
    deviations.check(f"{what}, paged engine")
    for prompt in prompts:
        assert llm.tokenizer.encode(prompt["text"]) == prompt["ids"], prompt["name"]
        text = llm.tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=False)
        assert text == prompt["greedy_text"], prompt["name"]


def check_scores(llm, figures, what):
    """Asserts that `llm.score` gives the golden log-probabilities of a text's second half."""
    deviations, forced = Deviations(), figures["teacher_forced"]
    half = len(forced["ids"]) // 2
    [score] = llm.score([(forced["ids"][:half], forced["ids"][half:])])
    expected = forced["logprobs"][half - 1 :]
    deviations.add(score.token_logprobs, expected)
    assert score.sum_logprob == pytest.approx(sum(expected), abs=ATOL * len(expected))
    assert score.is_greedy == (forced["argmax_ids"][half - 1 :] == forced["ids"][half:])
    deviations.check(f"{what}, scores")


def check_forward(llm, figures, what):
    """Asserts the golden figures of a real model through the plain forward of `llm`."""
    deviations = Deviations()
    forced = figures["teacher_forced"]
    logprobs = log_softmax(llm.forward(forced["ids"]))
    picked = logprobs[np.arange(len(forced["ids"]) - 1), forced["ids"][1:]]
    deviations.add(picked, forced["logprobs"])
    for prompt in figures["prompts"]:
        # Each length that is rounded up to takes a program of its own: short prompts share the
        # text's. No token sees what is behind it.
        padding = [0] * max(0, len(forced["ids"]) - len(prompt["ids"]))
        last = llm.forward(prompt["ids"] + padding)[len(prompt["ids"]) - 1]
        top = np.argsort(-last, kind="stable")[:5]
        assert [int(token) for token in top] == [token for token, _ in prompt["top5"]]
        deviations.add(last[top], [logit for _, logit in prompt["top5"]])
        deviations.add(log_softmax(last)[prompt["greedy_ids"][0]], prompt["logprobs"][0])
    deviations.check(f"{what}, plain forward")


def golden_of(name):
    return json.loads((GOLDEN / REAL[name]).read_text())


def short(figures):
    """Returns the golden figures of the prompts of up to 32 tokens, and of no long text."""
    prompts = [prompt for prompt in figures["prompts"] if len(prompt["ids"]) <= 32]
    forced = figures["teacher_forced"]
    cut = {key: forced[key][:24] for key in ("ids", "logprobs", "argmax_ids")}
    cut["logprobs"], cut["argmax_ids"] = cut["logprobs"][:-1], cut["argmax_ids"][:-1]
    return figures | {"prompts": prompts, "teacher_forced": forced | cut}


def open_real(path):
    """Returns the LLM of a checkpoint; all kinds of a model's run the same programs."""
    return open_on_demand(path, max_model_len=1024, max_num_seqs=2, max_num_batched_tokens=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "smollm2-135m")) for n in REAL]
)
def test_real_model(users_model, tmp_path, name):
    """From GGUF against all golden figures; from every other checkpoint the same parameters.

    A budget of 7 tokens cuts short prompts into many chunks, padded in wider programs.
    """
    from tests.engine.gguf_to_folder import write_folder  # gguf-py is a development package

    figures = golden_of(name)
    llm = open_real(users_model(name))
    assert llm.built.model.checkpoint.kind == "gguf"
    check_engine(llm, figures, 64, f"{name}, 64 tokens a step")
    check_engine(llm, short(figures), 7, f"{name}, 7 tokens a step")
    check_scores(llm, figures, name)
    check_forward(llm, figures, name)
    original = open_model(users_model(name))
    export, expected = Export(original, np.dtype(np.float32)), parameters(original)
    folders = {  # by gguf-py, and none of our readings of the weights; then by ours
        "gguf-py": ("huggingface", lambda folder: write_folder(users_model(name), folder)),
        "converted": ("huggingface", lambda folder: write_huggingface(export, folder)),
        "orbax": ("orbax", lambda folder: write_orbax(export, folder)),
    }
    for origin, (kind, write) in folders.items():
        folder = tmp_path / origin
        if origin == "gguf-py":
            folder.mkdir()
        write(folder)
        other = open_model(folder)
        assert other.checkpoint.kind == kind and other.config == original.config
        # So their figures are the same.
        same_parameters(parameters(other), expected)
        shutil.rmtree(folder)

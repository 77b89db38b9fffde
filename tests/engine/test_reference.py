# SPDX-License-Identifier: Apache-2.0
"""The decoder equals a llama in NumPy: every rope (CASES K-03), head size (P-03) and vocabulary.

What the engine computes in pages equals this decoder's plain forward: tests/engine/test_ropes.py
and test_engine.py; here one model of odd sizes goes through pages too.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.loading import load_model, open_model
from engine.models.oracle import forward
from sharding import RULES, make_mesh
from tests.engine.conftest import engine_on, greedy, open_on_demand, run
from tests.engine.reference import llama_logits
from tests.fixtures import byte_tokenizer, write_tiny

CONTEXT, ORIGINAL = 128, 32
PLACES = [0, 1, 31, 32, 33, 127]
SCALED = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": SCALED,
    "yarn": SCALED,
    "yarn, other turns": SCALED | {"beta_fast": 8.0, "beta_slow": 0.5, "rope_theta": 5e5},
    "yarn, half a head": SCALED | {"partial_rotary_factor": 0.5},
    "llama3": SCALED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "short_factor": [1.0 + pair / 20 for pair in range(8)],
        "long_factor": [2.0 + pair / 2 for pair in range(8)],
        "original_max_position_embeddings": ORIGINAL,
    },
}


def load(folder):
    """Returns (parameters, config) of a folder, in float32."""
    model = open_model(folder)
    mesh = make_mesh(jax.local_devices()[:1])
    dtype = np.dtype(np.float32)
    return load_model(model, mesh, RULES, dtype, stacked=False), model.config


def some_ids(count, vocabulary=300):
    return np.random.default_rng(0).integers(3, vocabulary, count).astype(np.int32)


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_at_every_position(tmp_path, name):
    """In sequences that end at the original length, just past it, and at the context's end."""
    settings = {"rope_type": name.partition(",")[0], "rope_theta": 1e4} | ROPES[name]
    folder = write_tiny(tmp_path, rope_parameters=settings)
    params, config = load(folder)
    ids = some_ids(CONTEXT)
    plain = llama_logits(write_tiny(tmp_path / "plain"), ids)
    for length in (ORIGINAL, ORIGINAL + 1, CONTEXT):
        got, _ = forward(params, config, jnp.asarray(ids), length=length)
        want = llama_logits(folder, ids, length)
        places = [place for place in PLACES if place < length]
        np.testing.assert_allclose(got[np.array(places)], want[places], atol=1e-4)
        if name == "dynamic" and length == ORIGINAL:
            np.testing.assert_array_equal(want, plain)
    assert np.abs(want - plain)[CONTEXT - 1].max() > 0.1, "the scaling shows"


@pytest.mark.parametrize("name", ROPES)
def test_the_older_keys_say_the_same(tmp_path, name):
    """`type` for `rope_type`, and `rope_scaling` beside `rope_theta` for `rope_parameters`."""
    kind, settings = name.partition(",")[0], {"rope_theta": 1e4} | ROPES[name]
    new = write_tiny(tmp_path / "new", rope_parameters={"rope_type": kind} | settings)
    old = write_tiny(tmp_path / "old", rope_parameters={"type": kind} | settings)
    assert open_model(old).config == open_model(new).config
    base = settings.pop("rope_theta")
    older = {"rope_parameters": None, "rope_scaling": {"type": kind} | settings, "rope_theta": base}
    oldest = write_tiny(tmp_path / "oldest", **older)
    assert open_model(oldest).config == open_model(new).config


SIZES = {  # head_dim, vocabulary, query and KV heads; the width is 48 and divides none of them
    "2, one KV head": (2, 300, 4, 1),
    "6": (6, 257, 4, 2),
    "16, three heads": (16, 1021, 3, 3),
    "64": (64, 127, 4, 2),
    "80": (80, 301, 4, 2),
    "96": (96, 299, 4, 2),
    "112": (112, 511, 4, 2),
    "128": (128, 1025, 4, 2),
    "160": (160, 333, 4, 4),
    "256": (256, 129, 2, 1),
}


def write_sizes(folder, name):
    width, vocabulary, heads, groups = SIZES[name]
    sizes = {"head_dim": width, "num_attention_heads": heads, "num_key_value_heads": groups}
    return write_tiny(folder, vocab_size=vocabulary, num_hidden_layers=1, **sizes), vocabulary


COMMON = ("16, three heads", "64", "96", "112", "128")  # near what other tests have


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in COMMON)) for n in SIZES]
)
def test_any_head_size_and_vocabulary(tmp_path, name):
    folder, vocabulary = write_sizes(tmp_path, name)
    params, config = load(folder)
    assert config.attention_scale == pytest.approx(SIZES[name][0] ** -0.5), "of the true size"
    ids = some_ids(40, vocabulary)
    got, _ = forward(params, config, jnp.asarray(ids))
    want = llama_logits(folder, ids)
    assert got.shape == want.shape == (40, vocabulary)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_an_odd_size_in_pages(own_cache, tmp_path):
    """Heads of 80 that do not fill the width, and a vocabulary that no power of two divides."""
    folder, vocabulary = write_sizes(tmp_path, "80")
    llm = open_on_demand(folder, max_num_seqs=1, max_num_batched_tokens=8, num_pages=17)
    prompt = some_ids(20, vocabulary).tolist()
    [output] = run(llm, engine_on(llm), [(prompt, greedy(4, logprobs=1, prompt_logprobs=1))])
    said = output.outputs[0].token_ids
    logits = llama_logits(folder, [*prompt, *said])
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert said == logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist()
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for place, (token, entry) in enumerate(zip([*prompt, *said][1:], entries, strict=True)):
        assert entry[token].logprob == pytest.approx(logprobs[place, token], abs=1e-4)


def test_head_dim_of_the_config_wins_and_its_absence_is_the_width_shared(tmp_path):
    folder = write_tiny(tmp_path)
    assert open_model(folder).config.head_width == 16, "though 48 over 4 heads is 12"
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    assert open_model(folder).config.head_width == 12


def test_a_tokenizer_of_more_entries_than_the_vocabulary(own_cache, tmp_path):
    """CASES T-03, turned round: ids that the model lacks are refused by name, the others serve."""
    folder = write_tiny(tmp_path, vocab_size=290, tokenizer=byte_tokenizer())
    llm = open_on_demand(folder, max_num_seqs=1, max_num_batched_tokens=8, num_pages=17)
    assert llm.tokenizer.size == 300
    [request] = llm.make_request([289], greedy(1))[:1]
    assert request.prompt_token_ids == [289]
    assert llm.make_request("a", greedy(1))[0].prompt_token_ids
    with pytest.raises(ValueError, match="token 0 of the prompt is 299; ids are from 0 to 289"):
        llm.make_request("<note>", greedy(1))
    with pytest.raises(ValueError, match="token 2 of the prompt is 299"):
        llm.maker.pair_ids("a", "a<note>")
    assert llm.make_request("a", greedy(1, bad_words=["<note>"]))[0].bad_words == ()
    with pytest.raises(ValueError, match="token 0 of the prompt is 290; ids are from 0 to 289"):
        llm.make_request([290], greedy(1))

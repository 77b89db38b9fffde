# SPDX-License-Identifier: Apache-2.0
"""Ropes follow their formulas, and a config says the same in old keys, new keys and GGUF."""

import dataclasses
import json
import math
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.layers import rotate
from engine.loading import config_of, open_model
from engine.models import FAMILIES, gemma2, gemma3, llama, mixtral, phi3, qwen2, qwen3, qwen_moe
from engine.models.oracle import forward
from engine.models.rope import Rope, rope_tables
from engine.models.specs import layer_specs, outer_specs
from engine.models.tree import parameter_specs
from sharding import Spec
from tests.fixtures import write_tiny

TINY = pathlib.Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny"
LLAMA, QWEN2, GEMMA3, GEMMA2, QWEN3, PHI3, MIXTRAL, QWEN2_MOE, QWEN3_MOE = (
    json.loads((TINY / name / "config.json").read_text())
    for name in "llama qwen2 gemma3 gemma2 qwen3 phi3 mixtral qwen2_moe qwen3_moe".split()
)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def llama3_frequency(rope, frequency):
    """The rule of Llama 3.1, frequency by frequency, in terms of wavelengths."""
    wavelength = 2 * math.pi / frequency
    turns = rope.original_max_position / wavelength
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    if turns > rope.high_freq_factor:
        return frequency
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


FORMULAS = {
    "default": lambda rope, frequency: frequency,
    "linear": lambda rope, frequency: frequency / rope.factor,
    "llama3": llama3_frequency,
}
ROPES = {
    "default": Rope(10000.0),
    "linear": Rope(1e6, "linear", factor=8.0),
    "llama3": Rope(5e5, "llama3", factor=8.0, original_max_position=8192),
    "llama3, other factors": Rope(5e5, "llama3", 32.0, 2.0, 8.0, original_max_position=256),
    "llama3, tiny llama": llama.from_hf(LLAMA).ropes[0],
}


@pytest.mark.parametrize("head_width", [16, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies_follow_the_formulas(name, head_width):
    rope = ROPES[name]
    want = [
        FORMULAS[rope.kind](rope, rope.theta ** (-2 * i / head_width))
        for i in range(head_width // 2)
    ]
    np.testing.assert_allclose(rope.inverse_frequencies(head_width), want, rtol=1e-14)


def pair_with_turns(rope, width, turns):
    """Returns the pair, as a real number, that turns so often over the original context: sought."""
    low, high = -float(width), float(width)
    for _ in range(100):
        middle = (low + high) / 2
        made = rope.original_max_position * rope.theta ** (-2 * middle / width) / (2 * math.pi)
        low, high = (middle, high) if made > turns else (low, middle)
    return low


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("width, theta, original", [(64, 1e4, 4096), (16, 150000.0, 64)])
def test_yarn_keeps_fast_pairs_and_divides_slow_ones(width, theta, original, truncate):
    """A straight ramp between the pairs that turn 32 times and once; whole pairs if truncated."""
    rope = Rope(theta, "yarn", 40.0, original_max_position=original, truncate=truncate)
    fast, slow = pair_with_turns(rope, width, 32), pair_with_turns(rope, width, 1)
    if truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, width - 1)
    want = []
    for pair in range(width // 2):
        divided = min(max((pair - fast) / (slow - fast), 0), 1)
        frequency = theta ** (-2 * pair / width)
        want.append((1 - divided) * frequency + divided * frequency / 40)
    np.testing.assert_allclose(rope.inverse_frequencies(width), want, rtol=1e-9)
    assert want[-1] == pytest.approx(theta ** (-(width - 2) / width) / 40)


def test_the_rest_of_a_head_is_not_rotated():
    """Rotated in part, as phi3 has it: the first six coordinates as pairs (i, i + 3)."""
    rng = np.random.default_rng(0)
    x_TNH = rng.normal(size=(5, 2, 16)).astype(np.float32)
    cos, sin = rope_tables((Rope(1e4),), 6, jnp.arange(5, dtype=jnp.int32))
    got = np.asarray(rotate(jnp.asarray(x_TNH), cos[0], sin[0]))
    np.testing.assert_array_equal(got[..., 6:], x_TNH[..., 6:])
    angles = np.arange(5)[:, None] * 1e4 ** (-2 * np.arange(3) / 6)
    want = (x_TNH[..., :3] + 1j * x_TNH[..., 3:6]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(got[..., :3], want.real, atol=1e-5)
    np.testing.assert_allclose(got[..., 3:6], want.imag, atol=1e-5)


def dynamic_frequency(rope, width, length, pair):
    grown = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    return (rope.theta * grown ** (width / (width - 2))) ** (-2 * pair / width)


def test_ropes_that_depend_on_the_final_length():
    """Each token by its own sequence: none is scaled up to the original length."""
    dynamic = Rope(1e4, "dynamic", 4.0, original_max_position=32)
    lists = {"short_factors": (1.0,) * 8, "long_factors": (1.5, 2, 3, 4, 5, 6, 7, 8)}
    longrope = Rope(1e4, "longrope", original_max_position=32, attention_factor=1.25, **lists)
    position_T = jnp.array([31, 31, 100], jnp.int32)
    length_T = jnp.array([32, 33, 128], jnp.int32)
    cos, sin = rope_tables((dynamic, longrope), 16, position_T, length_T)
    plain = [1e4 ** (-2 * pair / 16) for pair in range(8)]
    for token, (position, length) in enumerate([(31, 32), (31, 33), (100, 128)]):
        grown = [dynamic_frequency(dynamic, 16, max(length, 32), pair) for pair in range(8)]
        divided = np.divide(plain, lists["long_factors" if length > 32 else "short_factors"])
        for place, (frequencies, scale) in enumerate([(grown, 1.0), (divided, 1.25)]):
            angles = position * np.array(frequencies)
            np.testing.assert_allclose(cos[place, token], scale * np.cos(angles), atol=1e-4)
            np.testing.assert_allclose(sin[place, token], scale * np.sin(angles), atol=1e-4)


def test_a_gguf_files_list_of_factors_is_llama3s_rule():
    llama3 = ROPES["llama3"]
    factors = Rope(llama3.theta).inverse_frequencies(16) / llama3.inverse_frequencies(16)
    tensors = {"rope_freqs.weight": factors}
    checkpoint = types.SimpleNamespace(
        kind="gguf", config=GGUF, tensors=tensors, read=tensors.__getitem__
    )
    family = next(family for family in FAMILIES if family.name == "llama")
    [rope] = config_of(family, checkpoint).ropes
    for length in (1, 10**6):
        got = rope.inverse_frequencies(16, length)
        np.testing.assert_allclose(got, llama3.inverse_frequencies(16), rtol=1e-12)
    assert rope.attention_factor == 1
    checkpoint.config = GGUF | {"llama.rope.scaling.factor": 2.0}
    [rope] = config_of(family, checkpoint).ropes
    np.testing.assert_allclose(
        rope.inverse_frequencies(16), llama3.inverse_frequencies(16) / 2, rtol=1e-12
    )


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "linear"}, "type linear has no 'factor'"),
        ({"factor": 4.0}, "has 'factor' but no 'rope_type'"),
        ({"rope_type": "llama3", "factor": 8.0}, "type llama3 has no 'high_freq_factor'"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "'mscale', which is not supported"),
        ({"rope_type": "linear", "factor": -2.0}, "factor -2.0; a positive number"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "longrope has no 'long_factor'"),
    ],
)
def test_a_rope_that_is_incomplete_or_unknown_is_named(scaling, message):
    with pytest.raises(ValueError, match=message):
        llama.from_hf(without(LLAMA, "rope_parameters") | {"rope_scaling": scaling})


def test_llama3_keeps_blends_and_divides():
    rope = ROPES["llama3"]
    ratio = rope.inverse_frequencies(64) / Rope(rope.theta).inverse_frequencies(64)
    assert ratio[0] == 1 and ratio[-1] == 1 / 8 and ((ratio > 1 / 8) & (ratio < 1)).any()


def test_rotated_heads_equal_complex_products_of_each_rope(shape_suffixes):
    config = gemma3.from_hf(GEMMA3)
    position_T = np.array([0, 1, 2, 100, 255, 4095], np.int32)
    x_TNH = np.random.default_rng(0).standard_normal((6, 3, 32)).astype(np.float32)
    cos, sin = rope_tables(config.ropes, config.rope_width, jnp.asarray(position_T))
    for index, rope in enumerate(config.ropes):
        got = np.asarray(rotate(jnp.asarray(x_TNH), cos[index], sin[index]))
        pairs = x_TNH[..., :16] + 1j * x_TNH[..., 16:].astype(np.float64)
        angles = position_T[:, None].astype(np.float64) * rope.inverse_frequencies(32)
        turned = pairs * np.exp(1j * angles)[:, None]
        want = np.concatenate([turned.real, turned.imag], axis=-1)
        # Angles are float32: half a unit in the last place of 4095, times heads of at most 5.
        np.testing.assert_allclose(got, want, atol=5 * 4096 * 2**-23)
        np.testing.assert_allclose(got[:3], want[:3], atol=1e-5)


def test_llama_config_in_old_and_new_keys():
    new = llama.from_hf(LLAMA)
    rope = dict(LLAMA["rope_parameters"])
    old = without(LLAMA, "rope_parameters") | {"rope_theta": rope.pop("rope_theta")}
    assert llama.from_hf(old | {"rope_scaling": rope}) == new
    older = without(rope, "rope_type") | {"type": rope["rope_type"]}
    assert llama.from_hf(old | {"rope_scaling": older}) == new
    assert new.ropes == (Rope(5e5, "llama3", 8.0, 1.0, 4.0, 32),)
    assert llama.from_hf(old | {"rope_scaling": None}).ropes == (Rope(5e5),)
    sizes = (
        new.width,
        new.ffn_width,
        new.num_layers,
        new.query_heads,
        new.kv_heads,
        new.head_width,
    )
    assert sizes == (64, 128, 3, 4, 2, 16)
    assert new.windows == (None,) * 3 and new.attention_scale == 0.25 and not new.tied_embeddings
    assert (new.bos_id, new.eos_ids, new.norm_eps) == (1, (2,), 1e-5)


def test_gemma3_config_in_old_and_new_keys():
    new = gemma3.from_hf(GEMMA3)
    old = without(GEMMA3, "rope_parameters", "layer_types", "_sliding_window_pattern") | {
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert gemma3.from_hf(old) == new
    assert new.ropes == (Rope(1e6, "linear", 8.0), Rope(10000.0))
    assert new.rope_of_layer == (1, 1, 0, 1) and new.windows == (16, 16, None, 16)
    assert new.embedding_scale == 8 and new.attention_scale == 32**-0.5
    assert new.qk_norm and new.post_norms and new.tied_embeddings
    unscaled = gemma3.from_hf(without(old, "rope_scaling", "rope_theta", "rope_local_base_freq"))
    assert unscaled.ropes == (Rope(1e6), Rope(10000.0))


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_rope_that_is_not_supported_is_named(key):
    message = "rope type 'mrope' is not supported; use a checkpoint with one of default, linear"
    scaling = {key: "mrope", "factor": 4.0}
    with pytest.raises(ValueError, match=message):
        llama.from_hf(without(LLAMA, "rope_parameters") | {"rope_scaling": scaling})
    nested = GEMMA3["rope_parameters"] | {"full_attention": scaling}
    with pytest.raises(ValueError, match=message):
        gemma3.from_hf(GEMMA3 | {"rope_parameters": nested})


@pytest.mark.parametrize(
    "read, config, message",
    [
        (llama.from_hf, without(LLAMA, "hidden_size"), "config has no 'hidden_size'"),
        (gemma3.from_hf, without(GEMMA3, "sliding_window"), "config has no 'sliding_window'"),
        (llama.from_hf, LLAMA | {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        (llama.from_hf, LLAMA | {"num_key_value_heads": 3}, "4 query heads cannot share 3 KV"),
        (
            gemma3.from_hf,
            GEMMA3 | {"num_hidden_layers": 5},
            "must be a list of 5, one for",
        ),
        (gemma3.from_hf, GEMMA3 | {"use_bidirectional_attention": True}, "a decoder is causal"),
        (llama.from_hf, LLAMA | {"partial_rotary_factor": 0.2}, "0.2 rotates 3 of a head's 16 coo"),
        (llama.from_hf, LLAMA | {"hidden_size": "64"}, "hidden_size '64'; a positive integer"),
        (qwen2.from_hf, QWEN2 | {"vocab_size": -1}, "vocab_size -1; a positive integer"),
        (llama.from_gguf, {"llama.block_count": 2}, "config has no 'llama.attention.head_count'"),
    ],
)
def test_a_config_that_cannot_be_built_says_why(read, config, message):
    with pytest.raises(ValueError, match=message):
        read(config)


def test_an_unreadable_config_names_its_checkpoint(tmp_path):
    folder = write_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"rope_parameters": {"rope_theta": [1]}}, "rope_theta .1.; a positive number"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers 'two'; a positive integer is needed"),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=f"{folder}: .*{message}"):
            open_model(folder)


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.context_length": 256,
    "llama.rope.freq_base": 5e5,
    "llama.vocab_size": 320,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_gguf_config_is_that_of_the_same_model_in_hugging_face_keys():
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    same = llama.from_hf(LLAMA | {"rope_parameters": rope, "tie_word_embeddings": True})
    assert llama.from_gguf(GGUF) == same
    tokens = without(GGUF, "llama.vocab_size") | {"tokenizer.ggml.tokens": ["x"] * 320}
    assert llama.from_gguf(tokens) == same
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert llama.from_gguf(GGUF | scaling).ropes == (Rope(5e5, "linear", 4.0),)
    older = {"llama.rope.scale_linear": 4.0}
    assert llama.from_gguf(GGUF | older).ropes == (Rope(5e5, "linear", 4.0),)
    bare = without(GGUF, "llama.attention.head_count_kv", "llama.attention.key_length")
    assert llama.from_gguf(bare).kv_heads == 4 and llama.from_gguf(bare).head_width == 16
    with pytest.raises(ValueError, match="GGUF rope scaling 'ntk' is not supported"):
        llama.from_gguf(GGUF | {"llama.rope.scaling.type": "ntk"})


def renamed(meta, architecture, **more):
    """Returns the metadata under another architecture, with `more` keys of it added."""
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in meta.items()}
    return keys | {f"{architecture}.{key.replace('__', '.')}": v for key, v in more.items()}


def test_qwen2_gguf_config_is_that_of_the_same_model_in_hugging_face_keys():
    same = QWEN2 | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert qwen2.from_gguf(renamed(GGUF, "qwen2")) == qwen2.from_hf(same)


GEMMA3_GGUF = renamed(
    GGUF,
    "gemma3",
    block_count=7,
    attention__key_length=32,
    attention__sliding_window=16,
    rope__freq_base=1e6,
)


def test_gemma3_gguf_config_is_that_of_the_same_model_in_hugging_face_keys():
    """What the file does not say: every sixth layer is full, and the others' rope has base 1e4."""
    old = without(GEMMA3, "rope_parameters", "layer_types", "_sliding_window_pattern") | {
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
    }
    assert gemma3.from_gguf(GEMMA3_GGUF) == gemma3.from_hf(old)
    assert gemma3.from_gguf(GEMMA3_GGUF).windows == (16,) * 5 + (None, 16)
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    scaled = gemma3.from_gguf(GEMMA3_GGUF | scaling)
    assert scaled.ropes == (Rope(1e6, "linear", 8.0), Rope(1e4)), "full layers only"
    newer = renamed(GEMMA3_GGUF, "gemma3", rope__freq_base_swa=5e3, attn_logit_softcapping=50.0)
    assert gemma3.from_gguf(newer).ropes[1] == Rope(5e3)
    assert gemma3.from_gguf(newer).attention_softcap == 50
    pattern = "gemma3.attention.sliding_window_pattern"
    assert gemma3.from_gguf(GEMMA3_GGUF | {pattern: 2}).rope_of_layer == (1, 0, 1, 0, 1, 0, 1)
    flags = [True, True, False, True, True, False, True]
    assert gemma3.from_gguf(GEMMA3_GGUF | {pattern: flags}).rope_of_layer == (1, 1, 0, 1, 1, 0, 1)


def test_gemma3_27b_alone_scales_queries_by_the_width_of_a_head():
    sizes = {"gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    sizes |= {"gemma3.attention.head_count_kv": 16, "gemma3.attention.key_length": 128}
    large = gemma3.from_gguf(GEMMA3_GGUF | sizes | {"gemma3.block_count": 62})
    assert large.attention_scale == (5376 / 32) ** -0.5 == 168**-0.5
    assert gemma3.from_gguf(GEMMA3_GGUF | sizes).attention_scale == 128**-0.5


def test_gguf_rope_scaling_is_read_or_refused_by_name():
    def ropes(**more):
        return qwen2.from_gguf(renamed(GGUF, "qwen2", **more)).ropes

    assert ropes(rope__scaling__type="none", rope__scaling__factor=4.0) == (Rope(5e5),)
    assert ropes(rope__scaling__type="linear", rope__scaling__factor=1.0) == (Rope(5e5),)
    assert ropes(rope__scaling__factor=4.0) == (Rope(5e5, "linear", 4.0),)
    assert ropes(rope__dimension_count=16) == (Rope(5e5),)
    with pytest.raises(ValueError, match="GGUF rope scaling 'ntk' is not supported; use none, li"):
        ropes(rope__scaling__type="ntk")
    with pytest.raises(ValueError, match="original_context_length is missing; yarn needs it"):
        ropes(rope__scaling__type="yarn", rope__scaling__factor=4.0)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    yarn = {f"rope__scaling__{key}": value for key, value in yarn.items()}
    [rope] = ropes(**yarn, rope__scaling__attn_factor=2.0, rope__scaling__yarn_beta_slow=2.0)
    assert (rope.beta_fast, rope.beta_slow, rope.original_max_position) == (32.0, 2.0, 64)
    assert rope.attention_factor == pytest.approx(2 * (0.1 * math.log(4) + 1))
    [rope] = ropes(**yarn, rope__scaling__yarn_log_multiplier=1.0)
    assert rope.attention_factor == 1
    with pytest.raises(ValueError, match="yarn_ext_factor 0.0 is not supported, but 1; use the Hu"):
        ropes(**yarn, rope__scaling__yarn_ext_factor=0.0)
    with pytest.raises(ValueError, match="qwen2.rope.dimension_count 7 rotates 7 of a head's 16"):
        ropes(rope__dimension_count=7)
    part = qwen2.from_gguf(renamed(GGUF, "qwen2", rope__dimension_count=8))
    assert part.rotary_width == 8


def gguf_rows(heads, head_width):
    """Returns, for each row of q or k in a GGUF file, which row of the original it is."""
    half = head_width // 2
    pairs = [(i, i + half) for i in range(half)]
    return [head * head_width + row for head in range(heads) for pair in pairs for row in pair]


@pytest.mark.parametrize("heads, head_width", [(4, 16), (2, 16), (1, 6)])
def test_unpermute_gives_the_original_rows_back(heads, head_width):
    weight = np.random.default_rng(0).standard_normal((heads * head_width, 5))
    stored = weight[gguf_rows(heads, head_width)]
    np.testing.assert_array_equal(llama.unpermute(heads)(stored), weight)


def test_gguf_q_and_k_are_unpermuted_by_their_own_heads():
    layers = llama.names("gguf", llama.from_gguf(GGUF)).layers
    for name, heads in (("q", 4), ("k", 2)):
        rows = np.arange(heads * 16)[:, None]
        np.testing.assert_array_equal(layers[name].transform(rows[gguf_rows(heads, 16)]), rows)
    assert {name for name, entry in layers.items() if entry.transform} == {"q", "k"}
    qwen = qwen2.names("gguf", qwen2.from_hf(QWEN2))
    assert not any(entry.transform for entry in [*qwen.outer.values(), *qwen.layers.values()])


@pytest.mark.parametrize(
    "family, kind, config",
    [
        (llama, "huggingface", llama.from_hf(LLAMA)),
        (llama, "huggingface", llama.from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True})),
        (llama, "huggingface", llama.from_hf(LLAMA | {"tie_word_embeddings": True})),
        (llama, "gguf", llama.from_gguf(GGUF)),
        (llama, "gguf", dataclasses.replace(llama.from_gguf(GGUF), tied_embeddings=False)),
        (qwen2, "huggingface", qwen2.from_hf(QWEN2)),
        (qwen2, "gguf", qwen2.from_hf(QWEN2 | {"tie_word_embeddings": False})),
        (gemma3, "gguf", gemma3.from_hf(GEMMA3)),
        (gemma3, "huggingface", gemma3.from_hf(GEMMA3)),
        (gemma3, "huggingface", gemma3.from_hf(GEMMA3 | {"tie_word_embeddings": False})),
        (qwen3, "gguf", qwen3.from_hf(QWEN3)),
        (gemma2, "gguf", gemma2.from_hf(GEMMA2)),
        (mixtral, "gguf", mixtral.from_hf(MIXTRAL)),
        (qwen_moe, "gguf", qwen_moe.from_hf(QWEN2_MOE)),
    ],
)
def test_every_parameter_has_one_tensor(family, kind, config):
    names = family.names(kind, config)
    assert set(names.layers) == set(layer_specs(config, np.dtype(np.float32)))
    assert set(names.outer) == set(outer_specs(config, np.dtype(np.float32)))
    entries = [*names.outer.values(), *names.layers.values()]
    assert len({entry.tensor for entry in entries}) == len(entries)
    assert all("{layer}" in entry.tensor for entry in names.layers.values())


SLIDING_QWEN2 = QWEN2 | {
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}


def test_qwen2_config_in_old_and_new_keys():
    new = qwen2.from_hf(QWEN2)
    old = without(QWEN2, "rope_parameters", "layer_types") | {"rope_theta": 1e6}
    assert qwen2.from_hf(old) == new
    assert qwen2.from_hf(old | {"sliding_window": 16, "max_window_layers": 1}) == new
    assert new.ropes == (Rope(1e6),) and new.windows == (None,) * 3 and new.tied_embeddings
    assert new.qkv_bias and not new.output_bias and not new.mlp_bias
    slides = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    assert qwen2.from_hf(old | slides) == qwen2.from_hf(SLIDING_QWEN2)
    assert qwen2.from_hf(SLIDING_QWEN2).windows == (None, 16, 16)


CONFIGS = {
    "llama": llama.from_hf(LLAMA),
    "llama, biases": llama.from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama, several ends": llama.from_hf(LLAMA | {"eos_token_id": [2, 7], "bos_token_id": None}),
    "llama, linear": dataclasses.replace(
        llama.from_hf(LLAMA), ropes=(Rope(1e4, "linear", 4.0),), eos_ids=()
    ),
    "qwen2": qwen2.from_hf(QWEN2),
    "qwen2, windows": qwen2.from_hf(SLIDING_QWEN2),
    "gemma3": gemma3.from_hf(GEMMA3),
    "gemma3, 27B's scale": gemma3.from_hf(GEMMA3 | {"query_pre_attn_scalar": 168}),
    "gemma3, softcaps": gemma3.from_hf(
        GEMMA3 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    ),
    "gemma3, no window": gemma3.from_hf(GEMMA3 | {"layer_types": ["full_attention"] * 4}),
    "gemma2": gemma2.from_hf(GEMMA2),
    "gemma": gemma2.from_hf(without(GEMMA2, "layer_types") | {"model_type": "gemma"}),
    "qwen3": qwen3.from_hf(QWEN3),
    "phi3": phi3.from_hf(PHI3),
    "phi3, window": phi3.from_hf(PHI3 | {"sliding_window": 16}),
    "mixtral": mixtral.from_hf(MIXTRAL),
    "mixtral, window": mixtral.from_hf(MIXTRAL | {"sliding_window": 16}),
    "qwen2_moe": qwen_moe.from_hf(QWEN2_MOE),
    "qwen3_moe": qwen_moe.from_hf(QWEN3_MOE),
    "qwen3_moe, windows": qwen_moe.from_hf(
        QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    ),
}


def family_of(model_type):
    return next(family for family in FAMILIES if model_type in family.model_types)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_written_for_hugging_face_reads_back_the_same(name):
    config = CONFIGS[name]
    family = next(f for f in FAMILIES if config.family in (f.name, *f.model_types))
    written = json.loads(json.dumps(family.to_hf(config)))
    assert written["model_type"] in family.model_types and "dtype" not in written
    assert family.from_hf(written) == config


NO_WINDOW = QWEN2_MOE | {"sliding_window": None}  # transformers writes 0 for none


@pytest.mark.parametrize(
    "original", [LLAMA, QWEN2, SLIDING_QWEN2, GEMMA3, GEMMA2, QWEN3, NO_WINDOW]
)
def test_a_written_config_says_what_the_original_said(original):
    """Keys of the folders that transformers wrote: each value that we write is theirs."""
    family = family_of(original["model_type"])
    written = family.to_hf(family.from_hf(original))
    assert set(written) - set(original) <= {"head_dim"}
    assert {key: original[key] for key in written if key in original} == {
        key: value for key, value in written.items() if key in original
    }


@pytest.mark.parametrize("config", [llama.from_hf(LLAMA), gemma3.from_hf(GEMMA3)])
def test_every_transform_of_hugging_face_names_is_undone_by_its_inverse(config):
    family = next(family for family in FAMILIES if family.name == config.family)
    names = family.names("huggingface", config)
    stored = np.random.default_rng(0).standard_normal(8).astype(np.float32)
    for entry in [*names.outer.values(), *names.layers.values()]:
        assert (entry.transform is None) == (entry.inverse is None)
        if entry.transform:
            there = entry.transform(stored)
            np.testing.assert_array_equal(entry.transform(entry.inverse(there)), there)
            np.testing.assert_allclose(entry.inverse(there), stored, atol=2**-23)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "config",
    [llama.from_hf(LLAMA), qwen2.from_hf(QWEN2), gemma3.from_hf(GEMMA3)],
    ids=["llama", "qwen2", "gemma3"],
)
def test_names_in_the_decoder_state_the_shapes(config, stacked, dtype, shape_suffixes):
    specs = parameter_specs(config, np.dtype(dtype), stacked=stacked)
    is_spec = {"is_leaf": lambda leaf: isinstance(leaf, Spec)}
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs, **is_spec)
    for tokens in (7, 1):
        token_T = jax.ShapeDtypeStruct((tokens,), np.int32)
        logits, hidden = jax.eval_shape(lambda p, t: forward(p, config, t), params, token_T)
        assert logits.shape == (tokens, 320) and logits.dtype == np.float32
        assert hidden.shape == (config.num_layers + 1, tokens, 64) and hidden.dtype == dtype


@pytest.mark.parametrize(
    "read, config, message",
    [
        (
            gemma3.from_hf,
            GEMMA3 | {"layer_types": ["chunked_attention"] * 4},
            "'chunked_attention'",
        ),
        (gemma3.from_hf, GEMMA3 | {"layer_types": ["full_attention"]}, "a list of 4, one for each"),
        (gemma3.from_hf, GEMMA3 | {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        (
            gemma3.from_hf,
            GEMMA3 | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "no 'sliding_attention'",
        ),
        (gemma3.from_hf, GEMMA3 | {"eos_token_id": [[2]]}, "where token ids are needed"),
    ],
)
def test_what_a_config_says_is_read_or_refused(read, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(config)

# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of each family is the model of the Hugging Face folder it was converted from."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.huggingface_writer import write_huggingface
from engine.export import Export
from engine.loading import check_model, open_model
from engine.models.oracle import forward_jit
from sharding import RULES, make_mesh
from tests.checkpoints.gguf_files import write_gguf
from tests.engine.conftest import GOLDEN, parameters, same_parameters
from tests.engine.folder_to_gguf import F16, F32, Q4_K, Q6_K, Q8_0, metadata, write_model

CASES = json.loads((GOLDEN / "tiny.json").read_text())["archs"]
GOLDEN_ONES = "llama qwen2 qwen3 gemma2 gemma3 phi3 mixtral qwen2_moe".split()
SCALING = {"original_max_position_embeddings": 64, "rope_theta": 1e4}
LONGROPE = SCALING | {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.125, 1.25, 1.5],
    "long_factor": [1.0, 2.5, 3.0, 4.0],
}
YARN = SCALING | {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def golden(name):
    """Returns config and tensors of a golden folder."""
    folder = GOLDEN / "tiny" / name
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def gemma2():
    """The file does not say how queries are scaled, but by the head's width: q makes up for it."""
    config, tensors = golden("gemma2")
    scale = np.float32((config["head_dim"] / config["query_pre_attn_scalar"]) ** 0.5)
    scaled = {name: x * scale if "q_proj" in name else x for name, x in tensors.items()}
    return config | {"query_pre_attn_scalar": config["head_dim"]}, scaled


def gemma():
    """A gemma2 without what the second has."""
    config, tensors = golden("gemma2")
    config["model_type"] = "gemma"
    for key in (
        "sliding_window",
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ):
        del config[key]
    return config, {name: x for name, x in tensors.items() if "feedforward" not in name}


def qwen3_moe():
    """Without its dense layer, which files have no place for."""
    config, tensors = golden("qwen3_moe")
    moved = {
        name.replace("layers.1.", "layers.0.").replace("layers.2.", "layers.1."): x
        for name, x in tensors.items()
        if "layers.0." not in name
    }
    return config | {"num_hidden_layers": 2, "mlp_only_layers": []}, moved


def biased():
    """A llama with biases everywhere, which no metadata tell of."""
    config, tensors = golden("llama")
    rng = np.random.default_rng(0)
    biases = {
        name.replace("weight", "bias"): rng.normal(0, 1, len(x)).astype(np.float32)
        for name, x in tensors.items()
        if "_proj" in name
    }
    return config | {"attention_bias": True, "mlp_bias": True}, tensors | biases


def with_rope(name, rope):
    config, tensors = golden(name)
    return config | {"rope_parameters": rope, "original_max_position_embeddings": 64}, tensors


MODELS = {name: lambda name=name: golden(name) for name in GOLDEN_ONES} | {
    "gemma2": gemma2,
    "gemma": gemma,
    "qwen3_moe": qwen3_moe,
    "llama, biases": biased,
    "phi3, longrope": lambda: with_rope("phi3", LONGROPE),
    "qwen3, yarn": lambda: with_rope("qwen3", YARN),
    "mixtral, linear": lambda: with_rope("mixtral", LINEAR),
}
FAMILIES = [name for name in MODELS if "," not in name]


def two_models(folder, config, tensors, kinds):
    """Returns the model of a GGUF file, and that of the folder of what the file decodes to."""
    folder.mkdir()
    decoded = write_model(folder / "m.gguf", config, tensors, kinds)
    assert decoded.keys() == tensors.keys()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(decoded, folder / "model.safetensors")
    return open_model(folder / "m.gguf"), open_model(folder), decoded


def same_config(one, other):
    """Asserts that two configs are equal but for float32, and for ropes that are given as lists."""
    for mine, theirs in zip(one.ropes, other.ropes, strict=True):
        for length in (1, 65, 10**6):
            np.testing.assert_allclose(
                mine.inverse_frequencies(one.rope_width, length),
                theirs.inverse_frequencies(other.rope_width, length),
                rtol=1e-6,
            )
        assert mine.attention_factor == pytest.approx(theirs.attention_factor, rel=1e-6)
    assert one.norm_eps == pytest.approx(other.norm_eps, rel=1e-6)
    assert dataclasses.replace(one, ropes=other.ropes, norm_eps=other.norm_eps) == other


@pytest.mark.parametrize("name", MODELS)
def test_floats_give_the_folders_model_and_come_back(tmp_path, name):
    config, tensors = MODELS[name]()
    model, folder, decoded = two_models(tmp_path / "F16", config, tensors, [F16])
    same_config(model.config, folder.config)
    params = parameters(model)
    same_parameters(params, parameters(folder))
    for part, values in decoded.items():
        wanted = tensors[part]
        rounded = values.ndim == 2 and "gate.weight" not in part  # but what routes
        np.testing.assert_array_equal(values, wanted.astype(np.float16) if rounded else wanted)
    export = Export(model, np.dtype(np.float32))
    assert export.tensors.keys() == tensors.keys()
    for part in reversed(export.tensors):  # in any order
        # Norms lose a bit where 1 is added to them and taken off again.
        atol = 2**-23 * (1 + abs(decoded[part]).max()) if part.endswith("norm.weight") else 0
        np.testing.assert_allclose(export.read(part), decoded[part], rtol=0, atol=atol)
    write_huggingface(export, tmp_path / "written")
    written = open_model(tmp_path / "written")
    assert written.config == model.config and written.family is model.family
    same_parameters(parameters(written), params)


def f16_bound(config, logits):
    """Returns how far F16 matrices may move logits.

    A weight moves by at most 2^-11 of itself, a third of that squared on average, independently; so
    does an output of a matrix, and the parts add up as squares: up to 9 matrices on the way through
    a layer, one before, one after. Of a thousand logits none is expected 6 deviations off.
    """
    parts = 9 * config.num_layers + 2
    return 6 * (parts / 3) ** 0.5 * 2**-11 * np.abs(logits).max()


@pytest.mark.parametrize("name", GOLDEN_ONES)
def test_logits_are_the_golden_ones(tmp_path, name):
    config, tensors = MODELS[name]()
    case = CASES[name]["cases"][0]
    expected = np.array(case["logits"])
    model = two_models(tmp_path / "F32", config, tensors, [F32])[0]
    bounds = {model: 1e-3}
    if model.config.experts is None:  # of which rounding turns some choices over
        half = two_models(tmp_path / "F16", config, tensors, [F16])[0]
        bounds[half] = f16_bound(model.config, expected)
    for one, bound in bounds.items():
        logits, _ = forward_jit(parameters(one), model.config, np.array(case["ids"], np.int32))
        apart = np.abs(np.asarray(logits)[:, case["cols"]] - expected).max()
        assert apart < bound


def widened(config, tensors, times=8):
    """Returns a random model whose rows are `times` as long: whole blocks of K types."""
    widths = [k for k in config if k.endswith("_size") and k != "vocab_size"] + ["head_dim"]
    wide = {key: config[key] * times for key in widths if config.get(key)}
    rng, random = np.random.default_rng(1), {}
    for name, x in tensors.items():
        kept = ("embed_tokens", "lm_head", "gate.weight", "shared_expert_gate")
        rows = x.shape[0] if any(part in name for part in kept) else x.shape[0] * times
        shape = (rows, *(width * times for width in x.shape[1:]))
        random[name] = rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
    return config | wide, random


@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_matrices_are_what_the_gguf_package_decodes(tmp_path, name):
    config, tensors = widened(*MODELS[name]())
    if config.get("query_pre_attn_scalar"):
        config["query_pre_attn_scalar"] = config["head_dim"]
    model, folder, _ = two_models(tmp_path / "K", config, tensors, [Q8_0, Q4_K, Q6_K])
    assert {info.dtype for info in model.checkpoint.tensors.values()} == {
        "F32", "Q8_0", "Q4_K", "Q6_K",
    }  # fmt: skip
    same_config(model.config, folder.config)
    same_parameters(parameters(model), parameters(folder))


def tiny_file(path, name, changes=(), without=()):
    """Writes a file of a golden model, some metadata added, some tensors left out."""
    config, tensors = MODELS[name]()
    write_model(path, config, tensors, [F32])
    reader = gguf.GGUFReader(path)
    kept = {t.name: (t.data.copy(), t.tensor_type) for t in reader.tensors if t.name not in without}
    architecture = reader.fields["general.architecture"].contents()
    write_gguf(path, kept, [*metadata(config), *changes], architecture)
    return path


@pytest.mark.parametrize(
    "name, changes, without, message",
    [
        (
            "mixtral",
            [("add_expert_weights_scale", 2.5)],
            (),
            "llama.expert_weights_scale 2.5 is not supported",
        ),
        (
            "qwen3, yarn",
            [("add_rope_scaling_yarn_attn_factor", 1.5)],
            (),
            "yarn_attn_factor 1.5 is not supported, but 1.13863",
        ),
        (
            "phi3, longrope",
            [],
            ("rope_factors_long.weight",),
            "of rope_factors_short.weight and rope_factors_long.weight one is missing",
        ),
        (
            "phi3",
            [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE)],
            (),
            "scaling.type is longrope, but rope_factors_short.weight and rope_factors_long.weight",
        ),
        (
            "llama",
            [
                ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
                ("add_rope_scaling_factor", 4.0),
                ("add_rope_scaling_orig_ctx_len", 64),
            ],
            (),
            "llama.rope.scaling.type is yarn, beside lists of rope factors",
        ),
        (
            "qwen3_moe",
            [],
            ("blk.0.ffn_gate_inp.weight",),
            "tensors are missing: blk.0.ffn_gate_inp.weight",
        ),
    ],
)
def test_what_a_file_cannot_mean_is_refused_in_a_line(tmp_path, name, changes, without, message):
    path = tiny_file(tmp_path / "m.gguf", name, changes, without)
    with pytest.raises(ValueError, match=message) as caught:
        model = open_model(path)
        mesh = make_mesh()
        check_model(model, mesh, RULES, np.dtype(np.float32), stacked=False)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_read_is_the_callers_own(tmp_path):
    """Though a tensor of all experts is kept while they are read."""
    export = Export(open_model(tiny_file(tmp_path / "m.gguf", "mixtral")), np.dtype(np.float32))
    for name, wanted in MODELS["mixtral"]()[1].items():
        export.read(name)[...] = np.nan
        np.testing.assert_array_equal(export.read(name), wanted)


def test_what_a_config_cannot_say_is_not_written(tmp_path):
    """A plain rope with a factor of its cosines runs, but config.json has no word for it."""
    path = tiny_file(tmp_path / "m.gguf", "qwen3", [("add_rope_scaling_attn_factors", 1.5)])
    model = open_model(path)
    assert model.config.ropes[0].attention_factor == 1.5
    with pytest.raises(ValueError, match="config.json of a qwen3 cannot say its ropes; use the GG"):
        Export(model, np.dtype(np.float32))

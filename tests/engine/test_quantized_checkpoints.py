# SPDX-License-Identifier: Apache-2.0
"""A model whose weights are stored in FP8 or MXFP4 is the model of the decoded weights."""

import json
import logging

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.huggingface_writer import write_huggingface
from engine.export import Export
from engine.loading import check_model, load_model, open_model, stored_dtype
from sharding import RULES, make_mesh
from tests.engine.conftest import GOLDEN

FLOAT8 = ml_dtypes.float8_e4m3fn
BLOCK = 24  # divides no size of the tiny llama
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def write(folder, config, tensors, settings=None):
    folder.mkdir()
    config = config | ({} if settings is None else {"quantization_config": settings})
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / FILE)
    return folder


FILE = "model.safetensors"


def golden(name):
    folder = GOLDEN / "tiny" / name
    return json.loads((folder / "config.json").read_text()), load_file(folder / FILE)


def per_tensor(weight):
    return np.full((), np.abs(weight).max() / 448, np.float32), lambda scale: scale


def per_channel(weight):
    return np.abs(weight).max(axis=1, keepdims=True) / np.float32(448), lambda scale: scale


def per_block(weight):
    """Returns a scale a block, and how to see it as large as the weight: one block at a time."""
    down, across = (range(0, size, BLOCK) for size in weight.shape)
    blocks = [[weight[i : i + BLOCK, j : j + BLOCK] for j in across] for i in down]
    scale = np.array([[np.abs(block).max() / 448 for block in row] for row in blocks], np.float32)

    def spread(scale):
        parts = [
            [np.full(block.shape, scale[i, j]) for j, block in enumerate(row)]
            for i, row in enumerate(blocks)
        ]
        return np.block(parts).astype(np.float32)

    return scale, spread


LAYOUTS = {
    "per tensor": (per_tensor, "_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "per channel": (per_channel, "_scale", {"quant_method": "compressed-tensors"}),
    "blocks": (
        per_block,
        "_scale_inv",
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    ),
}


def in_fp8(tensors, layout, left_out=("embed_tokens", "lm_head", "layers.1.mlp.up_proj")):
    """Returns the tensors in FP8, and the ones that they mean in float32."""
    scale_of, suffix, _ = LAYOUTS[layout]
    coded, decoded = {}, dict(tensors)
    for name, weight in tensors.items():
        if weight.ndim != 2 or any(part in name for part in left_out):
            coded[name] = weight
            continue
        scale, spread = scale_of(weight)
        codes = np.clip(weight / spread(scale), -448, 448).astype(FLOAT8)
        coded |= {name: codes, name + suffix: scale}
        coded[name.removesuffix("weight") + "input_scale"] = np.ones((), np.float32)
        decoded[name] = (codes.astype(np.float64) * spread(scale)).astype(np.float32)
    return coded, decoded


def parameters(model, dtype=F32, devices=1, stacked=False):
    mesh = make_mesh(jax.local_devices()[:devices], tensor=devices)
    return load_model(model, mesh, RULES, dtype, stacked=stacked)


def same_parameters(one, other):
    assert len(jax.tree.leaves(one)) > 10
    jax.tree.map(np.testing.assert_array_equal, one, other)


def silent_check(model, caplog):
    """Asserts that a model's tensors are all there, all fit, and none is left over."""
    with caplog.at_level(logging.WARNING):
        mesh = make_mesh(jax.local_devices()[:1])
        check_model(model, mesh, RULES, F32, stacked=False)
    assert not caplog.records


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_llama_in_fp8_has_the_decoded_parameters(layout, tmp_path, caplog):
    config, tensors = golden("llama")
    coded, decoded = in_fp8(tensors, layout)
    assert sum(array.dtype == FLOAT8 for array in coded.values()) > 12
    model = open_model(write(tmp_path / "fp8", config, coded, LAYOUTS[layout][2]))
    plain = open_model(write(tmp_path / "plain", config, decoded))
    silent_check(model, caplog)
    assert stored_dtype(model.checkpoint) == BF16 and stored_dtype(plain.checkpoint) == F32
    assert model.config == plain.config
    expected = parameters(plain)
    same_parameters(parameters(model), expected)
    same_parameters(parameters(model, devices=2), expected)
    same_parameters(parameters(model, BF16, stacked=True), parameters(plain, BF16, stacked=True))
    # The rounding is that of FP8, not of a scale that was left out.
    for name, weight in tensors.items():
        np.testing.assert_allclose(decoded[name], weight, atol=0.07 * np.abs(weight).max())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))


def test_a_head_in_fp8_is_compared_with_the_embedding_as_decoded(tmp_path, capsys):
    config, tensors = golden("llama")
    tied = config | {"tie_word_embeddings": True}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    coded, decoded = in_fp8(tensors, "per channel", left_out=("embed_tokens",))
    model = open_model(write(tmp_path / "m", tied, coded))
    assert not model.config.tied_embeddings
    assert "the stored head is used" in capsys.readouterr().err
    head = np.asarray(parameters(model)["head"])
    np.testing.assert_array_equal(head, decoded["lm_head.weight"])


def test_a_missing_scale_stops_the_opening(tmp_path):
    config, tensors = golden("llama")
    coded, _ = in_fp8(tensors, "blocks")
    gone = "model.layers.0.mlp.down_proj.weight"
    del coded[gone + "_scale_inv"]
    with pytest.raises(ValueError, match=f"'{gone}' is stored as F8_E4M3, so one scale is needed"):
        open_model(write(tmp_path / "m", config, coded, LAYOUTS["blocks"][2]))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_mxfp4(tensors, rng):
    """Returns gpt-oss's tensors with random experts in MXFP4, and what they mean in bfloat16."""
    coded, decoded = dict(tensors), dict(tensors)
    for name in tensors:
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = tensors[name].shape
        shape = (experts, outputs, inputs // 32)
        blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        scales = rng.integers(118, 122, shape, dtype=np.uint8)
        del coded[name]
        coded |= {name + "_blocks": blocks, name + "_scales": scales}
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*shape, 32)
        values = FP4[codes] * 2.0 ** (scales[..., None].astype(np.float64) - 127)
        values = values.reshape(experts, outputs, inputs).transpose(0, 2, 1)
        assert values.shape == tensors[name].shape
        decoded[name] = values.astype(BF16)
    return coded, decoded


def test_gpt_oss_in_mxfp4_is_the_same_model_in_bfloat16(tmp_path, caplog):
    # The golden checkpoint's experts are 48 wide, which groups of 32 do not divide.
    config, tensors = golden("gpt_oss")
    config["intermediate_size"] = 64
    rng = np.random.default_rng(6)
    for name, array in tensors.items():
        if ".experts." in name:
            shape = tuple({48: 64, 96: 128}.get(size, size) for size in array.shape)
            tensors[name] = rng.normal(0, 0.05, shape).astype(np.float32)
    coded, decoded = in_mxfp4(tensors, rng)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    model = open_model(write(tmp_path / "mxfp4", config, coded, settings))
    plain = open_model(write(tmp_path / "plain", config, decoded))
    silent_check(model, caplog)
    assert stored_dtype(model.checkpoint) == BF16
    for name, info in model.checkpoint.tensors.items():
        assert info.shape == plain.checkpoint.tensors[name].shape
    expected = parameters(plain)
    same_parameters(parameters(model), expected)
    same_parameters(parameters(model, BF16), parameters(plain, BF16))
    # Converted, it is a plain checkpoint of the same weights.
    write_huggingface(Export(model, F32), tmp_path / "converted")
    converted = open_model(tmp_path / "converted")
    assert "quantization_config" not in converted.checkpoint.config
    same_parameters(parameters(converted), expected)

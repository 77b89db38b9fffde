# SPDX-License-Identifier: Apache-2.0
"""Weights in codes are seen as plain ones; a scale is never skipped, and what is wrong is named."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
from checkpoints.load import load_parameters, warn_of_unused
from checkpoints.sources import Source, Target

RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 120, (40, 24), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
VALUES = CODES.astype(np.float32)
NORM = np.arange(24).astype(ml_dtypes.bfloat16)
HALF = np.float32(0.5)
PLAIN = {"norm.weight": NORM}
BLOCKS = RNG.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
SCALES = RNG.integers(120, 130, (2, 6, 3), dtype=np.uint8)
KEY = "quantization_config"
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["norm"]}


def open_folder(folder, tensors, settings=None):
    folder.mkdir()
    config = {"model_type": "llama"} | ({} if settings is None else {KEY: settings})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return checkpoints.open_checkpoint(folder)


GROUP = {"weights": {"num_bits": 8, "type": "float", "block_structure": [16, 16]}}
SETTINGS = {
    "fp8": FP8,
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": None},
    "none": None,
}


@pytest.mark.parametrize("name", ["w.weight_scale", "w.weight_scale_inv"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", [(), (1,), (40,), (40, 1), (3, 2)])
def test_fp8_weights_by_the_shape_of_their_scale(tmp_path, shape, settings, name):
    scale = RNG.uniform(0.01, 1, shape).astype(np.float32)
    tensors = PLAIN | {"w.weight": CODES, name: scale}
    if shape == (3, 2) and settings in ("none", "fbgemm_fp8"):  # which state no size of blocks
        refused(tmp_path / "m", tensors, SETTINGS[settings], r"one a block of \(128, 128\)")
        return
    checkpoint = open_folder(tmp_path / "m", tensors, SETTINGS[settings])
    assert checkpoint.kind == "huggingface" and checkpoint.path == tmp_path / "m"
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.tensors == {"norm.weight": ((24,), "BF16"), "w.weight": ((40, 24), "F8_E4M3")}
    full = scale.reshape(-1, 1) if shape in ((40,), (40, 1)) else scale
    if shape == (3, 2):
        full = scale[np.arange(40)[:, None] // 16, np.arange(24) // 16]
    got = checkpoint.read("w.weight")
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, VALUES * full)
    np.testing.assert_array_equal(checkpoint.read("norm.weight"), NORM)
    with pytest.raises(KeyError):
        checkpoint.read(name)


def test_blocks_are_of_128_unless_the_config_says_otherwise(tmp_path):
    codes = np.full((200, 300), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)  # ones
    scale = np.arange(6, dtype=np.float32).reshape(2, 3)
    got = open_folder(tmp_path / "m", {"w": codes, "w_scale_inv": scale}).read("w")
    for i, j in [(0, 0), (127, 127), (128, 128), (199, 255), (199, 299)]:
        assert got[i, j] == scale[i // 128, j // 128]


def test_e5m2_and_scales_in_bfloat16(tmp_path):
    codes = np.arange(120, dtype=np.uint8).reshape(40, 3).view(ml_dtypes.float8_e5m2)
    scale = np.linspace(0.5, 2, 40).astype(ml_dtypes.bfloat16).reshape(40, 1)
    checkpoint = open_folder(tmp_path / "m", {"w.weight": codes, "w.weight_scale": scale})
    assert checkpoint.tensors["w.weight"].dtype == "F8_E5M2"
    expected = codes.astype(np.float32) * scale.astype(np.float32)
    np.testing.assert_array_equal(checkpoint.read("w.weight"), expected)


def test_mxfp4_is_seen_under_the_plain_name(tmp_path):
    tensors = PLAIN | {"experts.down_proj_blocks": BLOCKS, "experts.down_proj_scales": SCALES}
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["norm"]}
    checkpoint = open_folder(tmp_path / "m", tensors, settings)
    assert checkpoint.tensors == {
        "norm.weight": ((24,), "BF16"),
        "experts.down_proj": ((2, 96, 6), "MXFP4"),
    }
    got = checkpoint.read("experts.down_proj")
    assert got.shape == (2, 96, 6) and got.dtype == ml_dtypes.bfloat16
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[BLOCKS[1, 4, 2, 7] >> 4 & 7]
    assert abs(float(got[1, 2 * 32 + 15, 4])) == value * 2.0 ** (int(SCALES[1, 4, 2]) - 127)


def test_scales_of_activations_and_of_the_cache_are_left_out_in_silence(tmp_path, caplog):
    unused = {
        "w.input_scale": HALF,
        "w.activation_scale": HALF,
        "w.input_scale_ub": HALF,
        "attn.k_scale": HALF,
        "attn.v_scale": HALF,
        "k_proj.output_scale": HALF,
    }
    tensors = PLAIN | unused | {"w.weight": CODES, "w.weight_scale": HALF}
    checkpoint = open_folder(tmp_path / "m", {k: np.asarray(v) for k, v in tensors.items()}, FP8)
    with caplog.at_level(logging.WARNING):
        warn_of_unused(checkpoint, {"w": Source(("w.weight",)), "n": Source(("norm.weight",))})
    assert not caplog.records


def test_a_checkpoint_without_codes_is_the_plain_reader(tmp_path):
    checkpoint = open_folder(tmp_path / "m", PLAIN)
    assert type(checkpoint).__name__ == "HuggingFaceCheckpoint"
    # Settings that are left behind by one that was decoded are no fault.
    stale = open_folder(tmp_path / "n", PLAIN, FP8)
    np.testing.assert_array_equal(stale.read("norm.weight"), NORM)


def test_parts_rows_and_types_are_loaded_as_of_other_tensors(tmp_path):
    scale = RNG.uniform(0.01, 1, (40, 1)).astype(np.float32)
    tensors = {"w.weight": CODES, "w.weight_scale": scale, "x_blocks": BLOCKS, "x_scales": SCALES}
    checkpoint = open_folder(tmp_path / "m", tensors)
    sources = {
        "top": Source(("w.weight",), rows=(0, 30)),
        "rest": Source(("w.weight",), rows=(30, 40)),
        "even": Source(("x",), lambda x: x[..., ::2], share="even"),
        "odd": Source(("x",), lambda x: x[..., 1::2], share="odd"),
    }
    bfloat16 = ml_dtypes.bfloat16
    targets = {
        "top": Target((30, 24), np.float32),
        "rest": Target((10, 24), bfloat16),
        "even": Target((2, 96, 3), np.float32),
        "odd": Target((2, 96, 3), bfloat16),
    }
    loaded = load_parameters(checkpoint, sources, targets)
    np.testing.assert_array_equal(loaded["top"], (VALUES * scale)[:30])
    np.testing.assert_array_equal(loaded["rest"], (VALUES * scale)[30:].astype(bfloat16))
    whole = checkpoint.read("x")
    np.testing.assert_array_equal(loaded["even"], whole[..., ::2].astype(np.float32))
    np.testing.assert_array_equal(loaded["odd"], whole[..., 1::2])


def refused(folder, tensors, settings, message):
    tensors = {name: np.asarray(array) for name, array in tensors.items()}
    with pytest.raises(ValueError, match=message) as caught:
        open_folder(folder, tensors, settings)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


W = {"w.weight": CODES}
X = {"x_blocks": BLOCKS, "x_scales": SCALES}
ONE = np.ones(1, np.float32)
TWO = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    "tensors, message",
    [
        (W, "'w.weight' is stored as F8_E4M3, so one scale .* 'w.weight_scale_inv' none is there"),
        (W | {"w.input_scale": ONE}, "'w.weight' is stored as F8_E4M3, so one scale is needed"),
        (W | {"w.weight_scale": ONE, "w.weight_scale_inv": ONE}, "'w.weight' .* both are there"),
        (
            W | {"w.weight_scale": TWO},
            r"'w.weight_scale' has shape \(2, 2\), which does not suit 'w.weight' of shape "
            r"\(40, 24\): .* one a block of \(16, 16\) \(weight_block_size",
        ),
        (W | {"w.weight_scale": np.ones(24, np.float32)}, r"has shape \(24,\), which does not"),
        (W | {"w.weight_scale": np.ones(1, np.int32)}, "'w.weight_scale' has type I32; a scale"),
        (W | {"w.weight_scale": ONE, "v.weight_scale": ONE}, "'v.weight_scale' is of a quantized"),
        (
            {"w.weight": VALUES.astype(np.int8), "w.weight_scale": ONE},
            "'w.weight_scale' is of a quantized weight, but of none in FP8 or MXFP4",
        ),
        (
            {"w.weight_packed": BLOCKS, "w.weight_scale": CODES},
            "is of a quantized weight, but of none in FP8 or MXFP4",
        ),
        (W | {"w.weight_scale": ONE, "w.weight_zero_point": ONE}, "'w.weight_zero_point' is of a"),
        ({"x_blocks": BLOCKS}, "'x_blocks' holds codes, but its scales 'x_scales' are missing"),
        ({"x_scales": SCALES}, "'x_scales' is of a quantized weight, but of none"),
        (X | {"x": ONE}, "'x' is there, and again in codes as 'x_blocks'"),
        (X | {"x_blocks": BLOCKS[..., :8]}, r"'x_blocks' has shape \(2, 6, 3, 8\); \[experts"),
        (X | {"x_blocks": BLOCKS[0]}, r"'x_blocks' has shape \(6, 3, 16\); \[experts, out"),
        (X | {"x_scales": SCALES[:1]}, r"'x_scales' is U8 of shape \(1, 6, 3\); its blocks need"),
        (X | {"x_scales": SCALES.view(np.int8)}, "'x_scales' is I8 of shape"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, tensors, message):
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    refused(tmp_path / "m", PLAIN | tensors, FP8, message)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"quant_method": "awq"}, "has quant_method 'awq', which is not supported; .* fp8, mxfp4"),
        ({"bits": 4}, "has quant_method None, which is not supported"),
        ("fp8", "is 'fp8'; an object is needed"),
        (FP8 | {"weight_block_size": [16]}, r"has weight_block_size \[16\]; two positive integers"),
        (FP8 | {"weight_block_size": 16}, "has weight_block_size 16; two positive integers"),
        (FP8 | {"weight_block_size": [16, 0]}, r"has weight_block_size \[16, 0\]; two"),
        (FP8 | {"weight_block_size": [True, 8]}, r"has weight_block_size \[True, 8\]; two"),
        (
            FP8 | {"config_groups": {"g": {"weights": {"block_structure": [8, 8]}}}},
            r"has block_structure \[8, 8\]; two positive integers are needed, the same for all",
        ),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path, settings, message):
    refused(tmp_path / "m", PLAIN, settings, "quantization_config " + message)

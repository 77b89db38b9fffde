# SPDX-License-Identifier: Apache-2.0
"""A GGUF file is read as its own package reads it; a damaged one gives one clear error, cheaply."""

import struct

import gguf
import numpy as np
import pytest

import checkpoints
from tests.checkpoints.gguf_files import (
    INT32,
    STRING,
    UINT32,
    array,
    pair,
    raw_gguf,
    record,
    string,
    write_gguf,
)

GOOD_PAIR = pair("llama.block_count", UINT32, struct.pack("<I", 2))


def write(path, data):
    path.write_bytes(data)
    return path


def test_metadata_and_shapes_are_what_was_written(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    path = write_gguf(
        tmp_path / "m.gguf",
        {"a": (values, gguf.GGMLQuantizationType.F32)},
        [
            ("add_uint32", "k.u32", 7),
            ("add_int8", "k.i8", -7),
            ("add_uint64", "k.u64", 1 << 40),
            ("add_float32", "k.f32", 0.5),
            ("add_bool", "k.bool", True),
            ("add_string", "k.text", "été"),
            ("add_array", "k.texts", ["a", "", "漢"]),
            ("add_array", "k.ints", [1, 2, 3]),
        ],
    )
    checkpoint = checkpoints.open_checkpoint(path)
    expected = {
        "general.architecture": "llama",
        "k.u32": 7,
        "k.i8": -7,
        "k.u64": 1 << 40,
        "k.f32": 0.5,
        "k.bool": True,
        "k.text": "été",
        "k.texts": ["a", "", "漢"],
        "k.ints": [1, 2, 3],
    }
    assert checkpoint.config == expected
    assert checkpoint.kind == "gguf" and checkpoint.generation_config == {}
    assert checkpoint.tensors == {"a": ((2, 3, 4), "F32")}
    np.testing.assert_array_equal(checkpoint.read("a"), values)
    assert checkpoint.tokenizer() is None


def test_an_alignment_of_its_own_is_followed(tmp_path):
    values = {n: np.full((3, 5), i, np.float32) for i, n in enumerate("abc")}
    path = write_gguf(
        tmp_path / "m.gguf",
        {name: (value, gguf.GGMLQuantizationType.F32) for name, value in values.items()},
        [("add_custom_alignment", 128)],
    )
    checkpoint = checkpoints.open_checkpoint(path)
    for name, value in values.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


def test_version_2_and_empty_arrays_are_read(tmp_path):
    data = raw_gguf([array("none", STRING, 0, b""), array("no", INT32, 0, b"")], version=2)
    assert checkpoints.open_checkpoint(write(tmp_path / "m.gguf", data)).config == {
        "none": [],
        "no": [],
    }


def test_every_truncation_is_an_error(tmp_path):
    tokens = array("tokenizer.ggml.tokens", STRING, 2, string("a") + string("b"))
    whole = raw_gguf([GOOD_PAIR, tokens], [record("v"), record("w", offset=256)], num_bytes=512)
    assert set(checkpoints.open_checkpoint(write(tmp_path / "ok", whole)).tensors) == {"v", "w"}
    for length in range(len(whole)):
        with pytest.raises(ValueError, match="truncated|empty|not a GGUF|cannot fit"):
            checkpoints.open_checkpoint(write(tmp_path / "bad", whole[:length]))


def test_nothing_there_is_said_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder; give a GGUF file"):
        checkpoints.open_checkpoint(tmp_path / "absent")

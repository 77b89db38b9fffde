# SPDX-License-Identifier: Apache-2.0
"""A GGUF file is read as its own package reads it; a damaged one gives one clear error, cheaply."""

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest

import checkpoints
from checkpoints import gguf_blocks
from tests.checkpoints.gguf_files import (
    BOOL,
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


def dims(*lengths):
    return raw_gguf(records=[record("w", dims=lengths)])


HUGE = 1 << 60
DAMAGED = {
    "empty file": (b"", "the file is empty"),
    "another file": (raw_gguf(magic=b"PK\3\4"), r"not a GGUF file \(it starts with b'PK"),
    "version 1": (raw_gguf(version=1), "has version 1; little-endian versions 2 and 3"),
    "big-endian": (raw_gguf(version=3 << 24), "is big-endian"),
    "huge tensor count": (raw_gguf(counts=(HUGE, 0)), f"{HUGE} tensors and 0 metadata pairs"),
    "huge pair count": (raw_gguf(counts=(0, HUGE)), f"0 tensors and {HUGE} metadata pairs"),
    "dimension 0": (dims(32, 0), "tensor 'w' has dimension 0; 1 to"),
    "dimension -1": (dims(32, 2**64 - 1), f"tensor 'w' has dimension {2**64 - 1}; 1 to"),
    "dimension 2^42+1": (dims(32, 2**42 + 1), f"tensor 'w' has dimension {2**42 + 1}; 1 to"),
    "product overflows": (dims(2**40, 2**40, 2**40), "tensor 'w' should end at byte"),
    "no dimensions": (dims(), "tensor 'w' has 0 dimensions; 1 to 4"),
    "10^6 dimensions": (
        raw_gguf(records=[string("w") + struct.pack("<I", 10**6)]),
        "tensor 'w' has 1000000 dimensions; 1 to 4",
    ),
    "ragged block": (
        raw_gguf(records=[record("w", dims=(33, 2), kind=8)]),
        "tensor 'w' has rows of 33, which the 32 elements of a Q8_0 block do not divide",
    ),
    **{
        name: (
            raw_gguf(records=[record("w", dims=(256, 2), kind=kind)]),
            f"tensor 'w' has type {name}, which is not supported; supported: F32, F16, BF16, Q8_0,",
        )
        for kind, name in gguf_blocks.TYPE_NAMES.items()
        if name not in gguf_blocks.BLOCK_TYPES
    },
    "unknown type": (raw_gguf(records=[record("w", kind=9999)]), "has type number 9999, which"),
    "offset past the end": (
        raw_gguf(records=[record("w", offset=HUGE)]),
        f"tensor 'w' should end at byte {HUGE + 352}, but the file ends at byte 352",
    ),
    "offset unaligned": (
        raw_gguf(records=[record("w", offset=8)], num_bytes=512),
        "tensor 'w' has offset 8, which is not a multiple of the alignment 32",
    ),
    "tensors overlap": (
        raw_gguf(records=[record("v"), record("w", offset=128)], num_bytes=512),
        "tensors 'v' and 'w' overlap",
    ),
    "duplicate tensor": (
        raw_gguf(records=[record("w"), record("w", offset=256)], num_bytes=512),
        "tensor 'w' is there twice",
    ),
    "unnamed tensor": (raw_gguf(records=[record("")]), "name of tensor 0 is empty"),
    "empty key": (
        raw_gguf([GOOD_PAIR, pair("", UINT32, b"\0" * 4)]),
        "metadata key 1 is empty",
    ),
    "duplicate key": (raw_gguf([GOOD_PAIR] * 2), "metadata key 'llama.block_count' is there twice"),
    "long key": (raw_gguf([pair("k" * 70_000, UINT32, b"\0" * 4)]), "key 0 has length 70000"),
    "string length 2^60": (
        raw_gguf([pair("k", STRING, struct.pack("<Q", HUGE))]),
        f"the value of 'k' has length {HUGE}; at most",
    ),
    "key length 2^60": (raw_gguf([struct.pack("<QQ", HUGE, 0)]), f"key 0 has length {HUGE}"),
    "string past the end": (
        raw_gguf([pair("k", STRING, struct.pack("<Q", 1 << 20))]),
        "truncated in the value of 'k': 1048576 bytes are needed",
    ),
    "not UTF-8": (raw_gguf([pair("k", STRING, string(b"\xff\xfe"))]), "'k' is not valid UTF-8"),
    "array length 2^60": (
        raw_gguf([array("k", INT32, HUGE, b"")]),
        f"the value of 'k' has {HUGE} items; at most",
    ),
    "array past the end": (
        raw_gguf([array("k", INT32, 1 << 20, b"")]),
        "truncated in the value of 'k': 4194304 bytes are needed",
    ),
    "strings past the end": (
        raw_gguf([array("k", STRING, 1 << 20, b"")]),
        "truncated in the value of 'k': 8388608 bytes are needed",
    ),
    "nested array": (raw_gguf([array("k", 9, 1, b"\0" * 12)]), "has type 9; .* do not nest"),
    "unknown value type": (raw_gguf([pair("k", 77, b"\0" * 8)]), "the value of 'k' has type 77"),
    "alignment 0": (
        raw_gguf([pair("general.alignment", UINT32, b"\0" * 4)]),
        "general.alignment is 0; a power of two",
    ),
    "alignment text": (
        raw_gguf([pair("general.alignment", STRING, string("32"))]),
        "general.alignment is '32'; a power of two",
    ),
    "tokens of integers": (
        raw_gguf([array("tokenizer.ggml.tokens", INT32, 2, b"\0" * 8)]),
        "tokenizer.ggml.tokens must be an array of str: int",
    ),
    "scores of texts": (
        raw_gguf([array("tokenizer.ggml.scores", STRING, 1, string("x"))]),
        "tokenizer.ggml.scores must be an array of float: str",
    ),
    "types of flags": (
        raw_gguf([array("tokenizer.ggml.token_type", BOOL, 2, b"\0\1")]),
        "tokenizer.ggml.token_type must be an array of int: bool",
    ),
    "merges a number": (
        raw_gguf([pair("tokenizer.ggml.merges", UINT32, b"\0" * 4)]),
        "tokenizer.ggml.merges must be an array of str: no array",
    ),
    "fewer types than tokens": (
        raw_gguf(
            [
                array("tokenizer.ggml.tokens", STRING, 2, string("a") + string("b")),
                array("tokenizer.ggml.token_type", INT32, 1, b"\1\0\0\0"),
            ]
        ),
        "tokenizer.ggml.token_type has 1 items for 2 tokens",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_gives_one_cheap_error_and_the_next_file_loads(tmp_path, case):
    data, message = DAMAGED[case]
    path = write(tmp_path / "bad.gguf", data)
    good = write(tmp_path / "good.gguf", raw_gguf([GOOD_PAIR], [record("w")]))
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        checkpoints.open_checkpoint(path)
    seconds = time.perf_counter() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert seconds < 1 and peak < 50e6
    assert checkpoints.open_checkpoint(good).read("w").shape == (2, 32)


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

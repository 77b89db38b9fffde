# SPDX-License-Identifier: Apache-2.0
"""GGUF files that are damaged or hostile: their bytes, and what is said of each (CASES Q-07)."""

import struct

from checkpoints import gguf_blocks
from tests.checkpoints.gguf_files import (
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    array,
    pair,
    raw_gguf,
    record,
    string,
)

GOOD_PAIR = pair("llama.block_count", UINT32, struct.pack("<I", 2))


def dims(*lengths):
    return raw_gguf(records=[record("w", dims=lengths)])


def tokenizer(*more):
    """Returns the pairs of a byte-level tokenizer of two tokens, and `more`."""
    tokens = array("tokenizer.ggml.tokens", STRING, 2, string("a") + string("b"))
    return [pair("tokenizer.ggml.model", STRING, string("gpt2")), tokens, *more]


HUGE = 1 << 60
CASES = {
    "empty file": (b"", "the file is empty"),
    "another file": (raw_gguf(magic=b"PK\3\4"), "not a GGUF file (it starts with b'PK"),
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
    "nested array": (raw_gguf([array("k", 9, 1, b"\0" * 12)]), "has type 9; types are 0, 1, 2"),
    "unknown value type": (raw_gguf([pair("k", 77, b"\0" * 8)]), "the value of 'k' has type 77"),
    "alignment 0": (
        raw_gguf([pair("general.alignment", UINT32, b"\0" * 4)]),
        "general.alignment is 0; a power of two",
    ),
    "alignment 48": (
        raw_gguf([pair("general.alignment", UINT32, struct.pack("<I", 48))]),
        "general.alignment is 48; a power of two",
    ),
    "alignment 2^31": (
        raw_gguf([pair("general.alignment", UINT32, struct.pack("<I", 1 << 31))]),
        "general.alignment is 2147483648; a power of two up to 65536",
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
    "more items than any vocabulary": (
        raw_gguf([array("k", FLOAT32, 1 << 22, b"\0" * 1024)]),
        "the value of 'k' has 4194304 items; at most 2097152 are accepted in all arrays",
    ),
    "more items in two arrays": (
        raw_gguf([array("j", BOOL, 1 << 20, b"\0" * (1 << 20)), array("k", BOOL, 1 << 21, b"")]),
        "the value of 'k' has 2097152 items; at most 2097152 are accepted in all arrays",
    ),
    "a string of 17 MB": (
        raw_gguf([pair("k", STRING, struct.pack("<Q", 17 << 20))]),
        "the value of 'k' has length 17825792; at most 16777216 bytes",
    ),
    "key of two lines twice": (
        raw_gguf([pair("a\nb", UINT32, b"\0" * 4)] * 2),
        r"metadata key 'a\nb' is there twice",
    ),
    "merges of no tokens": (
        raw_gguf(tokenizer(array("tokenizer.ggml.merges", STRING, 1, string("a c")))),
        "tokenizer.ggml.merges holds 'a c', but 'c' is no token",
    ),
    "no merges": (raw_gguf(tokenizer()), "tokenizer.ggml.merges is missing"),
    "end id beyond the tokens": (
        raw_gguf(
            tokenizer(
                array("tokenizer.ggml.merges", STRING, 0, b""),
                pair("tokenizer.ggml.eos_token_id", UINT32, struct.pack("<I", 2)),
            )
        ),
        "tokenizer.ggml.eos_token_id is 2, but there are 2 tokens",
    ),
    "kind of tokenizer a number": (
        raw_gguf([pair("tokenizer.ggml.model", UINT32, b"\0" * 4)]),
        "tokenizer.ggml.model is 0; a str is needed",
    ),
    "template a number": (
        raw_gguf([pair("tokenizer.chat_template", UINT32, b"\0" * 4)]),
        "tokenizer.chat_template is 0; a str is needed",
    ),
}

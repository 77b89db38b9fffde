# SPDX-License-Identifier: Apache-2.0
"""The element types of GGUF tensors: their names, their block layouts, and dequantization."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.buffers import aligned_empty

# All numbers of the format, so that a refusal can name what it refuses.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# Dequantization walks in steps of this many elements, so that its temporaries stay small beside a
# large tensor (an embedding of a gigabyte) and in the processor's cache.
_ELEMENTS_PER_STEP = 1 << 18

_Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", (32,))])
_Q4_0 = np.dtype([("d", "<f2"), ("q", "u1", (16,))])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (16,))])
_Q5_0 = np.dtype([("d", "<f2"), ("high", "u1", (4,)), ("q", "u1", (16,))])
_Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "u1", (4,)), ("q", "u1", (16,))])
_Q4_K = np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", (12,)), ("q", "u1", (128,))])
_Q5_K = np.dtype(
    [
        ("d", "<f2"),
        ("m", "<f2"),
        ("scales", "u1", (12,)),
        ("high", "u1", (32,)),
        ("q", "u1", (128,)),
    ]
)
_Q6_K = np.dtype(
    [("q", "u1", (128,)), ("high", "u1", (64,)), ("scales", "i1", (16,)), ("d", "<f2")]
)


def _float32(halves: np.ndarray) -> np.ndarray:
    """Returns numbers as float32, with an axis for the elements that each scales."""
    return halves.astype(np.float32)[..., None]


def _halves(q: np.ndarray) -> np.ndarray:
    """Returns uint8 [..., 2, bytes]: the low halves of the bytes, then the high ones."""
    out = np.empty((*q.shape[:-1], 2, q.shape[-1]), np.uint8)
    np.bitwise_and(q, 15, out=out[..., 0, :])
    np.right_shift(q, 4, out=out[..., 1, :])
    return out


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    """Returns uint8 [n, 32] with the fifth bits of four bytes, element 0's the lowest."""
    fifth = np.unpackbits(blocks["high"].reshape(-1), bitorder="little") * np.uint8(16)
    return _halves(blocks["q"]).reshape(-1, 32) | fifth.reshape(-1, 32)


def _decode_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes d * q."""
    np.multiply(blocks["q"], _float32(blocks["d"]), out=out)


def _decode_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes d * (q - 8); byte i holds element i in its low half and element i + 16 in its high."""
    q = _halves(blocks["q"]).reshape(-1, 32).view(np.int8)
    np.multiply(q - np.int8(8), _float32(blocks["d"]), out=out)


def _decode_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes d * q + m, with q as in Q4_0."""
    np.multiply(_halves(blocks["q"]).reshape(-1, 32), _float32(blocks["d"]), out=out)
    out += _float32(blocks["m"])


def _decode_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes d * (q - 16), with q as in Q4_0 and its fifth bits."""
    q = _five_bits(blocks).view(np.int8)
    np.multiply(q - np.int8(16), _float32(blocks["d"]), out=out)


def _decode_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes d * q + m, with q as in Q5_0."""
    np.multiply(_five_bits(blocks), _float32(blocks["d"]), out=out)
    out += _float32(blocks["m"])


def _scales_and_mins(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (scale, min) of the eight parts of each block, float32 [n, 8, 1].

    Twelve bytes hold eight scales and eight mins of six bits: the first four scales, then the
    first four mins, have a byte's low six bits each; of the others four bits stand in the last
    four bytes (scale low, min high) and two in the top of the first eight.
    """
    low, middle, last = np.moveaxis(blocks["scales"].reshape(-1, 3, 4), 1, 0)
    scales = np.concatenate([low & 63, (last & 15) | (low >> 6 << 4)], axis=1)
    mins = np.concatenate([middle & 63, (last >> 4) | (middle >> 6 << 4)], axis=1)
    return (
        _float32(blocks["d"])[..., None] * _float32(scales),
        _float32(blocks["m"])[..., None] * _float32(mins),
    )


def _decode_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes scale * q - min in eight parts of 32; 32 bytes hold two parts, low halves first."""
    scales, mins = _scales_and_mins(blocks)
    parts = out.reshape(-1, 8, 32)
    q = _halves(blocks["q"].reshape(-1, 4, 32)).reshape(parts.shape)
    np.multiply(q, scales, out=parts)
    parts -= mins


def _decode_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes as Q4_K; the fifth bit of element i of part p is bit p of `high[i]`."""
    scales, mins = _scales_and_mins(blocks)
    parts = out.reshape(-1, 8, 32)
    q = _halves(blocks["q"].reshape(-1, 4, 32)).reshape(parts.shape)
    high = np.ascontiguousarray(blocks["high"])
    for part in range(8):
        q[:, part] |= (high >> part & 1) * np.uint8(16)
    np.multiply(q, scales, out=parts)
    parts -= mins


def _decode_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes d * scale * (q - 32) in sixteen parts of 16, each with its scale.

    Each half of 128 elements has four runs of 32: the low halves of 64 bytes, then their high
    ones; the upper two bits of run r are bits 2r and 2r + 1 of the half's 32 bytes.
    """
    q = _halves(blocks["q"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks["high"].reshape(-1, 2, 32)
    for run in range(4):
        q[:, :, run] |= (high >> 2 * run & 3) * np.uint8(16)
    scales = _float32(blocks["d"])[..., None] * _float32(blocks["scales"])
    signed = q.view(np.int8).reshape(-1, 16, 16) - np.int8(32)
    np.multiply(signed, scales, out=out.reshape(-1, 16, 16))


class BlockType(NamedTuple):
    """How a type is stored: `layout` is one block of `size` elements.

    `decode(blocks, out)` fills the float32 rows `out[block, size]`; it is None where the elements
    are plain numbers of the type `layout`.
    """

    layout: np.dtype
    size: int = 1
    decode: Callable[[np.ndarray, np.ndarray], None] | None = None


BLOCK_TYPES = {
    "F32": BlockType(np.dtype("<f4")),
    "F16": BlockType(np.dtype("<f2")),
    "BF16": BlockType(np.dtype(ml_dtypes.bfloat16)),
    "Q8_0": BlockType(_Q8_0, 32, _decode_q8_0),
    "Q4_0": BlockType(_Q4_0, 32, _decode_q4_0),
    "Q4_1": BlockType(_Q4_1, 32, _decode_q4_1),
    "Q5_0": BlockType(_Q5_0, 32, _decode_q5_0),
    "Q5_1": BlockType(_Q5_1, 32, _decode_q5_1),
    "Q4_K": BlockType(_Q4_K, 256, _decode_q4_k),
    "Q5_K": BlockType(_Q5_K, 256, _decode_q5_k),
    "Q6_K": BlockType(_Q6_K, 256, _decode_q6_k),
}


def dequantize(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the tensor `[*shape]` whose stored bytes are `data`: float32 for block types.

    Plain types come back as they are stored, as a view of `data`. `data` is uint8 and exactly as
    long as the type and shape say; the last axis is a multiple of the block.
    """
    block_type = BLOCK_TYPES[dtype]
    blocks = data.view(block_type.layout)
    if block_type.decode is None:
        return blocks.reshape(shape)
    values = aligned_empty(shape, np.float32)
    rows = values.reshape(-1, block_type.size)
    step = _ELEMENTS_PER_STEP // block_type.size
    for start in range(0, len(rows), step):
        block_type.decode(blocks[start : start + step], rows[start : start + step])
    return values

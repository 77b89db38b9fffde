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

# Dequantization walks in steps of this many blocks, so that its temporaries stay small beside a
# large tensor (an embedding of a gigabyte); steps this long cost nothing against one go.
_BLOCKS_PER_STEP = 1 << 16

_Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", (32,))])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (16,))])


def _decode_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes d * q."""
    np.multiply(blocks["q"], blocks["d"].astype(np.float32)[:, None], out=out)


def _decode_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Writes d * q + m; byte i holds element i in its low half and element i + 16 in its high."""
    np.bitwise_and(blocks["q"], 15, out=out[:, :16], dtype=np.uint8, casting="unsafe")
    np.right_shift(blocks["q"], 4, out=out[:, 16:], dtype=np.uint8, casting="unsafe")
    out *= blocks["d"].astype(np.float32)[:, None]
    out += blocks["m"].astype(np.float32)[:, None]


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
    "Q4_1": BlockType(_Q4_1, 32, _decode_q4_1),
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
    for start in range(0, len(rows), _BLOCKS_PER_STEP):
        stop = start + _BLOCKS_PER_STEP
        block_type.decode(blocks[start:stop], rows[start:stop])
    return values

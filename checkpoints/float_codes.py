# SPDX-License-Identifier: Apache-2.0
"""Decoding of weights in 8-bit and 4-bit floating point with scales, as safetensors hold them.

What a code means is as in the OCP specifications of 8-bit floating point and of microscaling (MX)
formats: NaN codes, infinities of E5M2 and the NaN exponent of E8M0 are kept, not refused, as they
are in a checkpoint in bfloat16.
"""

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.buffers import aligned_empty

# By the names that safetensors gives them. Their values mean nothing without a scale.
FLOAT8: dict[str, Any] = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}

BYTES_PER_GROUP = 16  # of MXFP4: the 32 elements that share an exponent
_EXPONENT_BIAS = 127

# Decoding walks in steps of about this many elements, which stay in the processor's cache.
_ELEMENTS_PER_STEP = 1 << 18


def scale_block(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], block: tuple[int, int]
) -> tuple[int, int] | None:
    """Returns (rows, columns) of the weight that one number of the scale is for; None: no layout.

    One number scales the whole weight; [rows] or [rows, 1] each row of a matrix; and one number a
    block, of which the last may reach over the edges, each `block` of it.
    """
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    if math.prod(scale_shape) == 1:
        return rows, columns
    if len(shape) != 2:
        return None
    if scale_shape in ((rows,), (rows, 1)):
        return 1, columns
    return block if scale_shape == (-(-rows // block[0]), -(-columns // block[1])) else None


def decode_fp8(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns float32: the value of each code, of a type in `FLOAT8`, times its block's scale.

    `block` is what `scale_block` says of the two shapes. Products are rounded once.
    """
    out = aligned_empty(codes.shape, np.float32)
    if not codes.size:
        return out
    columns = codes.shape[-1] if codes.ndim else 1
    code_rows, out_rows = codes.view(np.uint8).reshape(-1, columns), out.reshape(-1, columns)
    scale_rows = scale.astype(np.float32).reshape(-(-len(code_rows) // block[0]), -1)
    values = np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float32)
    step = max(1, _ELEMENTS_PER_STEP // columns)
    for start in range(0, len(code_rows), step):
        stop = min(start + step, len(code_rows))
        piece = out_rows[start:stop]
        # "clip" spares a check that no byte can fail, and with it a copy.
        np.take(values, code_rows[start:stop], out=piece, mode="clip")
        factors = scale_rows[np.arange(start, stop) // block[0]]
        if factors.shape[1] > 1:
            factors = factors.repeat(block[1], axis=1)[:, :columns]
        with np.errstate(over="ignore", invalid="ignore"):
            piece *= factors
    return out


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns bfloat16 [experts, 32 * groups, out], which holds every value exactly.

    `blocks` is uint8 [experts, out, groups, 16]: 32 codes (E2M1) a group, of two in a byte the
    first in the low half. `scales` is uint8 [experts, out, groups]: the group's power of two, with
    a bias of 127 (E8M0). The matrix of an expert comes out transposed, as gpt-oss has it in
    bfloat16.
    """
    experts, outputs, groups, _ = blocks.shape
    inputs = 2 * BYTES_PER_GROUP * groups
    out = aligned_empty((experts, inputs, outputs), ml_dtypes.bfloat16)
    bits = out.view(np.uint16)  # moved faster than an element type of ml_dtypes
    pairs = _mxfp4_pairs()
    step = max(1, _ELEMENTS_PER_STEP // max(inputs, 1))
    for expert in range(experts):
        for start in range(0, outputs, step):
            rows = slice(start, start + step)
            exponents = scales[expert, rows].astype(np.uint16)[..., None] << 8
            decoded = np.take(pairs, exponents | blocks[expert, rows], mode="clip")
            bits[expert, :, rows] = decoded.view(np.uint16).reshape(len(decoded), inputs).T
    return out


@functools.cache
def _mxfp4_pairs() -> np.ndarray:
    """Returns uint32 [65536]: by 256 * scale + byte, the bits of its two bfloat16 values."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([magnitudes, -magnitudes])
    exponents = np.arange(256)[:, None, None] - _EXPONENT_BIAS
    byte = np.arange(256)
    halves = np.stack([byte & 15, byte >> 4], axis=-1)
    with np.errstate(over="ignore"):
        pairs = np.ldexp(values[halves], exponents)
    pairs[255] = np.nan
    return pairs.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)

# SPDX-License-Identifier: Apache-2.0
"""FP8 and MXFP4 decode to what their bits say, worked out one element at a time in float64."""

import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from checkpoints.buffers import ALIGNMENT
from checkpoints.float_codes import FLOAT8, decode_fp8, decode_mxfp4, scale_block

# Exponent bits, fraction bits, bias; E4M3 has no infinity, and one NaN of either sign.
FORMATS = {"F8_E4M3": (4, 3, 7), "F8_E5M2": (5, 2, 15)}
FP4 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def float8(code, dtype):
    """Returns the value of one code, from its sign, exponent and fraction."""
    exponent_bits, fraction_bits, bias = FORMATS[dtype]
    sign = -1.0 if code & 128 else 1.0
    exponent = (code >> fraction_bits) & (2**exponent_bits - 1)
    fraction = code & (2**fraction_bits - 1)
    if dtype == "F8_E4M3" and code & 127 == 127:
        return math.nan
    if dtype == "F8_E5M2" and exponent == 31:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - fraction_bits)
    return sign * (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias)


def float4(code):
    return math.copysign(FP4[code & 7], -1.0 if code & 8 else 1.0)


def test_the_values_by_hand():
    assert [float8(code, "F8_E4M3") for code in (0x01, 0x08, 0x38, 0x7E)] == [2**-9, 2**-6, 1, 448]
    assert [float8(code, "F8_E5M2") for code in (0x01, 0x3C, 0x7B, 0xFC)] == [
        2**-16,
        1,
        57344,
        -math.inf,
    ]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_code_has_its_value_and_nan_is_kept(dtype):
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16).view(FLOAT8[dtype])
    got = decode_fp8(codes, np.ones((), np.float32), (16, 16)).reshape(-1)
    expected = [float8(code, dtype) for code in range(256)]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))
    assert np.signbit(got[128]) and np.isnan(got).sum() == (2 if dtype == "F8_E4M3" else 6)


LAYOUTS = {
    "a number": ((37, 21), (), None),
    "a number [1]": ((37, 21), (1,), None),
    "rows": ((37, 21), (37,), None),
    "rows [out, 1]": ((37, 21), (37, 1), None),
    "whole blocks": ((32, 48), (2, 3), (16, 16)),
    "partial blocks": ((37, 21), (3, 2), (16, 16)),
    "oblong blocks": ((37, 21), (10, 3), (4, 8)),
    "less than a block": ((5, 21), (1, 2), (16, 16)),
    "a block a row": ((37, 21), (37, 6), (1, 4)),
    "many steps": ((9, 40000), (3, 313), (4, 128)),
}


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_is_the_code_times_the_scale_of_its_block(layout, scale_dtype):
    shape, scale_shape, block = LAYOUTS[layout]
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 127, shape, dtype=np.uint8) | rng.integers(0, 2, shape, dtype=np.uint8)
    codes[0, 0] |= 128
    scale = rng.uniform(1e-4, 0.1, scale_shape).astype(scale_dtype)
    values = [float8(code, "F8_E4M3") for code in range(256)]
    expected = np.zeros(shape)
    rows = block[0] if block else 1 if math.prod(scale_shape) > 1 else shape[0]
    columns = block[1] if block else shape[1]
    across = -(-shape[1] // columns)
    factors = scale.astype(np.float64).reshape(-1).tolist()
    for i in range(shape[0]):
        for j in range(shape[1]):
            expected[i, j] = values[codes[i, j]] * factors[i // rows * across + j // columns]
    found = scale_block(shape, scale_shape, block or (128, 128))
    got = decode_fp8(codes.view(ml_dtypes.float8_e4m3fn), scale, found)
    assert got.dtype == np.float32 and got.ctypes.data % ALIGNMENT == 0
    np.testing.assert_array_equal(got, expected.astype(np.float32))  # rounded once


@pytest.mark.parametrize(
    "shape, scale_shape",
    [
        ((37, 21), (21,)),
        ((37, 21), (1, 21)),
        ((37, 21), (2, 2)),
        ((37, 21), (2, 3)),
        ((37, 21), (37, 21)),
        ((2, 37, 21), (2, 37, 1)),
        ((37,), (37,)),
        ((37, 21), (0,)),
    ],
)
def test_other_scales_fit_no_layout(shape, scale_shape):
    assert scale_block(shape, scale_shape, (16, 16)) is None


def test_weights_that_are_no_matrix_take_one_number():
    for shape in [(), (5,), (2, 3, 4), (0, 4), (4, 0)]:
        block = scale_block(shape, (1,), (16, 16))
        codes = np.full(shape, 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
        got = decode_fp8(codes, np.array([0.5], np.float32), block)
        np.testing.assert_array_equal(got, np.full(shape, 0.5, np.float32))


def test_mxfp4_is_two_values_a_byte_low_half_first_transposed():
    experts, outputs, groups = 3, 5, 2
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (experts, outputs, groups, 16), dtype=np.uint8)
    scales = rng.integers(110, 140, (experts, outputs, groups), dtype=np.uint8)
    scales[0, 0] = (0, 250)  # the least, and one near the largest
    expected = np.zeros((experts, groups * 32, outputs))
    for e in range(experts):
        for o in range(outputs):
            for g in range(groups):
                factor = 2.0 ** (int(scales[e, o, g]) - 127)
                for b in range(16):
                    byte = int(blocks[e, o, g, b])
                    expected[e, g * 32 + 2 * b, o] = float4(byte % 16) * factor
                    expected[e, g * 32 + 2 * b + 1, o] = float4(byte // 16) * factor
    got = decode_mxfp4(blocks, scales)
    assert got.dtype == ml_dtypes.bfloat16 and got.ctypes.data % ALIGNMENT == 0
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got.astype(np.float64), expected)


def test_mxfp4_of_several_steps():
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (1, 300, 40, 16), dtype=np.uint8)
    scales = rng.integers(120, 130, (1, 300, 40), dtype=np.uint8)
    got = decode_mxfp4(blocks, scales)
    for o in (0, 204, 205, 299):
        alone = decode_mxfp4(blocks[:, o : o + 1], scales[:, o : o + 1])
        np.testing.assert_array_equal(got[:, :, o : o + 1], alone)


def test_the_mxfp4_exponent_255_is_nan():
    got = decode_mxfp4(np.zeros((1, 1, 1, 16), np.uint8), np.full((1, 1, 1), 255, np.uint8))
    assert np.isnan(got.astype(np.float32)).all()


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_decoding_takes_little_memory_beside_its_result(kind):
    def decode():
        if kind == "mxfp4":
            blocks, scales = np.zeros((2, 2048, 64, 16), np.uint8), np.zeros((2, 2048, 64))
            return blocks.nbytes, decode_mxfp4(blocks, scales.astype(np.uint8))
        codes = np.zeros((4096, 2048), np.uint8).view(ml_dtypes.float8_e4m3fn)
        return codes.nbytes, decode_fp8(codes, np.ones((32, 16), np.float32), (128, 128))

    decode()  # what is made once
    tracemalloc.start()
    try:
        codes_bytes, decoded = decode()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - codes_bytes < decoded.nbytes + 8e6

# SPDX-License-Identifier: Apache-2.0
"""The specification of the quantized product: one code at a time, in float64 NumPy."""

import numpy as np

from pallas_kernels.quantized_matmul.weights import QuantizedWeight


def quantized_matmul_reference(
    x_TD, weight: QuantizedWeight, *, activations: str = "plain"
) -> np.ndarray:
    """Returns float64 y_TF: the rows, or what is left of them as int8, times the numbers."""
    x_TD = np.asarray(x_TD)
    rows_TD = quantized_rows(x_TD) if activations == "int8" else x_TD.astype(np.float64)
    return rows_TD @ numbers(weight).T


def numbers(weight: QuantizedWeight) -> np.ndarray:
    """Returns the matrix that is meant, float64 [F, D]."""
    codes, scales = np.asarray(weight.codes), np.asarray(weight.scales, np.float64)
    packed = codes.dtype == np.uint8
    D = codes.shape[1] * (2 if packed else 1)
    codes_FD = np.zeros((codes.shape[0], D))
    for d in range(D):
        codes_FD[:, d] = four_bits(codes, d, D) if packed else codes[:, d].astype(np.float64)
    zeros = np.full(scales.shape, 8.0 if packed else 0.0)
    if weight.zeros is not None:
        zeros = np.asarray(weight.zeros, np.float64)
    group_D = np.arange(D) // (D // scales.shape[1]) if D else np.zeros(0, int)
    return (codes_FD - zeros[:, group_D]) * scales[:, group_D]


def four_bits(bytes_FX: np.ndarray, d: int, D: int) -> np.ndarray:
    """Returns the codes of input d: which byte, and which half of it."""
    block = d // 256
    half = 128 if D - block * 256 >= 256 else (D - block * 256) // 2
    low = d - block * 256 < half
    byte_F = bytes_FX[:, block * 128 + (d - block * 256) % half]
    return byte_F % 16 if low else byte_F // 16


def quantized_rows(x_TD: np.ndarray) -> np.ndarray:
    """Returns the rows rounded to 127 steps of their largest number, in either direction.

    Steps are of float32, as everywhere: otherwise a number halfway would go another way.
    """
    x_TD = x_TD.astype(np.float32)
    most_T1 = np.abs(x_TD).max(axis=1, keepdims=True, initial=0)
    most_T1[most_T1 < 1e-30] = np.inf
    codes_TD = np.rint(x_TD * (np.float32(127) / most_T1))
    most_T1[np.isinf(most_T1)] = 0
    return codes_TD.astype(np.float64) * (most_T1 / np.float32(127))

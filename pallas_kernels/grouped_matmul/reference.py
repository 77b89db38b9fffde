# SPDX-License-Identifier: Apache-2.0
"""The specification of the grouped product: one expert at a time, in float64 NumPy."""

import numpy as np

from pallas_kernels.grouped_matmul.weights import OfLayers, QuantizedExperts, Weight


def grouped_matmul_reference(x_SD, weight: Weight, sizes_E) -> np.ndarray:
    """Returns float64 y_RF of the R rows that have an expert, which come first."""
    matrices_EDF = numbers(weight)
    x_SD = np.asarray(x_SD).astype(np.float64)
    parts = [np.zeros((0, matrices_EDF.shape[2]))]
    begin = 0
    for size, matrix_DF in zip(sizes_E, matrices_EDF, strict=True):
        parts.append(x_SD[begin : begin + size] @ matrix_DF)
        begin += size
    return np.concatenate(parts)


def numbers(weight: Weight) -> np.ndarray:
    """Returns the matrices that are meant, float64 [E, D, F]."""
    held, layer = weight if isinstance(weight, OfLayers) else (weight, slice(None))
    if not isinstance(held, QuantizedExperts):
        return np.asarray(held)[layer].astype(np.float64)
    codes_EDF = np.asarray(held.codes)[layer].astype(np.float64)
    scales_EGF = np.asarray(held.scales)[layer].astype(np.float64)
    return codes_EDF * np.repeat(scales_EGF, codes_EDF.shape[1] // scales_EGF.shape[1], axis=1)

# SPDX-License-Identifier: Apache-2.0
"""Rows that are sorted by expert times their experts' matrices.

`grouped_matmul` is the operation, `reference` its specification in plain NumPy, `xla` what every
platform can do, `tpu` and `gpu` the kernels.
"""

from pallas_kernels.grouped_matmul.op import grouped_matmul
from pallas_kernels.grouped_matmul.weights import OfLayers, QuantizedExperts, matrices

__all__ = ["OfLayers", "QuantizedExperts", "grouped_matmul", "matrices"]

# SPDX-License-Identifier: Apache-2.0
"""Rows times a matrix that is kept as codes of a byte or half a byte.

`quantized_matmul` is the operation, `reference` its specification in plain NumPy, `xla` what every
platform can do, `tpu` and `gpu` the kernels.
"""

from pallas_kernels.quantized_matmul.op import quantized_matmul
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, pack_int4, unpack_int4

__all__ = ["QuantizedWeight", "pack_int4", "quantized_matmul", "unpack_int4"]

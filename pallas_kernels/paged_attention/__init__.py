# SPDX-License-Identifier: Apache-2.0
"""Attention of a group of rows over their pages.

`paged_attention` and `attention_mass` are the operation, `reference` its specification in plain
NumPy; `xla`, `tpu` and `gpu` do it, and `cases` are what they are held to.
"""

from pallas_kernels.paged_attention.op import attention_mass, paged_attention
from pallas_kernels.paged_attention.rows import NO_WINDOW, Rows

__all__ = ["NO_WINDOW", "Rows", "attention_mass", "paged_attention"]

# SPDX-License-Identifier: Apache-2.0
"""Attention of a group of rows over their pages.

`paged_attention` is the operation, `reference` its specification in plain NumPy, `xla` the
implementation for every platform until a kernel of its own is faster there.
"""

from pallas_kernels.paged_attention.rows import NO_WINDOW, Rows
from pallas_kernels.paged_attention.xla import paged_attention

__all__ = ["NO_WINDOW", "Rows", "paged_attention"]

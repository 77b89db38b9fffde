# SPDX-License-Identifier: Apache-2.0
"""Attention of one long run of tokens that the devices of a mesh axis share.

`ring_attention` is the operation, `reference` its specification in plain NumPy, `xla` the
implementation for every platform.
"""

from pallas_kernels.ring_attention.xla import add_past, add_ring, ring_attention

__all__ = ["add_past", "add_ring", "ring_attention"]

# SPDX-License-Identifier: Apache-2.0
"""Attention of one long run of tokens that the devices of a mesh axis share.

`ring_attention` is the operation, made of `flash_attention` and `paged_attention` whatever the
backend; `reference` is its specification in plain NumPy.
"""

from pallas_kernels.ring_attention.op import Past, ring_attention

__all__ = ["Past", "ring_attention"]

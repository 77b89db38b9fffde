# SPDX-License-Identifier: Apache-2.0
"""Attention of a run of tokens over keys that lie beside one another: prompts, and hops of a ring.

`flash_attention` is the operation, `reference` its specification in plain NumPy; `xla`, `tpu` and
`gpu` do it, and `cases` are what they are held to.
"""

from pallas_kernels.flash_attention.op import flash_attention

__all__ = ["flash_attention"]

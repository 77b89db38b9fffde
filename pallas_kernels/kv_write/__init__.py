# SPDX-License-Identifier: Apache-2.0
"""New cells into pages, in place.

`kv_write` is the operation, `reference` its specification in plain NumPy; `xla`, `tpu` and `gpu` do
it, and `cases` are what they are held to.
"""

from pallas_kernels.kv_write.op import kv_write

__all__ = ["kv_write"]

# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA) over pages, in its absorbed form.

`latent_attention` is the operation, `reference` its specification, in the expanded form. The
kernels are those of `pallas_kernels.paged_attention`, with block sizes of their own.
"""

from pallas_kernels.latent_attention.op import latent_attention, latent_mass

__all__ = ["latent_attention", "latent_mass"]

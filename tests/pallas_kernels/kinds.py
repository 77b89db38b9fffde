# SPDX-License-Identifier: Apache-2.0
"""The implementations that every case is done by: interpreted, but for those of the device at hand.

On a machine with a GPU, JAX_PLATFORMS=cuda,cpu pytest tests/pallas_kernels does the cases by the
GPU's own kernels.
"""

import jax

from pallas_kernels import backends
from pallas_kernels.backends import XLA, Backend

NATIVE = backends.choose("auto", jax.default_backend(), jax.devices()[0].device_kind)
KINDS = {"xla": XLA} | {
    kind: NATIVE if NATIVE.kind == kind else Backend(kind, interpret=True)
    for kind in ("tpu", "gpu")
}

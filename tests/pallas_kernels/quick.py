# SPDX-License-Identifier: Apache-2.0
"""Programs of interpreted kernels, which are long and run once: compiled four times as fast."""

import functools

import jax

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)

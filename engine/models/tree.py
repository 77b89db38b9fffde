# SPDX-License-Identifier: Apache-2.0
"""The tree of parameters: its specs, and a model's tensors put into it."""

from typing import Any

import numpy as np

from engine.models.config import ModelConfig


def parameter_specs(config: ModelConfig, dtype: np.dtype, *, stacked: bool) -> dict[str, Any]:
    """Returns the tree of `Spec` that the decoder's parameters follow."""
    layer = config.layer_specs(dtype)
    segments: list[Any] = []
    for run in config.segments():
        if stacked:
            segments.append({name: spec.stacked(len(run)) for name, spec in layer.items()})
        else:
            segments.append(tuple(dict(layer) for _ in run))
    return {**config.outer_specs(dtype), "segments": tuple(segments)}

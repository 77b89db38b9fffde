# SPDX-License-Identifier: Apache-2.0
"""The tree of parameters: its specs, and the form of it that suits a platform."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from engine.models.config import ModelConfig
from engine.models.specs import layer_specs, outer_specs
from engine.models.stages import stacked_layers


def parameter_specs(
    config: ModelConfig, dtype: np.dtype, *, stacked: bool, stages: int = 1
) -> dict[str, Any]:
    """Returns the tree of `Spec` that the decoder's parameters follow, of all stages together."""
    segments: list[Any] = []
    assert stacked or stages == 1, "stages have stacked layers"
    stacks = stacked_layers(config, stages)
    for run, stack in zip(config.segments(), stacks, strict=True):
        layer = layer_specs(config, dtype, run.start)
        if stacked:
            segments.append({name: spec.stacked(len(stack)) for name, spec in layer.items()})
        else:
            segments.append(tuple(dict(layer) for _ in run))
    return {**outer_specs(config, dtype), "segments": tuple(segments)}


# A fused parameter and what it is joined from, on the axis of outputs.
FUSED = {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias")}


def is_stacked(platform: str, stages: int) -> bool:
    """Returns whether layers are in one array, over which a program loops.

    On TPU that compiles in a sixth of the time and costs nothing. Elsewhere XLA copies each layer's
    part out of the array in each step, and on GPU a loop would cut a step's captured graph apart.
    """
    return platform == "tpu" or stages > 1


def is_fused(mesh: Mesh, stacked: bool) -> bool:
    """Returns whether matrices of the same inputs are joined: where all are on one device."""
    return mesh.size == 1 and not stacked


def fuse(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the tree with q, k and v of each layer as one matrix; layers must be unrolled.

    XLA's CPU backend gives a small product one core only: measured in WORKSPACE.md. The tree may be
    of arrays or of abstract arrays, all on one device. Arrays are joined a layer at a time; those
    of `params` are given up, so that memory holds no second copy.
    """
    segments = tuple(tuple(fuse_layer(layer) for layer in seg) for seg in params["segments"])
    return {**params, "segments": segments}


def fuse_layer(layer: dict[str, Any]) -> dict[str, Any]:
    """Returns one layer's parameters, fused."""
    fused = dict(layer)
    for name, parts in FUSED.items():
        if all(part in layer for part in parts):
            fused[name] = _join([fused.pop(part) for part in parts])
    return fused


def _join(arrays: list[Any]) -> Any:
    if isinstance(arrays[0], jax.Array):
        joined = jnp.concatenate(arrays).block_until_ready()
        for array in arrays:
            array.delete()
        return joined
    shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
    return jax.ShapeDtypeStruct(shape, arrays[0].dtype, sharding=arrays[0].sharding)

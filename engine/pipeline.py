# SPDX-License-Identifier: Apache-2.0
"""Layers shared out over the stages of a pipeline, and the parts of a step that go through them.

A step's rows are cut into parts; while one stage has the second part, the next has the first
(GPipe, arXiv 1811.06965). A stage runs its layers on whatever it has, so that all run the same
program; what it has before the first part and after the last is of nobody.

Letters: T tokens of a part, M parts of a step, D width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.experts import EXPERT_MATRICES
from engine.models.config import ModelConfig
from engine.models.decoder import LayerData
from engine.models.stages import stacked_layers
from pallas_kernels.grouped_matmul import OfLayers

# ((x_TD, cache), parameters, data) -> (x_TD, cache): what one layer does.
Layer = Callable[[Any, Any, LayerData], tuple[jax.Array, Any]]


def map_stage(function: Layer, x_TD: jax.Array, cache: Any, config: ModelConfig, params, data):
    """Returns (x_TD, cache) after `function` for each layer of this device's stage.

    `data`: LayerData of all layers, each field [L]. All stages go round as often as the one with
    most layers, since what devices exchange in a layer needs them all; a turn without a layer has a
    page group beyond the last, whose pages are null, and changes nothing.
    """
    stage, stages = config.pipe.here(), config.stages
    for stack, segment in zip(stacked_layers(config, stages), params["segments"], strict=True):
        layers = np.array([-1 if layer is None else layer for layer in stack]).reshape(stages, -1)
        real = jnp.asarray(layers >= 0)[stage]
        own = LayerData(*(jnp.asarray(field[layers])[stage] for field in data))
        nothing = int(max(data.group)) + 1
        own = own._replace(group=jnp.where(real, own.group, nothing))
        whole = {name: segment[name] for name in EXPERT_MATRICES if name in segment}
        sliced = {name: array for name, array in segment.items() if name not in whole}

        def one(index, carry, whole=whole, sliced=sliced, own=own, real=real):
            params = {name: array[index] for name, array in sliced.items()}
            params |= {name: OfLayers(array, index) for name, array in whole.items()}
            layer = LayerData(*(field[index] for field in own))
            x_TD, cache = function(carry, params, layer)
            return jnp.where(real[index], x_TD, carry[0]), cache

        x_TD, cache = jax.lax.fori_loop(0, layers.shape[1], one, (x_TD, cache))
    return x_TD, cache


def run_stages(
    config: ModelConfig,
    x_MTD: jax.Array,
    cache: Any,
    stage: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]],
) -> tuple[jax.Array, Any]:
    """Returns (x_MTD, cache) after the layers of all stages.

    `stage(x_TD, part, active, cache)` is what this device's layers do with a part; where it is not
    `active` nothing may be stored.
    """
    pipe, M = config.pipe, x_MTD.shape[0]
    here, last = pipe.here(), pipe.ways - 1
    on = [(device, device + 1) for device in range(last)]

    def tick(time, carry):
        came_TD, out_MTD, cache = carry
        part = jnp.clip(time - here, 0, M - 1)
        active = (time >= here) & (time - here < M)
        x_TD = jnp.where(here == 0, x_MTD[part], came_TD)
        x_TD, cache = stage(x_TD, part, active, cache)
        kept_TD = jnp.where(active & (here == last), x_TD, out_MTD[part])
        return jax.lax.ppermute(x_TD, pipe.names, on), out_MTD.at[part].set(kept_TD), cache

    begin = (jnp.zeros_like(x_MTD[0]), jnp.zeros_like(x_MTD), cache)
    _, out_MTD, cache = jax.lax.fori_loop(0, M + last, tick, begin)
    return pipe.sum(out_MTD), cache

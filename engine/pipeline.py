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

from engine.experts import EXPERT_MATRICES, OfLayers
from engine.models.config import ModelConfig
from engine.models.decoder import LayerData
from engine.models.stages import stacked_layers

# (carry, parameters, data) -> carry: what one layer does.
Layer = Callable[[Any, Any, LayerData], Any]


def map_stage(function: Layer, carry: Any, config: ModelConfig, params: Any, data: LayerData):
    """Returns the carry after `function` for each layer of this device's stage.

    `data`: of all layers, each field [L].
    """
    stage, stages = config.pipe.here(), config.stages
    stacks = stacked_layers(config, stages)
    for stack, segment in zip(stacks, params["segments"], strict=True):
        layers = np.array([-1 if layer is None else layer for layer in stack]).reshape(stages, -1)
        count = jnp.asarray((layers >= 0).sum(axis=1), jnp.int32)[stage]
        own = LayerData(*(jnp.asarray(field[layers])[stage] for field in data))
        whole = {name: segment[name] for name in EXPERT_MATRICES if name in segment}
        sliced = {name: array for name, array in segment.items() if name not in whole}

        def one(index, carry, whole=whole, sliced=sliced, own=own):
            params = {name: array[index] for name, array in sliced.items()}
            params |= {name: OfLayers(array, index) for name, array in whole.items()}
            return function(carry, params, LayerData(*(field[index] for field in own)))

        carry = jax.lax.fori_loop(0, count, one, carry)
    return carry


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

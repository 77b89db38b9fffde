# SPDX-License-Identifier: Apache-2.0
"""The forms in which matrices of experts come, and the one that implementations take.

Letters of this package: L layers, E experts, D a matrix's inputs, F its outputs, S sorted rows, C
rows of a tile, G groups of scales, V visits of tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

CODES = ("int8", "float8_e4m3fn")


class QuantizedExperts(NamedTuple):
    """Matrices as codes, each times the scale of its output and its group of inputs.

    codes: int8 or float8_e4m3fn [E, D, F], or [L, E, D, F] in an `OfLayers`.
    scales: float32 [E, G, F], or [L, E, G, F]; G divides D, and 1 is a scale an output.
    """

    codes: jax.Array
    scales: jax.Array


class OfLayers(NamedTuple):
    """The experts' matrices of all layers of a scan, and which layer's are meant.

    A product takes its matrices whole: those of one layer would be copied out first.
    """

    weight_LEDF: jax.Array | QuantizedExperts
    layer: jax.Array


Weight = jax.Array | QuantizedExperts | OfLayers


class Stack(NamedTuple):
    """Any weight: matrices or codes of L layers, the scales of codes, the layer that is meant."""

    codes_LEDF: jax.Array
    scales_LEGF: jax.Array | None
    layer: jax.Array

    @property
    def groups(self) -> int:
        """The scales of an output; 0 for what is not quantized."""
        return 0 if self.scales_LEGF is None else self.scales_LEGF.shape[2]


def matrices(weight: Weight) -> int:
    """Returns how many matrices a layer has on this device."""
    return stacked(weight).codes_LEDF.shape[1]


def stacked(weight: Weight) -> Stack:
    """Returns a weight in the form that implementations take; nothing is copied."""
    if not isinstance(weight, OfLayers):
        one = jax.tree.map(lambda array: array[None], weight)
        weight = OfLayers(one, jnp.int32(0))
    held, layer = weight
    if isinstance(held, QuantizedExperts):
        return Stack(held.codes, held.scales, layer)
    return Stack(held, None, layer)


def dequantized(codes: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the matrices [..., D, F] of codes and scales [..., G, F]."""
    *lead, D, F = codes.shape
    groups = scales.shape[-2]
    numbers = codes.astype(jnp.float32).reshape(*lead, groups, D // groups, F)
    return (numbers * scales[..., None, :]).reshape(codes.shape).astype(dtype)


def cost(x_SD: jax.Array, stack: Stack, width_tiles: int) -> pl.CostEstimate:
    """Returns the estimate of a kernel's call, as if as many experts were hit as there may be."""
    (S, D), (_, E, _, F) = x_SD.shape, stack.codes_LEDF.shape
    of_expert = D * F * stack.codes_LEDF.dtype.itemsize + 4 * stack.groups * F
    return pl.CostEstimate(
        flops=2 * S * D * F,
        transcendentals=0,
        bytes_accessed=min(S, E) * of_expert
        + width_tiles * S * D * x_SD.dtype.itemsize
        + 4 * S * F,
    )

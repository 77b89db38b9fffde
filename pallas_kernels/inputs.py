# SPDX-License-Identifier: Apache-2.0
"""Arguments of any size, made where they are used, and the least that a call has to do."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SPREAD = 3.0**0.5  # of numbers with a variance of 1


class Work(NamedTuple):
    """The least that a call has to do: bytes to read and write, each once, and operations.

    numbers: what is multiplied, "bfloat16" (or wider) or "int8".
    """

    bytes: int
    flops: int
    numbers: str = "bfloat16"


def scattered(abstract: Any, seed: int) -> jax.Array:
    """Returns numbers of the shape and dtype of `abstract` that look random: of floats evenly from
    -1.7 to 1.7, of integers all bits.

    An element is a hash of its place, so that an array of GBs takes no memory beside its own.
    """
    bits = jnp.full(abstract.shape, seed, jnp.uint32)
    for axis in range(len(abstract.shape)):
        place = jax.lax.broadcasted_iota(jnp.uint32, abstract.shape, axis)
        bits = mixed(bits * jnp.uint32(0x9E3779B1) + place)
    if jnp.issubdtype(abstract.dtype, jnp.integer):
        return (bits >> 24).astype(jnp.uint8).astype(abstract.dtype)
    halves = (bits >> 8).astype(jnp.int32).astype(jnp.float32) * (2.0 / 2**24) - 1.0
    return (halves * SPREAD).astype(abstract.dtype)


def mixed(bits: jax.Array) -> jax.Array:
    """Returns words whose every bit depends on all bits of what is given (MurmurHash3's end)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def scales(abstract: Any, seed: int) -> jax.Array:
    """Returns what codes are multiplied by, from 0.01 to 0.03."""
    return scattered(abstract, seed) * (0.01 / SPREAD) + 0.02

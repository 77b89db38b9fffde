# SPDX-License-Identifier: Apache-2.0
"""What all kernels for TPU share: registers, how much vector memory there is, products."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import MIB, Backend

LANES, SUBLANES = 128, 8
SPARE_BYTES = 8 * MIB  # of vector memory, beside what a kernel reckons


def up(number: int, step: int) -> int:
    """Returns a number rounded up to a multiple of `step`."""
    return -(-number // step) * step


def room(backend: Backend) -> int:
    """Returns the bytes of vector memory that a kernel may take, beside what XLA keeps there."""
    return backend.vmem_bytes * 3 // 4


def limit(
    need: int,
    backend: Backend,
    blocks: Iterable[tuple[pl.BlockSpec, Any]],
    scratch: Iterable[Any],
) -> int:
    """Returns the bytes that a kernel is held to: some more than reckoned, and not all that there
    is, since XLA brings weights into the rest meanwhile.

    `need` is what a kernel's formula gives; `blocks` are its blocks, each with what it is of, and
    `scratch` what else it holds. Raises AssertionError if the formula leaves some of them out.
    """
    assert backend.interpret or need <= room(backend), "declined before"
    named = 2 * sum(block_bytes(spec, array) for spec, array in blocks)  # one is used, one comes
    for ref in scratch:
        if ref.memory_space == pltpu.VMEM:
            named += math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
    assert named <= need, f"{named} bytes are named, {need} are reckoned"
    return min(need + SPARE_BYTES, room(backend))


def block_bytes(spec: pl.BlockSpec, array: Any) -> int:
    """Returns the bytes of a block of an array; 0 of one that stays where it is."""
    sizes = [size for size in spec.block_shape or (0,) if isinstance(size, int)]
    return math.prod(sizes) * jnp.dtype(array.dtype).itemsize


def lacking(need: int, backend: Backend) -> str | None:
    """Returns why a kernel that needs so many bytes is declined, or None."""
    if need > room(backend):
        return f"{need} bytes of vector memory; {room(backend)} are to be had"
    return None


def dot(x_RX: jax.Array, numbers: jax.Array, contract: int = 1) -> jax.Array:
    """Returns the product over columns of x and an axis of the other: float32, int32 of int8."""
    precision = jax.lax.Precision.HIGHEST if x_RX.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x_RX,
        numbers,
        (((1,), (contract,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.int32 if x_RX.dtype == jnp.int8 else jnp.float32,
    )

# SPDX-License-Identifier: Apache-2.0
"""What all kernels for TPU share: registers, how much vector memory there is, products."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import MIB, Backend

LANES, SUBLANES = 128, 8
SPARE_BYTES = 8 * MIB  # of vector memory, beside what a kernel reckons


def up(number: int, step: int) -> int:
    """Returns a number rounded up to a multiple of `step`."""
    return -(-number // step) * step


def room(backend: Backend) -> int:
    """Returns the bytes of vector memory that a kernel may take, beside what XLA keeps there."""
    return backend.vmem_bytes * 3 // 4


def limit(need: int, backend: Backend) -> int:
    """Returns the bytes that a kernel is held to: some more than reckoned, and not all that there
    is, since XLA brings weights into the rest meanwhile."""
    return min(need + SPARE_BYTES, room(backend))


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

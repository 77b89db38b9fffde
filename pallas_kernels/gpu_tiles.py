# SPDX-License-Identifier: Apache-2.0
"""What kernels for GPUs (Triton) share: masked loads, products, widths that are no power of two.

Triton's blocks are powers of two: a head of 96 is 64 and 32 beside each other, a latent cell of 576
is 512 and 64, and only what is left below 16 is filled up.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.backends import Backend

LEAST = 16  # of each axis of a product
FP8_CHIPS = ("h100", "h200")


class Piece(NamedTuple):
    """Some numbers of a cell: the first, a power of two that holds them, how many are real."""

    first: int
    width: int
    real: int


def cut(first: int, last: int) -> tuple[Piece, ...]:
    """Returns the pieces of the numbers from `first` to before `last`."""
    found = []
    while first < last:
        left = last - first
        width = max(LEAST, 1 << (left.bit_length() - 1))
        found.append(Piece(first, width, min(width, left)))
        first += width
    return tuple(found)


def total_width(pieces: Sequence[Piece]) -> int:
    """Returns the numbers of pieces, filled up."""
    return sum(piece.width for piece in pieces)


def power(number: int) -> int:
    """Returns the least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def index_of(piece: Piece, start: int | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Returns (where a piece's numbers lie, which of them are real; None is all).

    They begin at `start`, or where they do in a cell.
    """
    index_Y = jnp.arange(piece.width, dtype=jnp.int32)
    is_real = None if piece.real == piece.width else index_Y < piece.real
    return (piece.first if start is None else start) + index_Y, is_real


def load(ref, *masks: jax.Array | None) -> jax.Array:
    """Returns what is in a ref, 0 where a mask is false; a mask that is None is true.

    Floats of a byte come as float32: Triton has no zeros of them.
    """
    mask = both(ref.shape, *masks)
    is_byte = jnp.issubdtype(ref.dtype, jnp.floating) and ref.dtype.itemsize == 1
    if mask is None:
        found = plgpu.load(ref)
        return found.astype(jnp.float32) if is_byte else found
    if is_byte:
        return jnp.where(mask, plgpu.load(ref, mask=mask).astype(jnp.float32), 0.0)
    return plgpu.load(ref, mask=mask, other=0)


def both(shape: tuple[int, ...], *masks: jax.Array | None) -> jax.Array | None:
    """Returns what is true in all masks; None if there is none."""
    there = [mask for mask in masks if mask is not None]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, there), shape) if there else None


def along(mask: jax.Array | None) -> jax.Array | None:
    """Returns a mask of columns."""
    return None if mask is None else mask[None]


def across(mask: jax.Array | None) -> jax.Array | None:
    """Returns a mask of rows."""
    return None if mask is None else mask[:, None]


def as_numbers(codes: jax.Array, dtype: Any) -> jax.Array:
    """Returns codes as numbers of a dtype, which holds them all."""
    return codes if codes.dtype == dtype else codes.astype(jnp.float32).astype(dtype)


def dot(x_TX: jax.Array, numbers: jax.Array, contract: int = 0) -> jax.Array:
    """Returns the product over columns of x and an axis of the other: float32, int32 of int8."""
    precision = jax.lax.Precision.HIGHEST if x_TX.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x_TX,
        numbers,
        (((1,), (contract,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.int32 if x_TX.dtype == jnp.int8 else jnp.float32,
    )


def tanh(x: jax.Array) -> jax.Array:
    """Returns tanh(x), which Triton has no operation for: of exponentials that do not overflow."""
    small = jnp.exp(-2.0 * jnp.abs(x))
    return jnp.sign(x) * (1.0 - small) / (1.0 + small)


def lacking(need: int, backend: Backend) -> str | None:
    """Returns why a kernel whose programs share so many bytes is declined, or None."""
    if need > backend.shared_bytes:
        return f"{need} bytes to share; {backend.shared_bytes} are to be had"
    return None


def compiler_params(warps: int, stages: int, need: int, backend: Backend) -> plgpu.CompilerParams:
    """Returns how a kernel is to be compiled whose programs share `need` bytes, by its formula."""
    assert need <= backend.shared_bytes, "declined before"
    return plgpu.CompilerParams(num_warps=warps, num_stages=stages)


def cannot_read(codes: jax.Array, backend: Backend) -> str | None:
    """Returns why a GPU's kernel cannot read an array of numbers or codes, or None."""
    if codes.dtype == jnp.float8_e4m3fn and backend.chip not in FP8_CHIPS:
        return f"codes of {codes.dtype}; {' and '.join(FP8_CHIPS)} have them"
    return cannot_number(codes)


def cannot_number(array: jax.Array) -> str | None:
    """Returns why a GPU's kernel cannot reach all of an array, or None.

    jax numbers elements by 32 bits, one the sign's, up to arrays of 4 GiB.
    """
    if array.size > 2**31 and array.size * array.dtype.itemsize <= 2**32:
        return f"an array of {array.size} elements of a byte; 2**31 can be numbered"
    return None

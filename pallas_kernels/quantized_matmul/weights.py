# SPDX-License-Identifier: Apache-2.0
"""A matrix as codes, how two codes share a byte, and rows as codes.

Letters of this package: T rows, D a matrix's inputs, F its outputs, G groups of inputs that share a
scale, X columns of codes as they are kept (of bytes, if a byte has two), P parts of a byte.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CODES = ("int8", "uint8", "float8_e4m3fn")
# Bytes of a block: one column of a TPU's vector registers each. A block has twice as many inputs.
PACK = 128
CENTER = 8  # of 4-bit codes, their zero unless others are given
MOST = 127.0  # the largest code of a row


class QuantizedWeight(NamedTuple):
    """A matrix [F, D], as checkpoints have it: value = (code - zero) * scale.

    codes: int8 or float8_e4m3fn [F, D]; or uint8 [F, D / 2], each byte two codes of 0..15 in the
    order of `pack_int4`. scales: float32 [F, G], of D / G successive inputs each. zeros: float32
    [F, G]; None is 0, of 4-bit codes 8.

    Devices may share out F as they like, D where groups end, and of 4-bit codes at multiples of 256
    inputs.
    """

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None

    @property
    def parts(self) -> int:
        """How many codes a column has."""
        return 2 if self.codes.dtype == jnp.uint8 else 1

    @property
    def inputs(self) -> int:
        """D."""
        return self.parts * self.codes.shape[1]

    @property
    def groups(self) -> int:
        """G, the scales of an output."""
        return self.scales.shape[1]

    @property
    def group(self) -> int:
        """The inputs that share a scale."""
        return self.inputs // self.groups


def paired(array: Any) -> Any:
    """Returns [..., D] as [..., 2, D / 2]: what is in low halves of bytes, and what is in high.

    Of each 256 inputs the low halves of 128 bytes have the first 128, the high halves the others,
    so that a register of bytes becomes two of codes and no code moves to another column. What is
    left at the end, an even number, is halved likewise.
    """
    xp = jnp if isinstance(array, jax.Array) else np
    *lead, D = array.shape
    whole = D - D % (2 * PACK)
    blocks = array[..., :whole].reshape(*lead, whole // (2 * PACK), 2, PACK)
    blocks = xp.moveaxis(blocks, -2, -3).reshape(*lead, 2, whole // 2)
    rest = array[..., whole:].reshape(*lead, 2, (D - whole) // 2)
    return xp.concatenate([blocks, rest], axis=-1)


def pack_int4(codes_FD: Any) -> Any:
    """Returns bytes_FX, uint8, of codes of 0..15: see `paired` for which two share a byte.

    Raises ValueError for an odd number of inputs.
    """
    if codes_FD.shape[-1] % 2:
        found = f"{codes_FD.shape[-1]} inputs cannot be packed two to a byte"
        raise ValueError(f"{found}; append a column of codes that are zero")
    pairs = paired(codes_FD.astype(np.uint8))
    return pairs[..., 0, :] | (pairs[..., 1, :] << np.uint8(4))


def unpack_int4(bytes_FX: Any) -> Any:
    """Returns codes_FD, uint8 of 0..15: what `pack_int4` packed."""
    xp = jnp if isinstance(bytes_FX, jax.Array) else np
    *lead, X = bytes_FX.shape
    whole = X - X % PACK
    shift = np.array([[0], [4]], np.uint8).reshape(*(1,) * (len(lead) + 1), 2, 1)

    def halves(part: Any, size: int) -> Any:
        # As one elementwise expression, which XLA computes where it is used.
        blocks = part.reshape(*lead, part.shape[-1] // max(size, 1), 1, size)
        return ((blocks >> shift) & np.uint8(15)).reshape(*lead, 2 * part.shape[-1])

    if whole in (0, X):
        return halves(bytes_FX, PACK if whole else X)
    ends = halves(bytes_FX[..., :whole], PACK), halves(bytes_FX[..., whole:], X - whole)
    return xp.concatenate(ends, axis=-1)


def centered(weight: QuantizedWeight) -> tuple[jax.Array, jax.Array | None]:
    """Returns (codes_FD, zeros_FG or None) of one code a column; 4-bit ones as int8 of -8..7."""
    if weight.parts == 1:
        return weight.codes, weight.zeros
    codes_FD = unpack_int4(weight.codes).astype(jnp.int8) - jnp.int8(CENTER)
    return codes_FD, None if weight.zeros is None else weight.zeros - CENTER


def quantize_rows(x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (codes_TD int8, scale_T1 float32): a row's largest number is 127 times its scale."""
    x_TD = x_TD.astype(jnp.float32)
    most_T1 = jnp.abs(x_TD).max(axis=1, keepdims=True)
    # 127 over the least normal number is infinite; below it all codes are 0 anyway.
    tiny = most_T1 < 1e-30
    codes_TD = jnp.round(x_TD * (MOST / jnp.where(tiny, 1.0, most_T1))).astype(jnp.int8)
    return codes_TD, jnp.where(tiny, 0.0, most_T1 / MOST)


def group_sums(x_TD: jax.Array, groups: int) -> jax.Array:
    """Returns sums_TG, float32, of the numbers of each group: what a zero of 1 takes off."""
    T, D = x_TD.shape
    total = jnp.int32 if x_TD.dtype == jnp.int8 else jnp.float32
    return x_TD.reshape(T, groups, D // groups).astype(total).sum(axis=2).astype(jnp.float32)

# SPDX-License-Identifier: Apache-2.0
"""Rows that devices of a mesh axis send each other, as many to each as there are.

`jax.lax.ragged_all_to_all` where the platform has it (TPU, GPU), and on CPU the same of the same
arguments by an exchange of padded rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding.collectives import Axis


class Sizes(NamedTuple):
    """How many rows go where, in the terms of `ragged_all_to_all`; int32 [ways] each.

    input_offsets: where the rows for a device begin in what is sent. send_sizes: how many they are.
    output_offsets: where that device puts them. recv_sizes: how many come from it.
    """

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array

    def back(self, axis: Axis) -> "Sizes":
        """Returns the sizes with which what came goes back to where it was."""
        received = exclusive_sums(self.recv_sizes)
        # They go where they were sent from, which only their owner knows.
        begun_PP = axis.gather(self.input_offsets[None], 0)
        return Sizes(received, self.recv_sizes, begun_PP[:, axis.here()], self.send_sizes)


def exclusive_sums(sizes: jax.Array) -> jax.Array:
    """Returns the sum of all entries before each."""
    return jnp.cumsum(sizes) - sizes


def sizes_of(count_PP: jax.Array, begin_P: jax.Array, axis: Axis) -> Sizes:
    """Returns the sizes of an exchange in which device p sends count_PP[p, q] rows to q.

    `begin_P`: where this device's rows for each other begin. What comes is put in order of senders,
    without gaps.
    """
    here = axis.here()
    before_PP = jnp.cumsum(count_PP, axis=0) - count_PP
    return Sizes(begin_P, count_PP[here], before_PP[here], count_PP[:, here])


def exchange(
    rows_SD: jax.Array, sizes: Sizes, axis: Axis, *, most: int, received: int
) -> jax.Array:
    """Returns the rows that came, [received, D]; those beyond the sum of sizes are zeros.

    `most`: a bound on the rows that one device sends another.
    """
    output = jnp.zeros((received, *rows_SD.shape[1:]), rows_SD.dtype)
    return jax.lax.platform_dependent(
        rows_SD,
        output,
        *sizes,
        cpu=partial(padded_exchange, axis=axis, most=most),
        default=partial(jax.lax.ragged_all_to_all, axis_name=axis.names),
    )


def padded_exchange(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis: Axis,
    most: int,
) -> jax.Array:
    """Returns what `ragged_all_to_all` returns, by an `all_to_all` of `most` rows for each."""
    index_C = jnp.arange(most, dtype=jnp.int32)
    sent_PC = jnp.clip(input_offsets[:, None] + index_C[None], 0, operand.shape[0] - 1)
    came = jax.lax.all_to_all(operand[sent_PC], axis.names, split_axis=0, concat_axis=0)
    put_PP = axis.gather(output_offsets[None], 0)
    place_PC = put_PP[:, axis.here()][:, None] + index_C[None]
    place_PC = jnp.where(index_C[None] < recv_sizes[:, None], place_PC, output.shape[0])
    flat = came.reshape(-1, *operand.shape[1:])
    return output.at[place_PC.reshape(-1)].set(flat, mode="drop")

# SPDX-License-Identifier: Apache-2.0
"""Pages in the host's memory: one of a partition, and arrays that have one of each for programs."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding import Rules, part_of


class Places(NamedTuple):
    """Where a partition's pages stand in arrays that have those of all.

    `slot`: the abstract value of a page in the host's memory, one of each partition. `mesh`: the
    devices of this partition.
    """

    slot: Any
    mesh: Mesh
    number: int = 0
    partitions: int = 1

    @property
    def page(self) -> jax.ShapeDtypeStruct:
        """The abstract value of a page of this partition in the host's memory."""
        shape = (self.slot.shape[0] // self.partitions, *self.slot.shape[1:])
        where = self.slot.sharding
        own = NamedSharding(self.mesh, where.spec, memory_kind=where.memory_kind)
        return jax.ShapeDtypeStruct(shape, self.slot.dtype, sharding=own)

    def own(self, array: jax.Array) -> jax.Array | None:
        """Returns this partition's page of an array that has one of each.

        None where other processes have all of the partition's devices.
        """
        if self.partitions == 1:
            return array
        page, shards = self.page, {shard.device: shard.data for shard in array.addressable_shards}
        parts = [shards[device] for device in page.sharding.addressable_devices]
        if not parts:
            return None
        return jax.make_array_from_single_device_arrays(page.shape, page.sharding, parts)

    def zeros(self) -> jax.Array:
        """Returns an array that has a page of zeros of each partition."""
        part = self.slot.sharding.shard_shape(self.slot.shape)
        zeros = np.zeros(part, self.slot.dtype)
        return jax.make_array_from_callback(self.slot.shape, self.slot.sharding, lambda _: zeros)

    def whole(self, page: jax.Array | None, others: jax.Array | None) -> jax.Array:
        """Returns the array with this partition's page, and of `others` their own.

        They are not asked for where there is one partition.
        """
        if self.partitions == 1:
            assert page is not None, "its devices are ours"
            return page
        assert others is not None, "they are there, of several"
        shards = {shard.device: shard.data for shard in others.addressable_shards}
        if page is not None:
            shards |= {shard.device: shard.data for shard in page.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            self.slot.shape, self.slot.sharding, list(shards.values())
        )


def page_places(mesh: Mesh, rules: Rules, slot: Any) -> list[Places]:
    """Returns where the pages of each partition stand."""
    axes = rules.mesh_axes("rows")
    count = rules.ways(mesh, "rows")
    return [Places(slot, part_of(mesh, axes, number), number, count) for number in range(count)]


def stripes_of(page: jax.ShapeDtypeStruct) -> int:
    """Returns the devices that the tokens of a page are dealt out to."""
    assert isinstance(page.sharding, NamedSharding)
    return page.sharding.mesh.shape["sequence"]

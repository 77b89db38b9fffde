# SPDX-License-Identifier: Apache-2.0
"""Logical axis names and the table that maps them to mesh axes."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Spec:
    """One array, declared once: shape, the meaning of each axis (None: never sharded), dtype."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} has {len(self.shape)} axes, names {self.axes}")

    def stacked(self, layers: int) -> "Spec":
        """Returns the spec of `layers` such arrays on a new leading axis."""
        return Spec((layers, *self.shape), (None, *self.axes), self.dtype)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which mesh axis each logical axis is split over; logical axes not named are replicated."""

    table: Mapping[str, str]

    def partition(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Returns the PartitionSpec of `axes`; raises ValueError if a mesh axis is used twice."""
        mapped = tuple(self.table.get(axis) if axis else None for axis in axes)
        used = [axis for axis in mapped if axis]
        if twice := [axis for axis in used if used.count(axis) > 1]:
            raise ValueError(
                f"axes {axes} map to {mapped}, which uses mesh axis {twice[0]!r} twice; "
                "replicate one of them in Rules"
            )
        return PartitionSpec(*mapped)

    def sharding(self, mesh: Mesh, spec: Spec) -> NamedSharding:
        """Returns the sharding of `spec` on `mesh`; ValueError if an axis is not divisible."""
        partition = self.partition(spec.axes)
        for length, name, axis in zip(spec.shape, spec.axes, partition, strict=True):
            if axis and length % mesh.shape[axis]:
                raise ValueError(
                    f"axis {name!r} has length {length}, which mesh axis {axis!r} of size "
                    f"{mesh.shape[axis]} does not divide; use a size that divides {length}"
                )
        return NamedSharding(mesh, partition)

    def abstract(self, mesh: Mesh, spec: Spec) -> jax.ShapeDtypeStruct:
        """Returns `spec` as an abstract array with its sharding on `mesh`."""
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=self.sharding(mesh, spec))


REPLICATED = Rules({})
TENSOR_PARALLEL = Rules(
    {"query_heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor"}
)

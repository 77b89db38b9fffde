# SPDX-License-Identifier: Apache-2.0
"""Logical axis names and the table that maps them to mesh axes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One array, declared once: shape, the meaning of each axis (None: never sharded), dtype.

    by_rows: rows of it are looked up, so each is to lie in one piece.
    """

    shape: tuple[int, ...]
    axes: Axes
    dtype: np.dtype
    by_rows: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} has {len(self.shape)} axes, names {self.axes}")

    def stacked(self, layers: int) -> "Spec":
        """Returns the spec of `layers` such arrays on a new leading axis."""
        return Spec((layers, *self.shape), ("layers", *self.axes), self.dtype)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which mesh axes each logical axis is split over; logical axes not named are replicated."""

    table: Mapping[str, tuple[str, ...]]

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Returns the mesh axes that a logical axis is split over."""
        return self.table.get(axis, ()) if axis else ()

    def ways(self, mesh: Mesh, axis: str | None) -> int:
        """Returns in how many parts a logical axis is split on `mesh`."""
        return math.prod(mesh.shape[name] for name in self.mesh_axes(axis))

    def partition(self, axes: Axes) -> PartitionSpec:
        """Returns the PartitionSpec of `axes`; raises ValueError if a mesh axis is used twice."""
        mapped = [self.mesh_axes(axis) for axis in axes]
        used = [name for names in mapped for name in names]
        if twice := [name for name in used if used.count(name) > 1]:
            raise ValueError(
                f"axes {axes} map to {mapped}, which uses mesh axis {twice[0]!r} twice; "
                "replicate one of them in Rules"
            )
        single = [names[0] if len(names) == 1 else names or None for names in mapped]
        return PartitionSpec(*single)

    def sharding(self, mesh: Mesh, spec: Spec) -> NamedSharding:
        """Returns the sharding of `spec` on `mesh`; ValueError if an axis is not divisible."""
        partition = self.partition(spec.axes)
        for length, axis in zip(spec.shape, spec.axes, strict=True):
            if length % (ways := self.ways(mesh, axis)):
                names = " and ".join(repr(name) for name in self.mesh_axes(axis))
                raise ValueError(
                    f"axis {axis!r} has length {length}, which mesh axis {names} of size {ways} "
                    f"does not divide; use a size that divides {length}"
                )
        return NamedSharding(mesh, partition)

    def layout(self, mesh: Mesh, spec: Spec) -> Layout | None:
        """Returns how `spec` lies in the memory of the devices of `mesh`; None: as XLA has it.

        XLA for TPU lays a matrix whose rows fill no whole registers out by columns, and then turns
        all of it round for a look into some rows.
        """
        is_tpu = mesh.devices.flat[0].platform == "tpu"
        return Layout(tuple(range(len(spec.shape)))) if spec.by_rows and is_tpu else None

    def abstract(self, mesh: Mesh, spec: Spec) -> jax.ShapeDtypeStruct:
        """Returns `spec` as an abstract array with its sharding and its layout on `mesh`."""
        place: Any = self.sharding(mesh, spec)
        if (layout := self.layout(mesh, spec)) is not None:
            place = Format(layout, place)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place)

    def whole(self, mesh: Mesh, part: Any, axes: Axes) -> jax.ShapeDtypeStruct:
        """Returns the abstract array of which every device has a part such as `part`."""
        shape = tuple(
            length * self.ways(mesh, axis) for length, axis in zip(part.shape, axes, strict=True)
        )
        return self.abstract(mesh, Spec(shape, axes, np.dtype(part.dtype)))


REPLICATED = Rules({})
# Rows of a batch, the pages of their caches, and experts belong to one partition each.
RULES = Rules(
    {
        "query_heads": ("tensor",),
        "kv_heads": ("tensor",),
        "ffn": ("tensor",),
        "expert_ffn": ("tensor",),
        "vocab": ("tensor",),
        "experts": ("expert",),
        "layers": ("pipe",),
        "rows": ("data", "expert"),
        "pages": ("data", "expert", "sequence"),
        "page_parts": ("data", "expert", "sequence", "pipe"),
    }
)
# Experts whole, over all devices that have different tokens or heads.
EXPERT_PARALLEL = Rules({**RULES.table, "experts": ("data", "expert", "tensor"), "expert_ffn": ()})

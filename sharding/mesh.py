# SPDX-License-Identifier: Apache-2.0
"""The device mesh. Every program runs on one, a mesh of one device included."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "pipe", "sequence", "expert", "tensor")


def make_mesh(devices: Sequence[jax.Device] | None = None, **sizes: int) -> Mesh:
    """Returns a mesh over `devices` with all of AXES, those not given having size 1.

    `devices` defaults to as many of this process's devices as the sizes need. Raises ValueError
    for an unknown axis, a size below 1, or sizes that do not multiply to the number of devices.
    """
    if unknown := sorted(set(sizes) - set(AXES)):
        raise ValueError(f"unknown mesh axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
    if small := [axis for axis, size in sizes.items() if size < 1]:
        raise ValueError(f"mesh axis {small[0]!r} has size {sizes[small[0]]}; use 1 or more")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    count = int(np.prod(shape))
    devices = list(jax.local_devices()[:count] if devices is None else devices)
    if count != len(devices):
        raise ValueError(
            f"mesh {dict(sizes)} needs {count} devices, {len(devices)} are there; "
            "use axis sizes whose product is the number of devices"
        )
    return Mesh(device_grid(devices, shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_grid(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the devices in a mesh's shape, those near each other along the last axes.

    On a TPU neighbours of the torus are neighbours of the mesh where that can be, a physical axis
    split if it must; elsewhere, and where no such order is found, it is the order of ids.
    """
    if len(devices) > 1 and devices[0].platform == "tpu":
        try:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except (NotImplementedError, ValueError, AssertionError):
            pass  # part of a slice, or a shape that its torus does not have
    return np.array(devices, dtype=object).reshape(shape)


def part_of(mesh: Mesh, axes: Sequence[str], number: int) -> Mesh:
    """Returns the devices that stand at `number` along `axes`, counted as if they were one axis."""
    place = np.unravel_index(number, [mesh.shape[axis] for axis in axes])
    chosen = [
        slice(place[axes.index(axis)], place[axes.index(axis)] + 1) if axis in axes else slice(None)
        for axis in mesh.axis_names
    ]
    return Mesh(mesh.devices[tuple(chosen)], mesh.axis_names, axis_types=mesh.axis_types)


def devices_along(mesh: Mesh, axes: Sequence[str]) -> list[jax.Device]:
    """Returns the devices along some axes, the first of all others."""
    chosen = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    return list(mesh.devices[chosen].flat)


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes in a text such as "data=2,tensor=4"; the empty text is one device.

    Raises ValueError for what is not so, an unknown axis, or one that stands twice.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise ValueError(
                f"mesh={text!r}: {part!r} is not an axis and its size; write such as "
                f'"data=2,tensor=4", each of {", ".join(AXES)} at most once'
            )
        sizes[axis] = int(size)
    return sizes

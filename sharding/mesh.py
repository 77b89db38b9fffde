# SPDX-License-Identifier: Apache-2.0
"""The device mesh. Every program runs on one, a mesh of one device included."""

from collections.abc import Sequence

import jax
import numpy as np
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
    # A plain Mesh: `jax.make_mesh` refuses shapes that split a physical axis.
    grid = np.array(devices, dtype=object).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))

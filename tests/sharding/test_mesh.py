# SPDX-License-Identifier: Apache-2.0
"""A mesh has all axes, over exactly the devices it was asked for."""

import jax
import numpy as np
import pytest

from sharding import AXES, make_mesh


def test_axes_not_given_have_size_one_and_devices_keep_their_order():
    mesh = make_mesh(tensor=4, data=2)
    assert mesh.axis_names == AXES == ("data", "pipe", "sequence", "expert", "tensor")
    assert mesh.shape == {"data": 2, "pipe": 1, "sequence": 1, "expert": 1, "tensor": 4}
    assert mesh.devices.reshape(2, 4).tolist() == np.reshape(jax.devices(), (2, 4)).tolist()


def test_a_mesh_takes_as_many_devices_as_it_needs():
    assert make_mesh().devices.ravel().tolist() == jax.devices()[:1]
    assert make_mesh(tensor=2).devices.ravel().tolist() == jax.devices()[:2]


def test_given_devices_are_all_used():
    devices = jax.devices()[4:6]
    assert make_mesh(devices, expert=2).devices.ravel().tolist() == devices
    with pytest.raises(ValueError, match="mesh {'tensor': 2} needs 2 devices, 8 are there"):
        make_mesh(jax.devices(), tensor=2)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"tensor": 16}, "mesh {'tensor': 16} needs 16 devices, 8 are there; use axis sizes whose"),
        (
            {"model": 2},
            "unknown mesh axis 'model'; the axes are data, pipe, sequence, expert, tens",
        ),
        ({"tensor": 0}, "mesh axis 'tensor' has size 0; use 1 or more"),
        ({"tensor": -1, "data": -1}, "mesh axis 'tensor' has size -1; use 1 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)

# SPDX-License-Identifier: Apache-2.0
"""A part of a parameter is that of the whole, and no more of the checkpoint is read for it."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import checkpoints
from checkpoints import huggingface
from checkpoints.buffers import read_array
from checkpoints.huggingface_writer import write_huggingface
from checkpoints.load import load_parameters
from checkpoints.orbax_writer import write_orbax
from checkpoints.parts import load_parts, read_part
from checkpoints.sources import NO_TENSOR, Source, Target
from sharding import make_mesh
from tests.checkpoints.written import TENSORS, Memory


@pytest.fixture(params=[write_huggingface, write_orbax])
def checkpoint(request, tmp_path):
    request.param(Memory(TENSORS), tmp_path / "model")
    return checkpoints.open_checkpoint(tmp_path / "model")


def some_index(rng, shape):
    ends = [sorted(rng.choice(length + 1, 2, replace=False).tolist()) for length in shape]
    return tuple(slice(first, stop) for first, stop in ends)


def test_a_part_of_a_tensor_is_that_of_the_whole(checkpoint):
    rng = np.random.default_rng(0)
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(checkpoint.read_part(name, ()), array)
        for _ in range(10):
            index = some_index(rng, array.shape)
            np.testing.assert_array_equal(checkpoint.read_part(name, index), array[index])


def turn(array):
    return np.ascontiguousarray(array.T)


LAYERS = ("layers.0.w", "layers.1.w")
CASES = {
    "plain": (Source(("embed",)), (50, 24)),
    "rows": (Source(("layers.1.w",), rows=(8, 24)), (16, 24)),
    "turned": (Source(("embed",), turn), (24, 50)),
    "turned rows": (Source(("embed",), turn, rows=(10, 30)), (24, 20)),
    "stack": (Source(LAYERS, stack=1), (2, 40, 24)),
    "turned stack": (Source((*LAYERS, NO_TENSOR, "layers.0.w"), turn, stack=2), (2, 2, 24, 40)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_part_of_a_parameter_is_that_of_the_whole(checkpoint, case):
    source, shape = CASES[case]
    target, rng = Target(shape, np.float32), np.random.default_rng(1)
    whole = read_part(checkpoint, source, target, tuple(slice(0, length) for length in shape))
    arrays = [
        np.zeros(shape[source.stack :])
        if name == NO_TENSOR
        else (source.transform or np.asarray)(
            TENSORS[name].astype(np.float32)[slice(*(source.rows or (None,)))]
        )
        for name in source.names
    ]
    np.testing.assert_array_equal(whole, np.reshape(arrays, shape))
    for _ in range(10):
        index = some_index(rng, shape)
        part = read_part(checkpoint, source, target, index)
        assert part.dtype == np.float32
        np.testing.assert_array_equal(part, whole[index])


def test_parts_make_the_array_that_a_whole_load_makes(checkpoint):
    mesh = make_mesh(jax.devices()[:8], data=2, tensor=4)
    for axes in (("tensor", None), (None, "tensor"), ("data", "tensor"), (None, None)):
        source = Source(("layers.0.w",))
        target = Target((40, 24), np.float32, NamedSharding(mesh, PartitionSpec(*axes)))
        parts = load_parts(checkpoint, source, target)
        whole = load_parameters(checkpoint, {"w": source}, {"w": target})["w"]
        assert parts.sharding == whole.sharding
        np.testing.assert_array_equal(np.asarray(parts), np.asarray(whole))


def test_only_the_rows_of_a_part_are_read(tmp_path, monkeypatch):
    write_huggingface(Memory(TENSORS), tmp_path / "model")
    checkpoint, shapes = checkpoints.open_checkpoint(tmp_path / "model"), []

    def noticed(path, start, shape, dtype):
        shapes.append(shape)
        return read_array(path, start, shape, dtype)

    monkeypatch.setattr(huggingface, "read_array", noticed)
    index = (slice(1, 2), slice(4, 12), slice(2, 6))
    part = read_part(checkpoint, Source(LAYERS, stack=1), Target((2, 40, 24), np.float32), index)
    np.testing.assert_array_equal(part[0], TENSORS["layers.1.w"][4:12, 2:6].astype(np.float32))
    assert shapes == [(8, 24)]

# SPDX-License-Identifier: Apache-2.0
"""Tensors come in memory that the CPU device takes over, and no file stays mapped."""

import pathlib

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
from checkpoints.buffers import ALIGNMENT, aligned_empty, read_array
from checkpoints.load import load_parameters
from checkpoints.sources import Source, Target
from tests.checkpoints.gguf_files import write_gguf

MAPS = pathlib.Path("/proc/self/maps")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.bool_])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3)])
def test_an_array_is_aligned_and_read_whole(tmp_path, shape, dtype):
    values = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    path = tmp_path / "file"
    path.write_bytes(b"abc" + values.tobytes() + b"more")
    array = read_array(path, 3, shape, dtype)
    assert array.ctypes.data % ALIGNMENT == 0 or not array.size
    assert (array.shape, array.dtype) == (shape, dtype)
    np.testing.assert_array_equal(array, values)


def test_the_cpu_device_takes_over_an_aligned_array():
    """Else a load would copy each parameter once more."""
    array = aligned_empty((64, 64), np.float32)
    array[:] = 1
    put = jax.device_put(array, jax.devices("cpu")[0])
    assert put.unsafe_buffer_pointer() == array.ctypes.data


def test_a_file_that_ends_early_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    with pytest.raises(ValueError, match="file: became shorter while it was read; fetch it again"):
        read_array(path, 4, (2,), np.float32)


def write_model(folder, kind):
    """Writes a checkpoint of one tensor "w"; returns (the path to open, the file of weights)."""
    values = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
    if kind == "gguf":
        path = write_gguf(folder / "m.gguf", {"w": (values, gguf.GGMLQuantizationType.F32)})
        return path, path
    (folder / "config.json").write_text("{}")
    save_file({"w": values}, folder / "model.safetensors")
    return folder, folder / "model.safetensors"


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list a process's maps")
@pytest.mark.parametrize("kind", ["gguf", "huggingface"])
def test_an_opened_checkpoint_maps_no_file(tmp_path, kind):
    path, weights = write_model(tmp_path, kind)
    checkpoint = checkpoints.open_checkpoint(path)
    array = checkpoint.read("w")
    targets = {"w": Target(array.shape, jnp.float32)}
    loaded = load_parameters(checkpoint, {"w": Source(("w",))}, targets)
    assert checkpoint.kind == kind and str(weights) not in MAPS.read_text()
    # Each read is a memory of its own: what one caller does, no other sees.
    array[:] = -1
    assert loaded["w"][0, 1] == 1 and checkpoint.read("w")[0, 1] == 1


@pytest.mark.parametrize("kind", ["gguf", "huggingface"])
def test_a_checkpoint_cut_after_it_was_opened_is_named(tmp_path, kind):
    path, weights = write_model(tmp_path, kind)
    checkpoint = checkpoints.open_checkpoint(path)
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{weights.name}: became shorter while it was read"):
        checkpoint.read("w")

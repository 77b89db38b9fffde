# SPDX-License-Identifier: Apache-2.0
"""Dequantization equals the gguf package's, bit for bit, on whatever bytes."""

import gguf
import numpy as np
import pytest

import checkpoints
from checkpoints import gguf_blocks
from tests.checkpoints.gguf_files import write_gguf


@pytest.mark.parametrize("name", gguf_blocks.BLOCK_TYPES)
@pytest.mark.parametrize("shape", [(512,), (3, 768), (2, 3, 256)])
def test_random_bytes_give_the_same_bits(tmp_path, name, shape):
    kind = gguf.GGMLQuantizationType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(len(shape))
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block * block_bytes), np.uint8)
    path = write_gguf(tmp_path / "m.gguf", {"w": (data, kind)})
    checkpoint = checkpoints.open_checkpoint(path)
    assert checkpoint.tensors["w"] == (shape, name)
    # Random halves are NaN and infinite too; numpy warns of them in either reader.
    with np.errstate(all="ignore"):
        array = checkpoint.read("w")
        expected = gguf.dequantize(data, kind).reshape(shape)
    assert array.shape == shape
    if gguf_blocks.BLOCK_TYPES[name].decode is not None:
        assert array.dtype == np.float32
    same = array.astype(np.float32).view(np.uint32) == expected.view(np.uint32)
    assert np.all(same | (np.isnan(array.astype(np.float32)) & np.isnan(expected)))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_steps_do_not_show(monkeypatch, name):
    size, layout = gguf_blocks.BLOCK_TYPES[name].size, gguf_blocks.BLOCK_TYPES[name].layout
    data = np.random.default_rng(0).integers(0, 60, layout.itemsize * 37, np.uint8)
    whole = gguf_blocks.dequantize(data, name, (37, size))
    monkeypatch.setattr(gguf_blocks, "_ELEMENTS_PER_STEP", 5 * size)
    np.testing.assert_array_equal(gguf_blocks.dequantize(data, name, (37, size)), whole)

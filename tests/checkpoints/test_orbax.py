# SPDX-License-Identifier: Apache-2.0
"""A model written with Orbax is read back as it was; what is damaged or unknown is named."""

import os
import shutil

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import checkpoints
from checkpoints.orbax_writer import write_orbax
from tests.checkpoints.written import CONFIG, TENSORS, Memory, same_tokenizer
from tests.fixtures import fallback_tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model of four tensors with a tokenizer, written once."""
    folder = tmp_path_factory.mktemp("written") / "m"
    write_orbax(Memory(TENSORS, tokenizer=fallback_tokenizer()), folder)
    return folder


@pytest.fixture
def model(written, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(written, tmp_path / "m")


def test_what_is_written_is_read_back(written):
    memory = Memory(TENSORS, tokenizer=fallback_tokenizer())
    checkpoint = checkpoints.open_checkpoint(written)
    assert checkpoint.kind == "orbax" and checkpoint.path == written
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == memory.generation_config
    assert checkpoint.tensors == memory.tensors
    for name, values in TENSORS.items():
        array = checkpoint.read(name)
        assert array.dtype == values.dtype and array.flags.writeable
        np.testing.assert_array_equal(array, values)
    assert same_tokenizer(checkpoint.tokenizer(), memory.tokenizer())
    with pytest.raises(KeyError):
        checkpoint.read("nope")


def test_orbax_alone_reads_the_parameters(written):
    """By the library's own restore: nothing of ours is needed to get the weights back."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(written / "parameters")
    assert restored.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(restored[name], values)


def test_nothing_but_the_folder_is_left(written):
    assert [path.name for path in written.parent.iterdir()] == ["m"]
    names = {path.name for path in written.iterdir()}
    settings = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == settings | {"chat_template.jinja", "headrace.json", "parameters"}


def test_a_large_tensor_is_stored_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoints.orbax_writer._CHUNK_BYTES", 1000)
    values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    write_orbax(Memory({"w": values}, config=CONFIG | {"dtype": "float32"}), tmp_path / "m")
    np.testing.assert_array_equal(checkpoints.open_checkpoint(tmp_path / "m").read("w"), values)


def test_a_target_that_is_there_is_refused_and_kept(written):
    before = sorted(os.listdir(written))
    with pytest.raises(FileExistsError, match="m: is there already; name a new folder"):
        write_orbax(Memory(TENSORS), written)
    assert sorted(os.listdir(written)) == before


def refused(folder, message):
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint = checkpoints.open_checkpoint(folder)
        for name in checkpoint.tensors:
            checkpoint.read(name)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_bare_orbax_checkpoint_is_refused(written):
    refused(written / "parameters", "headrace.json is missing.*not Orbax parameters alone")


def test_integers_may_stand_beside_the_type(tmp_path):
    tensors = {"w": np.ones(3, ml_dtypes.bfloat16), "steps": np.arange(3)}
    write_orbax(Memory(tensors), tmp_path / "m")
    assert checkpoints.open_checkpoint(tmp_path / "m").read("steps").dtype == np.int64

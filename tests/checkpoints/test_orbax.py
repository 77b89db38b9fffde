# SPDX-License-Identifier: Apache-2.0
"""A model written with Orbax is read back as it was; what is damaged or unknown is named."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

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


@pytest.mark.parametrize(
    "manifest, message",
    [
        (None, "headrace.json is missing, which names the format's version"),
        ("{", "headrace.json: "),
        ({"dtype": "float32"}, "headrace.json: format_version is None; an integer from 1 on"),
        ({"format_version": "1", "dtype": "float32"}, "format_version is '1'; an integer"),
        ({"format_version": True, "dtype": "float32"}, "format_version is True; an integer"),
        ({"format_version": 0, "dtype": "float32"}, "format_version is 0; an integer from 1 on"),
        (
            {"format_version": 2, "dtype": "float32"},
            "format_version is 2, and this Headrace reads 1 at most; use a newer one",
        ),
        ({"format_version": 1, "dtype": "int4"}, "dtype is 'int4'; one of float64, float32"),
        ({"format_version": 1}, "dtype is None; one of float64, float32"),
        (
            {"format_version": 1, "dtype": "float32"},
            "tensor 'embed' is bfloat16, though headrace.json says float32",
        ),
    ],
)
def test_a_version_or_type_that_is_not_ours_is_named(model, manifest, message):
    file = model / "headrace.json"
    if manifest is None:
        file.unlink()
    else:
        file.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    refused(model, message)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def data_files(folder):
    return [path for path in (folder / "parameters").rglob("d/*") if path.is_file()]


def cut_data(folder):
    for path in data_files(folder):
        cut(path)


def lose_data(folder):
    for path in data_files(folder):
        path.unlink()


def cut_values(folder):
    """Cuts the file of the tensors' values, not that of their metadata."""
    cut(max(data_files(folder), key=lambda path: path.stat().st_size))


def lose_chunk(folder):
    """Takes the values of one tensor away and leaves its metadata: they must not read as zeros."""
    files = {"driver": "file", "path": f"{folder / 'parameters'}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": files}).result()
    chunks = [key for key in store.list().result() if not key.endswith((b".zarray", b"zarr.json"))]
    store.delete_range(tensorstore.KvStore.KeyRange(chunks[0], chunks[0] + b"\0")).result()


DAMAGES = {
    "lost chunk": lose_chunk,
    "no parameters": lambda folder: shutil.rmtree(folder / "parameters"),
    "no metadata": lambda folder: (folder / "parameters/_METADATA").unlink(),
    "cut metadata": lambda folder: cut(folder / "parameters/_METADATA"),
    "other metadata": lambda folder: (folder / "parameters/_METADATA").write_text("[1]"),
    "no manifest": lambda folder: (folder / "parameters/manifest.ocdbt").unlink(),
    "cut manifest": lambda folder: cut(folder / "parameters/manifest.ocdbt"),
    "cut data": cut_data,
    "lost data": lose_data,
    "cut values": cut_values,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_one_line(model, damage):
    DAMAGES[damage](model)
    refused(model, "_METADATA: |tensor '.*' cannot be read: .*the folder is damaged or truncated")


def test_settings_are_needed(model):
    (model / "config.json").unlink()
    refused(model, "config.json is missing")


def test_a_bare_orbax_checkpoint_is_refused(written):
    refused(written / "parameters", "headrace.json is missing.*not Orbax parameters alone")


def write_tree(folder, tree):
    """Writes another tree in place of the model's parameters."""
    shutil.rmtree(folder / "parameters")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "parameters", args=ocp.args.PyTreeSave(tree))


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"layer": {"w": np.zeros(3, np.float32)}}, r"\('layer', 'w'\) is nested; one flat dict"),
        ({"w": np.zeros(3, np.complex64)}, "tensor 'w' has type complex64, which is not"),
    ],
)
def test_a_tree_that_is_no_models_is_refused(model, tree, message):
    write_tree(model, tree)
    refused(model, message)


def test_integers_may_stand_beside_the_type(tmp_path):
    tensors = {"w": np.ones(3, ml_dtypes.bfloat16), "steps": np.arange(3)}
    write_orbax(Memory(tensors), tmp_path / "m")
    assert checkpoints.open_checkpoint(tmp_path / "m").read("steps").dtype == np.int64

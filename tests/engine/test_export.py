# SPDX-License-Identifier: Apache-2.0
"""A converted model is the same model: config, tokenizer, ids, and logits bit by bit."""

import dataclasses
import json
import logging

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.huggingface_writer import write_huggingface
from checkpoints.orbax_writer import write_orbax
from engine.export import Export
from engine.loading import open_model
from engine.models.oracle import forward_jit
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.written import same_tokenizer
from tests.engine.conftest import GOLDEN, parameters, same_parameters
from tests.engine.gguf_to_folder import write_folder
from tests.engine.tiny_gguf import write_tiny_gguf
from tests.fixtures import byte_tokenizer, write_tiny

WRITERS = {"orbax": write_orbax, "huggingface": write_huggingface}
F32 = np.dtype(np.float32)
IDS = np.array([1, 17, 250, 3, 99, 64, 200], np.int32)


def logits(model):
    return np.asarray(forward_jit(parameters(model), model.config, IDS)[0])


def convert(model, kind, folder, dtype=F32):
    """Returns the model, written as `kind` and opened again."""
    WRITERS[kind](Export(model, dtype), folder)
    written = open_model(folder)
    assert written.checkpoint.kind == kind
    return written


def same_model(one, other):
    """Asserts that two opened models agree in all but where they are stored."""
    assert other.config == one.config and other.family is one.family
    assert other.eos_ids == one.eos_ids
    if one.tokenizer is None:
        assert other.tokenizer is None
    else:
        assert same_tokenizer(one.tokenizer, other.tokenizer)


@pytest.mark.parametrize("arch", sorted(folder.name for folder in (GOLDEN / "tiny").iterdir()))
def test_there_and_back_is_the_same_model(tmp_path, arch):
    model = open_model(GOLDEN / "tiny" / arch)
    expected = parameters(model)
    here = model
    for kind in ("orbax", "huggingface"):
        here = convert(here, kind, tmp_path / kind)
        same_model(model, here)
        same_parameters(parameters(here), expected)
        assert here.checkpoint.config == model.checkpoint.config
        assert here.checkpoint.generation_config == model.checkpoint.generation_config
    original = load_file(GOLDEN / "tiny" / arch / "model.safetensors")
    final = load_file(tmp_path / "huggingface" / "model.safetensors")
    assert final.keys() == original.keys()
    for name, values in original.items():
        np.testing.assert_array_equal(final[name], values)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")


@pytest.mark.parametrize("kind", WRITERS)
def test_a_gguf_file_becomes_a_folder_of_the_same_model(tiny_gguf, tmp_path, kind):
    model = open_model(tiny_gguf)
    written = convert(model, kind, tmp_path / "m")
    same_model(model, written)
    assert written.eos_ids == (2, 299) and written.tokenizer.add_bos
    assert not written.tokenizer.known(290) and written.tokenizer.known(292)
    np.testing.assert_array_equal(logits(written), logits(model))
    again = convert(written, "huggingface", tmp_path / "again")
    same_model(model, again)


def test_a_gguf_files_tensors_are_those_of_an_independent_conversion(tiny_gguf, tmp_path):
    """By gguf-py's dequantization, and rows put in order by none of our code."""
    expected = load_file(write_folder(tiny_gguf, tmp_path) / "model.safetensors")
    export = Export(open_model(tiny_gguf), F32)
    assert export.tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(export.read(name), values)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_every_float_gets_the_type_and_integers_keep_theirs(tmp_path, dtype):
    folder = write_tiny(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["steps"] = np.arange(3)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    name = np.dtype(dtype).name
    for kind in WRITERS:
        checkpoint = convert(open_model(folder), kind, tmp_path / kind, dtype).checkpoint
        assert checkpoint.config == config | {"dtype": name, "torch_dtype": name}
        for tensor, values in tensors.items():
            wanted = values.dtype if tensor == "steps" else np.dtype(dtype)
            array = checkpoint.read(tensor)
            assert array.dtype == wanted
            np.testing.assert_array_equal(array, values.astype(wanted))


def test_a_value_beyond_the_type_is_refused_by_name(tmp_path):
    folder = write_tiny(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = -70000
    tensors["model.norm.weight"][0] = np.inf  # no fault of the conversion
    save_file(tensors, folder / "model.safetensors")
    model = open_model(folder)
    message = "tensor 'model.layers.1.mlp.up_proj.weight' holds -70000, beyond the range of float16"
    for kind, write in WRITERS.items():
        with pytest.raises(ValueError, match=message):
            write(Export(model, np.float16), tmp_path / kind)
        assert not (tmp_path / kind).exists()
        write(Export(model, ml_dtypes.bfloat16), tmp_path / kind)


def test_a_tensor_that_is_missing_is_named_before_work_starts(tmp_path):
    folder = write_tiny(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tensors are missing: model.layers.1.mlp.up_proj.weight"):
        Export(open_model(folder), F32)


def test_what_a_gguf_file_holds_beside_the_model_is_left_with_a_warning(tmp_path, caplog):
    reader = gguf.GGUFReader(write_tiny_gguf(tmp_path / "m.gguf"))
    model = open_model(tmp_path / "m.gguf")
    extra = write_gguf(
        tmp_path / "extra.gguf",
        {"more.weight": (np.zeros((2, 32), np.float32), gguf.GGMLQuantizationType.F32)}
        | {t.name: (t.data, t.tensor_type) for t in reader.tensors},
    )
    checkpoint = type(model.checkpoint)(extra)
    with caplog.at_level(logging.WARNING):
        export = Export(dataclasses.replace(model, checkpoint=checkpoint), F32)
    assert "tensors that no parameter needs: more.weight" in caplog.text
    assert len(export.tensors) == len(model.checkpoint.tensors)


def test_a_tokenizer_with_no_rules_stays_without(tmp_path):
    folder = write_tiny(tmp_path / "tiny", tokenizer=byte_tokenizer())
    model = open_model(folder)
    same_model(model, convert(model, "orbax", tmp_path / "o"))
    assert model.tokenizer.bos_id == 1 and not model.tokenizer.add_bos

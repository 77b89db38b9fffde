# SPDX-License-Identifier: Apache-2.0
"""A model folder is read as its files say, never runs code, and names what is wrong with it."""

import json
import logging
import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
from tests.fixtures import BOS, EOS, byte_tokenizer, fallback_tokenizer, write_checkpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "data/golden/tiny"
CONFIG = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}
A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.float16)
INDEX = "model.safetensors.index.json"


def write_folder(folder, shards, weight_map=None):
    """Writes config.json, the shards {name: tensors}, and an index where there is a map."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if weight_map is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def sharded(tmp_path):
    return write_folder(
        tmp_path / "m",
        {"s1.safetensors": {"a": A}, "s2.safetensors": {"b": B}},
        {"a": "s1.safetensors", "b": "s2.safetensors"},
    )


@pytest.fixture
def single(tmp_path):
    return write_folder(tmp_path / "m", {"model.safetensors": {"a": A}})


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_golden_folders_are_read(arch):
    golden = json.loads(GOLDEN.with_suffix(".json").read_text())["archs"][arch]
    checkpoint = checkpoints.open_checkpoint(GOLDEN / arch)
    assert checkpoint.kind == "huggingface" and checkpoint.config["hidden_size"] == 64
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert len(checkpoint.tensors) == golden["tensors"]
    info = checkpoint.tensors["model.embed_tokens.weight"]
    assert info == ((320, 64), "F32")
    array = checkpoint.read("model.embed_tokens.weight")
    assert array.shape == info.shape and array.dtype == np.float32
    assert checkpoint.tokenizer() is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8])
def test_a_tensor_comes_in_its_own_type(tmp_path, dtype):
    tensors = {"w": np.arange(6).astype(dtype).reshape(3, 2)}
    checkpoint = checkpoints.open_checkpoint(
        write_folder(tmp_path / "m", {"model.safetensors": tensors})
    )
    array = checkpoint.read("w")
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, tensors["w"])


def test_shards_are_read_where_the_index_says(sharded):
    checkpoint = checkpoints.open_checkpoint(sharded)
    assert checkpoint.tensors == {"a": ((2, 3), "F32"), "b": ((4,), "F16")}
    np.testing.assert_array_equal(checkpoint.read("a"), A)
    np.testing.assert_array_equal(checkpoint.read("b"), B)


def test_the_index_alone_chooses_among_copies(tmp_path, caplog):
    folder = write_folder(
        tmp_path / "m",
        {"s1.safetensors": {"a": A, "b": B + 1}, "s2.safetensors": {"b": B}},
        {"a": "s1.safetensors", "b": "s2.safetensors"},
    )
    save_file({"a": A + 1}, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        checkpoint = checkpoints.open_checkpoint(folder)
    np.testing.assert_array_equal(checkpoint.read("a"), A)
    np.testing.assert_array_equal(checkpoint.read("b"), B)
    warning = "1 tensors that the index does not list there, as b in s1.safetensors"
    assert warning in caplog.text and len(caplog.records) == 1


def refused(folder, message):
    with pytest.raises(ValueError, match=message) as caught:
        checkpoints.open_checkpoint(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_shard_is_named(sharded):
    (sharded / "s2.safetensors").unlink()
    refused(sharded, "s2.safetensors: the shard is missing")


def test_shards_without_an_index_are_no_model(sharded):
    (sharded / INDEX).unlink()
    refused(sharded, "neither model.safetensors nor model.safetensors.index.json is there")


def test_a_tensor_twice_in_the_index_is_named(sharded):
    text = '{"weight_map": {"a": "s1.safetensors", "a": "s2.safetensors"}}'
    (sharded / INDEX).write_text(text)
    refused(sharded, "index.json: 'a' is there twice")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_an_index_without_a_map_is_refused(sharded, text):
    (sharded / INDEX).write_text(text)
    refused(sharded, "weight_map is missing or empty")


def test_links_may_lead_into_a_hub_cache_and_nowhere_else(tmp_path):
    blobs = tmp_path / "hub/models--some--model/blobs"
    snapshot = tmp_path / "hub/models--some--model/snapshots/main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "c0ffee").write_text(json.dumps(CONFIG))
    (snapshot / "config.json").symlink_to("../../blobs/c0ffee")
    save_file({"a": A}, blobs / "beef")
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    np.testing.assert_array_equal(checkpoints.open_checkpoint(snapshot).read("a"), A)

    (snapshot / "model.safetensors").unlink()
    save_file({"a": A}, tmp_path / "elsewhere.safetensors")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    refused(snapshot, "'model.safetensors' leads out of the model folder")


def test_a_folder_without_weights_says_so(tmp_path):
    refused(write_folder(tmp_path / "m", {}), "neither model.safetensors nor .*index.json is there")


def test_code_of_a_checkpoint_is_ignored_with_a_warning(single, caplog):
    (single / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "x.Y"}}))
    (single / "x.py").write_text("raise SystemExit")
    with caplog.at_level(logging.WARNING):
        checkpoints.open_checkpoint(single)
    assert "auto_map is ignored" in caplog.text


def open_tokenizer(folder, tokenizer, settings=None, template=None):
    write_checkpoint(folder, CONFIG, {"a": A}, tokenizer)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return checkpoints.open_checkpoint(folder).tokenizer()


def test_a_tokenizer_is_read_with_its_bos_rule(tmp_path):
    plain = open_tokenizer(tmp_path / "a", byte_tokenizer())
    assert (plain.bos_id, plain.eos_ids, plain.add_bos) == (1, (2,), False)
    assert plain.encode("the mill") == byte_tokenizer().encode("the mill").ids
    adding = open_tokenizer(tmp_path / "b", fallback_tokenizer())
    assert adding.add_bos and adding.encode("") == [1]
    assert adding.decode(adding.encode(" été 漢")) == " été 漢"
    assert adding.special_ids == {0, 1, 2}


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("source", [byte_tokenizer, fallback_tokenizer])
def test_an_explicit_bos_flag_wins(tmp_path, source, flag):
    settings = {"bos_token": BOS, "eos_token": {"content": EOS}, "add_bos_token": flag}
    tokenizer = open_tokenizer(tmp_path / "m", source(), settings)
    assert tokenizer.add_bos is flag
    assert tokenizer.encode("the mill").count(1) == flag
    assert tokenizer.encode("") == [1] * flag


def test_end_tokens_come_from_both_settings_without_repeats(tmp_path):
    folder = tmp_path / "m"
    write_checkpoint(folder, CONFIG, {"a": A}, byte_tokenizer())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    assert checkpoints.open_checkpoint(folder).tokenizer().eos_ids == (2, 7)


def test_the_template_file_wins_over_the_settings(tmp_path):
    settings = {"chat_template": "old"}
    assert open_tokenizer(tmp_path / "a", byte_tokenizer(), settings).chat_template == "old"
    named = {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool"}]}
    assert open_tokenizer(tmp_path / "b", byte_tokenizer(), named).chat_template == "d"
    both = open_tokenizer(tmp_path / "c", byte_tokenizer(), settings, "new")
    assert both.chat_template == "new"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"bos_token": "<nope>"}, "names bos_token '<nope>', which is no token"),
        ({"bos_token": None, "add_bos_token": True}, "add_bos is true, but no BOS token is named"),
        ({"chat_template": 5}, "chat_template in tokenizer_config.json is no text"),
    ],
)
def test_wrong_tokenizer_settings_are_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        open_tokenizer(tmp_path / "m", byte_tokenizer(), settings)

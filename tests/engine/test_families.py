# SPDX-License-Identifier: Apache-2.0
"""What holds for every family: old and new keys, one tensor a parameter, and no tensor left."""

import json
import logging
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.loading import check_model, family_of, open_model, predictor_tensors
from sharding import RULES, make_mesh
from tests.engine.conftest import GOLDEN

TINY = sorted(folder.name for folder in (GOLDEN / "tiny").iterdir())
F32 = np.dtype(np.float32)


def config_of(arch):
    return json.loads((GOLDEN / "tiny" / arch / "config.json").read_text())


def read(config):
    return family_of(GOLDEN, "huggingface", config).from_hf(config)


def in_old_keys(arch, kind_key):
    """Returns a config as transformers 4 wrote it: a theta and a scaling, and no layer types."""
    config = config_of(arch)
    rope = config.pop("rope_parameters")
    if arch == "gemma3":
        local, rope = rope["sliding_attention"], rope["full_attention"]
        config |= {"rope_local_base_freq": local["rope_theta"], "sliding_window_pattern": 3}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    kind = scaling.pop("rope_type")
    if "partial_rotary_factor" in scaling:
        config["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = None if kind == "default" else scaling | {kind_key: kind}
    for key in ("layer_types", "_sliding_window_pattern"):
        config.pop(key, None)
    return config


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize("arch", TINY)
def test_old_keys_say_what_new_ones_say(arch, kind_key):
    assert read(in_old_keys(arch, kind_key)) == read(config_of(arch))


@pytest.mark.parametrize(
    "classes",
    [["LlamaForSequenceClassification"], ["LlamaModel"], [7], "LlamaForQuestionAnswering"],
)
def test_a_class_that_does_not_generate_is_refused(classes):
    config = config_of("llama") | {"architectures": classes}
    with pytest.raises(ValueError, match="architectures .* do not generate text; a class that"):
        family_of(GOLDEN, "huggingface", config)


@pytest.mark.parametrize("classes", [None, [], ["YiForCausalLM"], ["LlamaForCausalLM"]])
def test_the_model_type_decides_among_classes_that_generate(classes):
    config = config_of("llama") | {"architectures": classes}
    assert family_of(GOLDEN, "huggingface", config).name == "llama"


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("arch", TINY)
def test_every_parameter_has_its_tensors_and_none_is_left(arch, stacked, caplog):
    model = open_model(GOLDEN / "tiny" / arch)
    with caplog.at_level(logging.WARNING):
        mesh = make_mesh(jax.local_devices()[:1])
        check_model(model, mesh, RULES, F32, stacked=stacked)
    assert not caplog.records


@pytest.mark.parametrize("arch", TINY)
def test_a_missing_tensor_is_named(arch, tmp_path):
    tensors = load_file(GOLDEN / "tiny" / arch / "model.safetensors")
    last = config_of(arch)["num_hidden_layers"] - 1
    gone = [name for name in sorted(tensors) if f"layers.{last}." in name][:: max(1, last)]
    for name in gone[:3]:
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(GOLDEN / "tiny" / arch / "config.json", folder)
        save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
        model = open_model(folder)
        mesh = make_mesh(jax.local_devices()[:1])
        with pytest.raises(ValueError, match=f"tensors are missing: .*{name}"):
            check_model(model, mesh, RULES, F32, stacked=False)


def test_layers_of_multi_token_prediction_are_known_and_not_used(tmp_path, caplog, capsys):
    folder = GOLDEN / "tiny" / "deepseek_v3"
    tensors = load_file(folder / "model.safetensors")
    last = config_of("deepseek_v3")["num_hidden_layers"]
    more = {
        name.replace(f"layers.{last - 1}.", f"layers.{last}."): x
        for name, x in tensors.items()
        if f"layers.{last - 1}." in name
    }
    more[f"model.layers.{last}.eh_proj.weight"] = np.zeros((4, 8), np.float32)
    config = config_of("deepseek_v3") | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors | more, tmp_path / "model.safetensors")
    model = open_model(tmp_path)
    assert predictor_tensors(model) == more.keys()
    mesh = make_mesh(jax.local_devices()[:1])
    check_model(model, mesh, RULES, F32, stacked=False)
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    told = capsys.readouterr().err + caplog.text
    assert f"{len(more)} tensors of multi-token prediction are not used" in told

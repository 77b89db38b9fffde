# SPDX-License-Identifier: Apache-2.0
"""Tied embeddings with and without a stored head (CASES Q-01), in every format."""

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.orbax_writer import write_orbax
from engine.export import Export
from engine.loading import check_model, open_model
from sharding import RULES, make_mesh
from tests.engine.conftest import GOLDEN, parameters
from tests.engine.folder_to_gguf import F16, Q8_0, write_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
F32 = np.dtype(np.float32)
# (flag in the config, stored head) -> whether the head is the embedding; None: refused.
CASES = {
    (True, "none"): True,
    (True, "identical"): True,
    (True, "different"): False,
    (False, "none"): None,
    (False, "identical"): False,
    (False, "different"): False,
    (None, "none"): None,  # a llama without the flag has a head of its own
    (None, "different"): False,
}


def model_with(flag, stored):
    """Returns (config, tensors) of the tiny llama."""
    folder = GOLDEN / "tiny" / "llama"
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    del config["tie_word_embeddings"]
    if flag is not None:
        config["tie_word_embeddings"] = flag
    if stored == "none":
        del tensors[HEAD]
    if stored == "identical":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    return config, tensors


def write_folder(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["huggingface", "orbax"])
@pytest.mark.parametrize("flag, stored", CASES)
def test_the_stored_head_wins_and_none_stays_unset(tmp_path, caplog, kind, flag, stored):
    config, tensors = model_with(flag, stored)
    path = write_folder(tmp_path / "hf", config, tensors)
    tied = CASES[flag, stored]
    if tied is None:
        model = open_model(path)
        with pytest.raises(ValueError, match=f"tensors are missing: {HEAD}"):
            check_model(model, make_mesh(), RULES, F32, stacked=False)
        return
    if kind == "orbax":
        write_orbax(Export(open_model(path), F32), tmp_path / "orbax")
        path = tmp_path / "orbax"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        model = open_model(path)
    assert model.checkpoint.kind == kind and model.config.tied_embeddings == tied
    loaded = parameters(model)
    np.testing.assert_array_equal(loaded["embedding"], tensors[EMBEDDING])
    assert ("head" in loaded) != tied, "memory for one copy"
    if not tied:
        np.testing.assert_array_equal(loaded["head"], tensors[HEAD])


@pytest.mark.parametrize("kind", [F16, Q8_0])
@pytest.mark.parametrize("stored", ["none", "identical", "different"])
def test_a_gguf_file_says_by_its_output_matrix(tmp_path, stored, kind):
    config, tensors = model_with(None, stored)
    decoded = write_model(tmp_path / "m.gguf", config, tensors, [kind])
    model = open_model(tmp_path / "m.gguf")
    assert model.config.tied_embeddings == (stored == "none")
    loaded = parameters(model)
    np.testing.assert_array_equal(loaded["embedding"], decoded[EMBEDDING])
    assert ("head" in loaded) == (HEAD in decoded)
    if HEAD in decoded:
        np.testing.assert_array_equal(loaded["head"], decoded[HEAD])


def test_the_warning_names_the_head(tmp_path, capsys):
    path = write_folder(tmp_path / "hf", *model_with(True, "different"))
    open_model(path)
    assert f"ties the embeddings, but {HEAD} differs" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""A config that cannot be, or does not fit the weights, is one cheap error that names the key."""

import functools
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from engine.loading import check_model, open_model
from engine.models import FAMILIES
from sharding import RULES, make_mesh
from tests.cost import bounded
from tests.engine.damaged_configs import GGUF, GONE, HUGGING_FACE

TINY = pathlib.Path(__file__).parents[1] / "data/golden/tiny"


def look_at(path):
    """Opens a model and holds its config against its tensors, as the start of an engine does."""
    model = open_model(path)
    mesh = make_mesh(jax.local_devices()[:1])
    check_model(model, mesh, RULES, np.dtype(np.float32), stacked=False)


def refused(path, said):
    with bounded(), pytest.raises(ValueError) as caught:
        look_at(path)
    message = str(caught.value)
    assert said in message and str(path) in message and "\n" not in message, message
    assert len(message) < 500


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory):
    """Returns `folder(arch)`, a copy of a tiny checkpoint whose config may be overwritten."""
    copies = tmp_path_factory.mktemp("copies")

    @functools.cache
    def folder(arch):
        return shutil.copytree(TINY / arch, copies / arch)

    return folder


@pytest.mark.parametrize("case", HUGGING_FACE)
def test_a_config_that_cannot_be_is_one_cheap_error(copy_of, case):
    arch, changes, said = HUGGING_FACE[case]
    folder = copy_of(arch)
    config = json.loads((TINY / arch / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not GONE}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, said)


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.context_length": 256,
    "llama.vocab_size": 320,
}


def write_metadata(path, metadata, tensors):
    """Writes a GGUF file of the metadata, each value in the type that suits it."""
    writer = GGUFWriter(str(path), "none")
    writer.kv_data[0].clear()
    adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in metadata.items():
        adders.get(type(value), writer.add_array)(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", GGUF)
def test_gguf_metadata_that_cannot_be_is_one_cheap_error(tmp_path, case):
    changes, said = GGUF[case]
    metadata = {key: v for key, v in (METADATA | changes).items() if v is not GONE}
    tensors = {f"t{n}": np.zeros(32, np.float32) for n in range(3)}
    refused(write_metadata(tmp_path / "m.gguf", metadata, tensors), said)


@pytest.mark.parametrize(
    "factors, said",
    [
        (np.ones(7), "tensor 'rope_freqs.weight' has shape (7,); the rope needs (8,)"),
        (np.ones((8, 1)), "tensor 'rope_freqs.weight' has shape (8, 1); the rope needs (8,)"),
        (np.zeros(8), "the rope has short factors 0.0; a positive number is needed"),
        (-np.ones(8), "the rope has short factors -1.0; a positive number is needed"),
        (np.full(8, np.nan), "the rope has short factors nan; a positive number is needed"),
    ],
)
def test_factors_of_a_rope_in_a_gguf_file_are_checked(tmp_path, factors, said):
    tensors = {f"t{n}": np.zeros(32, np.float32) for n in range(3)}
    tensors |= {"rope_freqs.weight": factors.astype(np.float32)}
    refused(write_metadata(tmp_path / "m.gguf", METADATA, tensors), said)


ODD = [None, True, False, 0, -1, 1, 2.5, 10**18, -(10**18), 10**400, 1e308, math.nan, -math.inf]
ODD += ["", "x", [], [0], [[]], [None], {}, {"a": 1}, [{"full_attention": 1}]]


def odd_versions(config):
    """Yields the config with every value, nested ones too, replaced by each odd one."""
    for key, value in config.items():
        for odd in ODD:
            yield config | {key: odd}
        if isinstance(value, dict):
            for version in odd_versions(value):
                yield config | {key: version}


@pytest.mark.parametrize("arch", sorted(path.name for path in TINY.iterdir() if path.is_dir()))
def test_any_value_in_place_of_any_is_read_or_refused(arch):
    """No other exception than ValueError, in one line, whatever stands where."""
    config = json.loads((TINY / arch / "config.json").read_text())
    [family] = [f for f in FAMILIES if config["model_type"] in f.model_types]
    refused = 0
    with bounded(seconds=10):
        for version in odd_versions(config):
            try:
                family.from_hf(version)
            except ValueError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 300
    assert refused > 200

# SPDX-License-Identifier: Apache-2.0
"""A checkpoint restored on another number of devices, or in stacks, is the same model."""

import jax
import numpy as np
import pytest

from checkpoints.orbax_writer import write_orbax
from engine.export import Export
from engine.loading import load_model, open_model
from engine.models.oracle import forward_jit
from sharding import RULES, make_mesh
from tests.engine.conftest import GOLDEN, parameters, same_parameters

TINY = sorted(folder.name for folder in (GOLDEN / "tiny").iterdir())
QUICK = ("llama", "deepseek_v3", "gpt_oss")  # one of each kind of attention and feed-forward
F32 = np.dtype(np.float32)
IDS = np.array([1, 17, 250, 3, 99, 64, 200, 8], np.int32)


def on_devices(model, count):
    mesh = make_mesh(jax.local_devices()[:count], tensor=count)
    return load_model(model, mesh, RULES, F32, stacked=False)


@pytest.fixture(params=TINY)
def restored(request, tmp_path):
    """Returns a family's tiny model in an Orbax folder, and its parameters from safetensors."""
    original = open_model(GOLDEN / "tiny" / request.param)
    write_orbax(Export(original, F32), tmp_path / "orbax")
    return open_model(tmp_path / "orbax"), parameters(original)


def test_parameters_are_the_same_on_two_devices(restored):
    model, expected = restored
    loaded = on_devices(model, 2)
    same_parameters(loaded, expected)
    split = [leaf for leaf in jax.tree.leaves(loaded) if not leaf.is_fully_replicated]
    assert len(split) > 10, "the matrices are split"


@pytest.mark.parametrize("arch", ["mixtral", "deepseek_v3"])
def test_scanned_experts_are_those_of_each_layer(arch):
    model = open_model(GOLDEN / "tiny" / arch)
    mesh = make_mesh(jax.local_devices()[:1])
    stacked = load_model(model, mesh, RULES, F32, stacked=True)
    expected, _ = forward_jit(parameters(model), model.config, IDS)
    logits, _ = forward_jit(stacked, model.config, IDS)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[] if a in QUICK else pytest.mark.slow) for a in TINY]
)
def test_logits_are_the_same_on_two_devices(arch):
    model = open_model(GOLDEN / "tiny" / arch)
    expected, _ = forward_jit(parameters(model), model.config, IDS)
    logits, _ = forward_jit(on_devices(model, 2), model.config, IDS)
    np.testing.assert_allclose(logits, expected, atol=1e-4)

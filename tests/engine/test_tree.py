# SPDX-License-Identifier: Apache-2.0
"""The fused form of the parameters computes what the plain one does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.loading import abstract_parameters, load_model, open_model
from engine.models.oracle import forward_jit
from engine.models.tree import FUSED, fuse
from sharding import RULES, make_mesh
from tests.engine.conftest import GOLDEN


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without biases and with them
def test_fused_parameters_give_the_same_logits_and_their_shapes_are_foreseen(name):
    model = open_model(GOLDEN / "tiny" / name)
    mesh, dtype = make_mesh(jax.devices()[:1]), np.dtype(np.float32)
    params = load_model(model, mesh, RULES, dtype, stacked=False)
    foreseen = fuse(abstract_parameters(model.config, mesh, RULES, dtype, stacked=False))
    token_T = jnp.arange(16, dtype=jnp.int32)
    expected = np.asarray(forward_jit(params, model.config, token_T)[0])
    first = params["segments"][0][0]
    joined = np.concatenate([np.asarray(first[part]) for part in FUSED["qkv"]])
    fused = fuse(params)
    layer = fused["segments"][0][0]
    np.testing.assert_array_equal(layer["qkv"], joined)
    assert ("qkv_bias" in layer) == (name == "qwen2")
    assert not layer.keys() & {part for parts in FUSED.values() for part in parts}
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), fused)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), foreseen)
    got = np.asarray(forward_jit(fused, model.config, token_T)[0])
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert first["q"].is_deleted()

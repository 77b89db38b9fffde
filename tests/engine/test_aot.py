# SPDX-License-Identifier: Apache-2.0
"""That a step's collectives are those planned, and what is said where there is no compiler."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine import aot, hlo
from engine.capacity import Parallel
from engine.traffic import Collective, step_traffic
from sharding import parse_mesh
from tests.engine.test_capacity import shape_of


def test_what_differs_from_the_plan_is_named():
    planned = [Collective("all-reduce", 1, 8), Collective("all-gather", 2, 64)]
    assert aot.differing([planned[0], Collective("all-reduce", 2, 64)], planned) == []
    assert aot.differing([planned[0], Collective("all-to-all", 2, 64)], planned) == [
        "2 x all-to-all of 64 bytes not planned",
        "2 x all-reduce of 64 bytes planned, not there",
    ]


def test_slices_are_named():
    for topology in ("v5e", "v9:2x2", "v6e:8", "v6e:2x4;", "cpu:1x1"):
        with pytest.raises(ValueError, match="is no slice of TPUs; write such as v6e:2x4"):
            aot.slice_devices(topology)


def test_no_compiler_says_what_to_do(monkeypatch):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere/libtpu.so")
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="libtpu.so is missing.*make test-slow"):
        aot.compiler_settings()


@pytest.mark.parametrize("mesh", ["tensor=8", "data=2,tensor=4", "sequence=2,tensor=2"])
def test_a_step_tells_other_devices_what_is_planned(mesh, monkeypatch):
    """As compiled for CPU; what needs the compiler for TPUs is in test_tpu_compile.py."""
    shape, parallel = shape_of("llama", jnp.float32), Parallel(**parse_mesh(mesh))
    monkeypatch.setattr(aot, "slice_devices", lambda topology: jax.devices())
    target = aot.Slice(shape.config, "", parallel, 4, 64, 9, 16, 64, np.float32, "xla")
    factory, ladder = aot.make_factory(target)
    for body in aot.step_bodies(ladder):
        compiled = factory.body(body).lower().compile()
        found = hlo.collectives(hlo.parsed(compiled.as_text()))
        assert not aot.differing(found, aot.planned(shape, parallel, body)), body


def test_norms_over_all_heads_are_sums_of_their_own():
    shape = shape_of("llama", jnp.float32).split(2)
    layers = shape.config.num_layers
    plain = [one.collective for one in step_traffic(shape, Parallel(tensor=2), 3)]
    assert [one.times for one in plain] == [1, layers, layers]
    config = dataclasses.replace(shape.config, qk_norm="whole")
    whole = step_traffic(dataclasses.replace(shape, config=config), Parallel(tensor=2), 3)
    assert [one.collective for one in whole] == [
        *plain,
        *[Collective("all-reduce", layers, 3 * 4)] * 2,
    ]

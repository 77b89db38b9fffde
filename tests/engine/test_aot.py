# SPDX-License-Identifier: Apache-2.0
"""What is read from a compiled program, and that a step's collectives are those planned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine import aot
from engine.capacity import Parallel
from engine.traffic import Collective, step_traffic
from sharding import parse_mesh
from tests.engine.test_capacity import shape_of

HLO = """HloModule jit_program, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%inner_condition (p: (s32[], s32[])) -> pred[] {
  ROOT %lt.1 = pred[] compare(%gte.1, %gte.2), direction=LT
}

%inner (p: (s32[], s32[])) -> (s32[], s32[]) {
  %rows = bf16[8,2,16]{2,1,0:T(2,128)(2,1)} ragged-all-to-all(%a, %b, %c), channel_id=1
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(5), metadata={op_name="x"}
  ROOT %lt.2 = pred[] compare(%gte.3, %constant.3), direction=LT
}

%layer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %psum = f32[4]{0} all-reduce(%x), to_apply=%add
  %w = (s32[], s32[]) while(%tuple.1), condition=%inner_condition, body=%inner
}

%fused (p: f32[999]) -> f32[2] {
  %twice = f32[999]{0} add(%p, %p)
}

%past (p: f32[4]) -> f32[8] {
  %g = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), dimensions={0}
  ROOT %d = f32[8]{0} all-gather-done(%g)
}

ENTRY %main.1 (a: f32[4]) -> f32[4] {
  %both = (f32[4]{0}, bf16[2,3]{1,0}) all-reduce(%a, %b), to_apply=%add
  %large = f32[999]{0} parameter(1)
  %near = f32[999]{0:T(128)S(1)} copy(%large)
  %f = f32[2]{0} fusion(%large), kind=kLoop, calls=%fused
  %c = f32[8]{0} conditional(%i, %a, %a), branch_computations={%past, %add}
  ROOT %while.2 = (s32[], f32[4]) while(%tuple.2), condition=%condition, body=%layer
}
"""


def test_collectives_are_counted_as_often_as_their_loop_turns():
    assert aot.collectives(aot.parsed(HLO)) == [
        Collective("all-reduce", 1, 4 * 4 + 6 * 2),
        Collective("all-gather", 1, 32),
        Collective("all-reduce", 5, 16),
        Collective("ragged-all-to-all", 5, 8 * 2 * 16 * 2),
    ]


def test_the_largest_temporary_is_no_parameter_and_nothing_fused_or_in_place():
    hlo = aot.parsed(HLO)
    assert aot.largest_temporary(hlo, 10**6) == 8 * 2 * 16 * 2
    assert aot.largest_temporary(hlo, 100) == 32
    assert aot.largest_temporary(hlo, 3) == 0


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
        found = aot.collectives(aot.parsed(compiled.as_text()))
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

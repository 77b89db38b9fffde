# SPDX-License-Identifier: Apache-2.0
"""Attention over a run equals its reference, by every implementation; kernels are interpreted."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backends import Backend
from pallas_kernels.flash_attention import flash_attention, gpu, tpu
from pallas_kernels.flash_attention.cases import CASES, SCALE, Case, make_inputs
from pallas_kernels.flash_attention.reference import flash_attention_reference
from pallas_kernels.paged_attention.rows import NO_WINDOW, Call
from pallas_kernels.softmax import LOWEST
from tests.pallas_kernels.kinds import KINDS
from tests.pallas_kernels.quick import quick_jit

# Small, so that there are several of each.
BLOCKS = {
    "tpu": {"queries": 24, "cells": 32},
    "gpu": {"queries": 8, "cells": 32, "warps": 4, "stages": 2},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for kind, module in (("tpu", tpu), ("gpu", gpu)):
        monkeypatch.setattr(module, "block_sizes", lambda *_, kind=kind: BLOCKS[kind])


def settings_of(case: Case):
    sinks = np.linspace(-1, 2, case.heads[0], dtype=np.float32) if case.sinks else None
    more = {"softcap": case.softcap, "values": case.values, "first": case.first}
    return {"scale": SCALE, "sinks_N": sinks, **more}


def compare(case: Case, kind: str, windows, dtype=np.float32, tolerance=2e-5):
    inputs, more = make_inputs(case, dtype), settings_of(case)
    operation = quick_jit(functools.partial(flash_attention, backend=KINDS[kind], **more))
    for window in windows:
        out, lse = operation(*inputs, jnp.int32(window))
        assert out.dtype == dtype
        assert lse.dtype == jnp.float32
        want, sums = flash_attention_reference(*inputs, window, **more)
        out = np.asarray(out).astype(np.float64)
        np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)
        sums = np.where(np.isneginf(sums), np.float32(LOWEST), sums)
        np.testing.assert_allclose(lse, sums, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, kind):
    compare(CASES[name], kind, CASES[name].windows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["prompt", "3 to 1, capped", "latent"])
def test_bfloat16_differs_by_its_rounding_only(name, kind):
    compare(CASES[name], kind, (NO_WINDOW,), jnp.bfloat16, 2e-2 * 3)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    queries=st.integers(1, 60),
    cells=st.integers(1, 90),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    window=st.sampled_from([1, 9, NO_WINDOW]),
    kind=st.sampled_from(["xla", "tpu", "gpu"]),
)
def test_random_shapes_equal_the_reference(queries, cells, heads, window, kind):
    compare(Case(queries=queries, cells=cells, heads=heads), kind, [window])


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_on_all_logits_moves_the_sum_only(kind):
    case = CASES["prompt of no whole block"]
    q, cells, *places = make_inputs(case)
    key, rest = cells[..., :1], cells[..., 1:]
    constant = jnp.concatenate([jnp.ones_like(key), rest], axis=-1)
    operation = quick_jit(functools.partial(flash_attention, scale=1.0, backend=KINDS[kind]))
    (one, a), (two, b) = (
        operation(q.at[..., 0].set(c), constant, *places, NO_WINDOW) for c in (0.0, 3.0)
    )
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(b, a + 3.0, rtol=1e-4, atol=1e-5)


def test_memory_is_reckoned_and_too_much_is_declined():
    q, cells, *_ = make_inputs(CASES["prompt"])
    huge = Call(SCALE, (16, 32), blocks={"queries": 8192, "cells": 8192, "warps": 4, "stages": 2})
    assert "vector memory" in tpu.declines(q, cells, huge, Backend("tpu", "v6e"))
    assert "bytes to share" in gpu.declines(q, cells, huge, Backend("gpu", "h100"))
    small = Call(SCALE, (16, 32), blocks=BLOCKS["gpu"])
    assert gpu.declines(q, cells, small, Backend("gpu", "h100")) is None


def test_shapes_that_do_not_go_together_are_refused():
    q, cells, place_T, place_S = make_inputs(CASES["prompt"])
    with pytest.raises(ValueError, match="2 query heads over 3 KV heads"):
        flash_attention(q, jnp.zeros((40, 3, 32)), place_T, place_S, 1, scale=1)
    with pytest.raises(ValueError, match="queries of 16 numbers over cells of 8"):
        flash_attention(q, cells[..., :8], place_T, place_S, 1, scale=1)
    with pytest.raises(ValueError, match="for 40 queries and 40 keys"):
        flash_attention(q, cells, place_T[:3], place_S, 1, scale=1)

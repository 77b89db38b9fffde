# SPDX-License-Identifier: Apache-2.0
"""Cells are written where they belong and nowhere else, by every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import Backend
from pallas_kernels.kv_write import gpu, kv_write, tpu
from pallas_kernels.kv_write.cases import CASES, Case, make_inputs
from pallas_kernels.kv_write.reference import kv_write_reference
from pallas_kernels.pages import Pages
from tests.pallas_kernels.kinds import KINDS
from tests.pallas_kernels.quick import quick_jit


def assert_written(case: Case, backend: Backend) -> None:
    inputs = make_inputs(case)
    operation = quick_jit(
        functools.partial(kv_write, run=case.run, split=case.split, backend=backend),
        donate_argnums=0,
    )
    want = Pages(*kv_write_reference(*inputs, split=case.split))
    got = operation(*inputs)
    assert got.cells.dtype == want.cells.dtype
    for name, found, right in zip(Pages._fields, got, want, strict=True):
        assert (found is None) == (right is None)
        if found is not None:  # page 0 is nobody's
            found, right = (np.asarray(x)[1:].astype(np.float32) for x in (found, right))
            np.testing.assert_allclose(found, right, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, kind):
    assert_written(CASES[name], KINDS[kind])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), min_size=1, max_size=4),
    run=st.sampled_from([1, 2, 20]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    kind=st.sampled_from(["tpu", "gpu"]),
)
def test_random_runs_equal_the_reference(lengths, run, dtype, kind):
    starts, counts = zip(*((start, min(count, run)) for start, count in lengths), strict=True)
    assert_written(Case(starts=starts, counts=counts, run=run, dtype=dtype), KINDS[kind])


RACES = ("decode of many rows", "chunk over three pages", "decode, int8", "pieces that meet, int8")


@pytest.mark.parametrize("name", RACES)
def test_copies_neither_race_nor_leave_their_arrays(name):
    backend = Backend("tpu", interpret=pltpu.InterpretParams(detect_races=True))
    assert_written(CASES[name], backend)
    assert not interpreter.races.races_found


def test_what_is_declined():
    def pages(*shape, dtype=jnp.bfloat16, scale=None):
        return jax.eval_shape(lambda: Pages(jnp.zeros(shape, dtype), scale))

    v6e, h100 = Backend("tpu", "v6e"), Backend("gpu", "h100")
    assert "page_size=24 of bfloat16" in tpu.declines(pages(3, 2, 24, 128), 64, 1, v6e)
    assert "cells of 96" in tpu.declines(pages(3, 2, 32, 96), 64, 1, v6e)
    scaled = pages(3, 2, 32, 128, dtype=jnp.int8, scale=jnp.zeros((3, 2, 2, 32)))
    assert "page_size=32 with scales" in tpu.declines(scaled, 64, 1, v6e)
    assert "vector memory" in tpu.declines(pages(3, 2048, 32, 1024), 64, 1, v6e)
    assert tpu.declines(pages(3, 8, 64, 256), 64, 1, v6e) is None
    assert "registers" in gpu.declines(pages(3, 1, 32, 32768), 64, 1, h100)
    assert "can be numbered" in gpu.declines(pages(70000, 8, 64, 64, dtype=jnp.int8), 64, 1, h100)
    assert gpu.declines(pages(70000, 8, 64, 256), 64, 1, h100) is None


def test_shapes_that_do_not_go_together_are_refused():
    pages, cell_TKC, page_T, offset_T = make_inputs(CASES["chunk, int8"])
    with pytest.raises(ValueError, match="run=5 must divide the number of tokens, 36"):
        kv_write(pages, cell_TKC, page_T, offset_T, run=5, split=16)
    with pytest.raises(ValueError, match="split=None must be from 1 to 24"):
        kv_write(pages, cell_TKC, page_T, offset_T)
    with pytest.raises(ValueError, match="cells of 1 heads of 24 for pages of 2 of 32"):
        kv_write(pages, cell_TKC[:, :1], page_T, offset_T, split=16)
    with pytest.raises(ValueError, match="36 tokens, places for 35"):
        kv_write(pages, cell_TKC, page_T[1:], offset_T, split=16)

# SPDX-License-Identifier: Apache-2.0
"""Latent attention equals its reference and its expanded form; kernels are interpreted."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.latent_attention import latent_attention, latent_mass
from pallas_kernels.latent_attention.cases import CASES
from pallas_kernels.latent_attention.reference import latent_attention_reference
from pallas_kernels.paged_attention import NO_WINDOW, gpu, tpu
from pallas_kernels.paged_attention.cases import SCALE, Case, extras, make_inputs
from tests.pallas_kernels.kinds import KINDS
from tests.pallas_kernels.quick import quick_jit

BLOCKS = {
    "tpu": {"pages": 2, "queries": 64},
    "gpu": {"queries": 8, "heads": 1, "cells": 32, "splits": 2, "warps": 4, "stages": 2},
}


def with_blocks(monkeypatch, case: Case) -> None:
    for kind, module in (("tpu", tpu), ("gpu", gpu)):
        sizes = BLOCKS[kind] | {name: n for name, n in case.blocks if name in BLOCKS[kind]}
        monkeypatch.setattr(module, "block_sizes", lambda *_, sizes=sizes: sizes)


def assert_equal(case: Case, kind: str, window: int, dtype=np.float32, tolerance=2e-5) -> None:
    inputs = make_inputs(case, window, dtype)
    more = {"rank": case.latent, "scale": SCALE, "softcap": case.softcap}
    sinks = extras(case)["sinks_N"]
    want = latent_attention_reference(*inputs, window, sinks_N=sinks, **more)
    operation = functools.partial(latent_attention, sinks_N=sinks, backend=KINDS[kind], **more)
    out, lse = quick_jit(operation)(*inputs, jnp.int32(window))
    real_BT = np.arange(case.width)[None] < np.array(case.counts)[:, None]
    out, lse = np.asarray(out).astype(np.float64)[real_BT], np.asarray(lse)[real_BT]
    np.testing.assert_allclose(out, want.out[real_BT], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want.lse[real_BT], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, kind, monkeypatch):
    with_blocks(monkeypatch, CASES[name])
    for window in CASES[name].windows:
        assert_equal(CASES[name], kind, window)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_differs_by_its_rounding_only(kind, monkeypatch):
    with_blocks(monkeypatch, CASES["chunk"])
    assert_equal(CASES["chunk"], kind, NO_WINDOW, jnp.bfloat16, 2e-2 * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mass_of_cells_equals_the_reference(kind, monkeypatch):
    case = CASES["chunk, int8"]
    with_blocks(monkeypatch, case)
    inputs = make_inputs(case)
    more = {"rank": case.latent, "scale": SCALE}
    want = latent_attention_reference(*inputs, NO_WINDOW, **more)
    lse = np.where(np.isneginf(want.lse), 0, want.lse).astype(np.float32)
    got = latent_mass(*inputs, NO_WINDOW, lse, backend=KINDS[kind], **more)
    np.testing.assert_allclose(got, want.mass, atol=2e-5)


def test_absorbed_is_what_expanded_heads_give():
    """Keys and values of every head, made of the latent, and attention over those."""
    case = CASES["decode"]
    rng = np.random.default_rng(1)
    q, pages, rows = make_inputs(case)
    R, (N, _), plain = case.latent, case.heads, 12
    k_up, v_up = rng.standard_normal((2, N, plain, R)).astype(np.float32) / 4
    q_plain = rng.standard_normal((len(q), 1, N, plain)).astype(np.float32)
    absorbed = np.concatenate([np.einsum("btnp,npr->btnr", q_plain, k_up), q[..., R:]], axis=-1)
    got, _ = latent_attention(jnp.asarray(absorbed), pages, rows, NO_WINDOW, rank=R, scale=SCALE)
    got = np.einsum("btnr,nvr->btnv", got, v_up)
    cells = np.asarray(pages.cells)[:, 0]
    for b, start in enumerate(case.starts):
        index = np.arange(start + 1)
        kv = cells[np.asarray(rows.table_BJ)[b, index // 16], index % 16].astype(np.float64)
        for n in range(N):
            key = np.concatenate([kv[:, :R] @ k_up[n].T, kv[:, R:]], axis=1)
            query = np.concatenate([q_plain[b, 0, n], np.asarray(q)[b, 0, n, R:]])
            weights = np.exp(key @ query * SCALE)
            want = weights / weights.sum() @ (kv[:, :R] @ v_up[n].T)
            np.testing.assert_allclose(got[b, 0, n], want, rtol=2e-5, atol=2e-5)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 4)), min_size=1, max_size=4),
    rank=st.sampled_from([8, 24]),
    rope=st.sampled_from([4, 16]),
    kind=st.sampled_from(["tpu", "gpu"]),
)
def test_random_shapes_equal_the_reference(lengths, rank, rope, kind):
    starts, counts = zip(*lengths, strict=True)
    case = Case(
        starts=starts, counts=counts, width=4, heads=(3, 1), head_width=rank + rope, latent=rank
    )
    assert_equal(case, kind, NO_WINDOW)


def test_what_is_no_latent_is_refused():
    q, pages, rows = make_inputs(CASES["decode"])
    with pytest.raises(ValueError, match="rank=25 must be from 1 to the queries' width, 24"):
        latent_attention(q, pages, rows, 1, rank=25, scale=1)
    two = pages._replace(cells=jnp.concatenate([pages.cells] * 2, axis=1))
    with pytest.raises(ValueError, match="pages of 2 heads"):
        latent_attention(q, two, rows, 1, rank=16, scale=1)

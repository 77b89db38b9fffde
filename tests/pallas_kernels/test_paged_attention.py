# SPDX-License-Identifier: Apache-2.0
"""Paged attention equals its reference, whatever lies in the cells that nobody sees.

Every case is done by every implementation; kernels are interpreted. Letters: J is pages of a row, X
is query heads a KV head times tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import TWO_CORES, Backend
from pallas_kernels.paged_attention import (
    NO_WINDOW,
    Rows,
    attention_mass,
    gpu,
    paged_attention,
    tpu,
)
from pallas_kernels.paged_attention.cases import CASES, SCALE, Case, extras, make_inputs
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.rows import Call
from pallas_kernels.pages import Pages
from pallas_kernels.softmax import LOWEST
from tests.pallas_kernels.kinds import KINDS
from tests.pallas_kernels.quick import quick_jit

KERNELS = {"tpu": tpu, "gpu": gpu}
# Small, so that there are several of each; a case may name others.
BLOCKS = {
    "xla": {"cells": 32},
    "tpu": {"pages": 2, "queries": 64},
    "gpu": {"queries": 8, "heads": 1, "cells": 32, "splits": 2, "warps": 4, "stages": 2},
}


def call_of(case: Case, kind: str) -> Call:
    """Returns what is static of a case for an implementation."""
    sizes = BLOCKS[kind] | {name: n for name, n in case.blocks if name in BLOCKS[kind]}
    values = case.values or (case.head_width, 2 * case.head_width)
    return Call(SCALE, values, case.softcap, blocks=sizes)


def with_blocks(monkeypatch, sizes):
    """Has kernels take these sizes for whatever shapes."""
    for kind, module in KERNELS.items():
        monkeypatch.setattr(module, "block_sizes", lambda *_, kind=kind: sizes[kind])


@functools.cache
def jitted(name: str, kind: str, dtype: str = "float32", mass: bool = False):
    """Returns the operation on a case, by an implementation; one program for all windows."""
    case, backend = CASES[name], KINDS[kind]
    more = {"scale": SCALE, "softcap": case.softcap, "values": case.values, "backend": backend}
    if mass:
        return quick_jit(functools.partial(attention_mass, **more))
    sinks = extras(case)["sinks_N"]
    return quick_jit(functools.partial(paged_attention, sinks_N=sinks, **more))


def reference(case: Case, inputs, window):
    return paged_attention_reference(
        *inputs, window, scale=SCALE, softcap=case.softcap, **extras(case)
    )


def run(name: str, kind: str, window: int, inputs=None):
    """Returns (out, lse), NumPy, of a case."""
    inputs = inputs or make_inputs(CASES[name], window)
    return tuple(map(np.asarray, jitted(name, kind)(*inputs, jnp.int32(window))))


def real(case: Case) -> np.ndarray:
    """Returns bool [B, T]: which tokens there are."""
    return np.arange(case.width)[None] < np.array(case.counts)[:, None]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, request):
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    case = CASES.get(name, CASES["decode"])
    with_blocks(monkeypatch, {kind: call_of(case, kind).blocks for kind in KINDS})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_reference_and_ignores_what_nobody_sees(name, kind):
    case = CASES[name]
    for window in case.windows:
        inputs = make_inputs(case, window)
        out, lse = run(name, kind, window, inputs)
        want, seen_BT = reference(case, inputs, window), real(case)
        np.testing.assert_allclose(out[seen_BT], want.out[seen_BT], rtol=2e-5, atol=2e-5)
        sums = np.where(np.isneginf(want.lse), np.float32(LOWEST), want.lse)
        np.testing.assert_allclose(lse[seen_BT], sums[seen_BT], rtol=2e-5, atol=2e-5)
        assert np.isfinite(out).all(), "padding gives finite values"
        assert not out[np.array(case.counts) == 0].any(), "an idle row gives zeros"


MASSES = ("decode", "decode, int8 and bias", "decode, latent", "chunk in tiles", "tree", "chunk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*MASSES, "decode, float8", "chunk beside idle rows"])
def test_the_mass_of_cells_equals_the_reference(name, kind):
    case = CASES[name]
    for window in case.windows:
        inputs = make_inputs(case, window)
        want = reference(case, inputs, window)
        lse = np.where(np.isneginf(want.lse), LOWEST, want.lse).astype(np.float32)
        lse[~real(case)] = np.nan  # nobody's
        got = jitted(name, kind, mass=True)(*inputs, jnp.int32(window), lse)
        np.testing.assert_allclose(got, want.mass, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chunk", "decode, 4 to 1", "decode, latent", "tree"])
def test_bfloat16_differs_by_its_rounding_only(name, kind):
    case = CASES[name]
    inputs = make_inputs(case, dtype=jnp.bfloat16)
    out, _ = run(name, kind, NO_WINDOW, inputs)
    assert out.dtype == jnp.bfloat16
    want = reference(case, inputs, NO_WINDOW).out
    assert np.abs(out.astype(np.float64) - want)[real(case)].max() < 2e-2 * np.abs(want).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["decode", "decode, latent", "chunk, latent"])
def test_what_fills_cells_up_is_not_read(name, kind):
    q, pages, rows = make_inputs(CASES[name])
    spare = ((0, 0), (0, 0), (0, 0), (0, 5))
    filled = pages._replace(cells=jnp.pad(pages.cells, spare, constant_values=1e30))
    wide, plain = (run(name, kind, NO_WINDOW, (q, each, rows)) for each in (filled, pages))
    np.testing.assert_allclose(wide[0], plain[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [2, 17, NO_WINDOW])
def test_a_tree_that_is_a_chain_equals_a_chunk(kind, window):
    case = CASES["chunk"]
    q, pages, rows = make_inputs(case)
    depth_BT = np.tile(np.arange(5, dtype=np.int32), (4, 1))
    chain = rows._replace(depth_BT=depth_BT, ancestors_BT=(2 << depth_BT) - 1)
    chunk, tree = (run("chunk", kind, window, (q, pages, each))[0] for each in (rows, chain))
    for b, count in enumerate(case.counts):
        np.testing.assert_allclose(tree[b, :count], chunk[b, :count], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_company_and_place(kind):
    q, pages, rows = make_inputs(CASES["decode"])
    together, _ = run("decode", kind, NO_WINDOW, (q, pages, rows))
    order = np.array([2, 0, 3, 1])
    moved = Rows(*(field[order] for field in rows[:3]))
    moved = moved._replace(count_B=jnp.array([1, 1, 0, 0], jnp.int32))
    other, _ = run("decode", kind, NO_WINDOW, (q[order], pages, moved))
    np.testing.assert_array_equal(other[:2], together[order[:2]])


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_keys_merge_by_their_sums(kind):
    """Two lists of pages, each with some of a row's keys, as exact and encoded pages are."""
    case = CASES["decode, a full table"]
    q, pages, rows = make_inputs(case)
    whole = reference(case, (q, pages, rows), NO_WINDOW)
    # The first four pages by themselves, and the rest as a row that begins there.
    early = Rows(rows.table_BJ[:, :4], rows.start_B * 0 + 63, rows.count_B)
    late = Rows(rows.table_BJ[:, 4:], rows.start_B - 64, rows.count_B)
    operation = quick_jit(functools.partial(paged_attention, scale=SCALE, backend=KINDS[kind]))
    (one, a), (two, b) = (operation(q, pages, each, NO_WINDOW) for each in (early, late))
    lse = np.logaddexp(a, b)
    out = np.exp(a - lse)[..., None] * one + np.exp(b - lse)[..., None] * two
    np.testing.assert_allclose(out, whole.out, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, whole.lse, rtol=2e-5, atol=2e-5)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 4)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    head_width=st.sampled_from([8, 24, 40]),
    window=st.sampled_from([1, 5, 30, NO_WINDOW]),
    kind=st.sampled_from(["xla", "tpu", "gpu"]),
)
def test_random_shapes_equal_the_reference(lengths, heads, head_width, window, kind):
    starts, counts = zip(*lengths, strict=True)
    case = Case(starts=starts, counts=counts, width=4, heads=heads, head_width=head_width)
    inputs = make_inputs(case, window)
    operation = functools.partial(paged_attention, scale=SCALE, backend=KINDS[kind])
    out, _ = quick_jit(operation)(*inputs, jnp.int32(window))
    want = reference(case, inputs, window)
    np.testing.assert_allclose(out[real(case)], want.out[real(case)], rtol=2e-5, atol=2e-5)


RACES = [
    ("decode, int8 and bias", "v5e"),
    ("decode beside idle rows", "v5e"),
    *((name, "v5p") for name in ("decode, latent", "decode of nine rows", "chunk in tiles")),
    *(pytest.param(name, "v5e", marks=pytest.mark.slow) for name in ("decode", "chunk in tiles")),
]


@pytest.mark.parametrize("name, chip", RACES)
def test_copies_neither_race_nor_leave_their_arrays(name, chip):
    """The simulated memories of a TPU: uninitialised they hold NaN, and copies end when waited. A
    v5p has two cores."""
    case, call = CASES[name], call_of(CASES[name], "tpu")
    inputs = make_inputs(case, 37)
    want, seen_BT = reference(case, inputs, 37), real(case)
    cores = 2 if chip in TWO_CORES else 1
    simulated = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores)
    backend = Backend("tpu", chip, interpret=simulated)
    out, _ = quick_jit(lambda *args: tpu.attend(*args, 37, 0, call, backend))(*inputs)
    np.testing.assert_allclose(out[seen_BT], want.out[seen_BT], rtol=2e-5, atol=2e-5)
    assert not races_found(), "two copies, or a copy and a read, meet in one place"


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    return bool(interpreter.races is not None and interpreter.races.races_found)


@pytest.mark.parametrize("window", [1, 20, 64, NO_WINDOW])
def test_each_page_of_a_row_is_fetched_once_and_no_other(monkeypatch, window):
    case = Case(starts=(0, 15, 16, 100, 0, 63), counts=(1, 1, 1, 1, 0, 1), heads=(4, 2))
    inputs = make_inputs(case, window)
    visits = count_visits(monkeypatch, inputs, window)
    wanted = []
    for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        if count:
            first = max(0, start + 1 - window) // 16
            wanted += [int(inputs[2].table_BJ[b, j]) for j in range(first, start // 16 + 1)]
    assert sorted(visits) == sorted(wanted)


def test_the_declared_cost_is_that_of_full_tables(monkeypatch):
    case = CASES["decode, a full table"]
    q, pages, rows = make_inputs(case)
    visits = count_visits(monkeypatch, (q, pages, rows), NO_WINDOW)
    call = call_of(case, "tpu")
    traced = jax.make_jaxpr(lambda *args: tpu.attend(*args, NO_WINDOW, 0, call, KINDS["tpu"]))(
        q, pages, rows
    )
    [kernel] = [eqn for eqn in traced.eqns if eqn.primitive.name == "pallas_call"]
    size = lambda array: array.size * array.dtype.itemsize  # noqa: E731
    one = size(pages.cells) // pages.cells.shape[0]
    around = size(q) // case.head_width * 32 + sum(size(out.aval) for out in kernel.outvars)
    assert kernel.params["cost_estimate"].bytes_accessed == len(visits) * one + around


def count_visits(monkeypatch, inputs, window) -> list[int]:
    """Returns the pages that the TPU's kernel fetches, a number for each copy."""
    visits: list[int] = []
    make = tpu.page_copies

    class Told:
        """A copy that says when it starts."""

        def __init__(self, copy, page):
            self._copy, self._page = copy, page

        def start(self):
            jax.debug.callback(lambda page: visits.append(int(page)), self._page)
            self._copy.start()

        def wait(self):
            self._copy.wait()

    def copies(at, page, buffer, j):
        return [Told(copy, page) for copy in make(at, page, buffer, j)]

    monkeypatch.setattr(tpu, "page_copies", copies)
    call = Call(SCALE, (16, 32), blocks=BLOCKS["tpu"])
    out = quick_jit(lambda *args: tpu.attend(*args, window, 0, call, KINDS["tpu"]))(*inputs)
    jax.block_until_ready(out)
    jax.effects_barrier()
    return visits


def test_memory_is_reckoned_and_too_much_is_declined():
    q, pages, rows = make_inputs(CASES["decode"])
    wide = pages._replace(cells=jnp.zeros((4, 2, 64, 128), jnp.bfloat16))
    huge = Call(SCALE, (16, 32), blocks={"pages": 4096, "queries": 1})
    small = Call(SCALE, (16, 32), blocks={"pages": 2, "queries": 1})
    for chip in ("v5e", "v5p", "v6e"):
        backend = Backend("tpu", chip)
        assert tpu.declines(q, wide, rows, small, backend) is None
        assert "vector memory" in tpu.declines(q, wide, rows, huge, backend)
    assert "whole registers" in tpu.declines(q, pages, rows, small, Backend("tpu", "v6e"))
    sizes = {"queries": 1, "heads": 1, "cells": 65536, "splits": 1, "warps": 4, "stages": 4}
    call, h100 = Call(SCALE, (16, 32), blocks=sizes), Backend("gpu", "h100")
    tile = gpu.tile_of(q, wide, rows, call, h100)
    assert tile.stages == 1 and tile.cells < 65536 and tile.shared_bytes() <= h100.shared_bytes
    sizes = sizes | {"queries": 2**14}
    many = jnp.zeros((4, 2**14, 2, 16), jnp.bfloat16)
    call = Call(SCALE, (16, 32), blocks=sizes)
    assert "bytes to share" in gpu.declines(many, wide, rows, call, h100)


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_blocks_shrink_until_they_fit(chip):
    """32 KV heads with chunks of 512, and a tree of 32 over latents of 128 heads."""
    backend, array = Backend("tpu", chip), jax.ShapeDtypeStruct
    row = array((1,), jnp.int32)
    table = array((1, 64), jnp.int32)
    tree = array((1, 32), jnp.int32)
    plain, branched = Rows(table, row, row), Rows(table, row, row, tree, tree)
    for q, pages, rows, values, latent in (
        ((1, 512, 32, 128), (65, 32, 64, 256), plain, (128, 256), False),
        ((1, 32, 128, 576), (65, 1, 64, 640), branched, (0, 512), True),
    ):
        call = Call(SCALE, values, operation="latent_attention" if latent else "paged_attention")
        arguments = array(q, jnp.bfloat16), Pages(array(pages, jnp.bfloat16)), rows, call, backend
        most = backend.vmem_bytes * 3 // 4
        fits = tpu.tile_of(*arguments).vmem_bytes() <= most
        assert fits == (tpu.declines(*arguments) is None)
        assert fits or (latent and chip == "v5p"), "a tree is one tile"


def test_what_a_kernel_declines_xla_does_with_one_warning(monkeypatch, caplog):
    case = CASES["decode"]
    inputs = make_inputs(case)
    monkeypatch.setattr(tpu, "declines", lambda *_: "it is a test of this")
    caplog.set_level("WARNING", "headrace")
    for _ in range(2):
        out, _ = paged_attention(*inputs, 3, scale=SCALE, backend=KINDS["tpu"])
    want, _ = paged_attention(*inputs, 3, scale=SCALE)
    np.testing.assert_array_equal(out, want)
    assert [record.message for record in caplog.records] == [
        "paged_attention is left to XLA: it is a test of this"
    ]


def test_shapes_that_do_not_go_together_are_refused():
    q, pages, rows = make_inputs(CASES["decode"])
    with pytest.raises(ValueError, match="3 query heads over 2 KV heads"):
        paged_attention(jnp.zeros((4, 1, 3, 16)), pages, rows, 1, scale=1)
    with pytest.raises(ValueError, match="queries of 40 numbers over cells of 32"):
        paged_attention(jnp.zeros((4, 1, 2, 40)), pages, rows, 1, scale=1)
    with pytest.raises(ValueError, match="table_BJ is of 4 rows, the queries are of 5"):
        paged_attention(jnp.zeros((5, 1, 2, 16)), pages, rows, 1, scale=1)
    tree = rows._replace(depth_BT=jnp.zeros((4, 33)), ancestors_BT=jnp.zeros((4, 33)))
    with pytest.raises(ValueError, match="a tree of 33 tokens"):
        paged_attention(jnp.zeros((4, 33, 2, 16)), pages, tree, 1, scale=1)


@pytest.mark.parametrize("name", ["chunk, 3 to 1, capped", "tree"])
def test_names_state_the_shapes(name, shape_suffixes):
    case = CASES[name]
    # A fresh function is traced anew, so that there is something to check.
    out, lse = jax.eval_shape(
        lambda *inputs: paged_attention(*inputs, 5, scale=1), *make_inputs(case)
    )
    assert out.shape == (4, case.width, case.heads[0], case.head_width)
    assert lse.shape == out.shape[:3]

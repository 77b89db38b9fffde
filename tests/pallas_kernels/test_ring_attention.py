# SPDX-License-Identifier: Apache-2.0
"""Ring attention on eight devices against its specification, and how even its work is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.backends import XLA
from pallas_kernels.flash_attention.xla import blocks_seen
from pallas_kernels.paged_attention import Rows
from pallas_kernels.pages import Pages
from pallas_kernels.ring_attention import Past, ring_attention
from pallas_kernels.ring_attention.reference import ring_attention_reference
from sharding import Axis, make_mesh
from sharding.layouts import LAYOUTS, check_layout, order_of, places_of
from tests.pallas_kernels.kinds import KINDS
from tests.pallas_kernels.quick import quick_jit

KERNELS = [KINDS["tpu"], KINDS["gpu"]]
PAGE = 4
CASES = {
    "causal": {},
    "windowed": {"window": 23},
    "a window within a page": {"window": 2},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0},
    "not from the first": {"first": 37},
    "all": {"window": 50, "sinks": True, "softcap": 5.0, "first": 9},
}


def run_ring(
    layout,
    ways,
    q_TNH,
    cell_TKC,
    *,
    window,
    sinks_N=None,
    softcap=None,
    first=0,
    values=None,
    past_SKC=None,
    backend=XLA,
):
    """Returns the output of all tokens, in order, of a ring of `ways` devices.

    `past_SKC`: the cells before the first, a whole number of pages of all devices and of the run's
    `first` tokens, which are in pages too.
    """
    T = len(q_TNH)
    pages, rows = (None, None) if past_SKC is None else dealt_out(past_SKC, ways, T, first)
    check_layout(layout, T, ways, PAGE)
    mesh = make_mesh(sequence=ways)
    places = partial(places_of, layout, T, ways, PAGE)
    order_T = order_of(layout, T, ways, PAGE)
    laid_out_T = np.argsort(order_T)

    def local(q_TNH, cell_TKC, pool):
        past = None if pool is None else Past(Pages(pool), rows, order_T)
        return ring_attention(
            q_TNH,
            cell_TKC,
            places,
            Axis(("sequence",), ways) if ways > 1 else Axis(),
            window,
            scale=0.3,
            softcap=softcap,
            sinks_N=sinks_N,
            values=values,
            first=first,
            past=past,
            backend=backend,
        )

    spec = PartitionSpec("sequence")
    ring = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jit = jax.jit if backend == XLA else quick_jit
    out_TNV = jit(ring)(q_TNH[laid_out_T], cell_TKC[laid_out_T], pages)
    return np.asarray(out_TNV)[np.asarray(order_T)]


def dealt_out(past_SKC, ways, T, first):
    """Returns (pages of all devices, one's after the other's, the row of a device's own table)."""
    (S, K, C), own = past_SKC.shape, PAGE * ways
    start = S - first
    assert start % own == 0 and first < own
    J = -(-S // own)
    pages = np.full((ways, J + 1, K, PAGE, C), np.nan, np.float32)
    for cell in range(S):
        page = cell // PAGE
        pages[page % ways, page // ways + 1, :, cell % PAGE] = past_SKC[cell]
    table_1J = jnp.arange(1, J + 1, dtype=jnp.int32)[None]
    start_1, count_1, end_1 = (jnp.array([n], jnp.int32) for n in (start, T, S))
    return pages.reshape(-1, K, PAGE, C), Rows(table_1J, start_1, count_1, end_B=end_1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case, ways", [*((case, 8) for case in CASES), *(("all", ways) for ways in (1, 2, 4))]
)
def test_any_layout_equals_full_attention(case, ways, layout):
    options = {"window": 1 << 30, "softcap": None, "first": 0, "sinks": False} | CASES[case]
    rng = np.random.default_rng(0)
    T, N, K, H = 128, 6, 2, 8
    q_TNH = rng.normal(size=(T, N, H)).astype(np.float32)
    cell_TKC = rng.normal(size=(T, K, 2 * H)).astype(np.float32)
    sinks_N = rng.normal(size=N).astype(np.float32) if options.pop("sinks") else None
    out = run_ring(layout, ways, q_TNH, cell_TKC, sinks_N=sinks_N, **options)
    window, first = options["window"], options["first"]
    expected = ring_attention_reference(
        q_TNH,
        cell_TKC[..., :H],
        cell_TKC[..., H:],
        window,
        scale=0.3,
        softcap=options["softcap"],
        sinks_N=sinks_N,
        first=first,
    )
    np.testing.assert_allclose(out[first:], expected[first:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", [XLA, *KERNELS], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_stored_before_is_seen_too(layout, backend):
    """By kernels and by XLA; the first cells of the run stand in the pages with the past."""
    rng = np.random.default_rng(3)
    T, N, K, H, ways, first = 64, 6, 2, 8, 4, 6
    past = 3 * PAGE * ways
    q_TNH = rng.normal(size=(T, N, H)).astype(np.float32)
    all_SKC = rng.normal(size=(past + T, K, 2 * H)).astype(np.float32)
    sinks_N = rng.normal(size=N).astype(np.float32)
    for window in (23, 1 << 30):
        out = run_ring(
            layout,
            ways,
            q_TNH,
            all_SKC[past:],
            window=window,
            sinks_N=sinks_N,
            softcap=3.0,
            first=first,
            past_SKC=all_SKC[: past + first],
            backend=backend,
        )
        before = np.zeros((past, N, H), np.float32)
        expected = ring_attention_reference(
            np.concatenate([before, q_TNH]),
            all_SKC[..., :H],
            all_SKC[..., H:],
            window,
            scale=0.3,
            softcap=3.0,
            sinks_N=sinks_N,
        )[past:]
        np.testing.assert_allclose(out[first:], expected[first:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("backend", [XLA, *KERNELS], ids=str)
def test_a_latent_is_key_and_value(backend):
    rng = np.random.default_rng(1)
    q_TNH = rng.normal(size=(64, 3, 10)).astype(np.float32)
    cell_TKC = rng.normal(size=(64, 1, 10)).astype(np.float32)
    window = 1 << 30
    out = run_ring(
        "striped", 4, q_TNH, cell_TKC, window=window, values=(0, 7), first=9, backend=backend
    )
    expected = ring_attention_reference(
        q_TNH, cell_TKC, cell_TKC[..., :7], window, scale=0.3, first=9
    )
    np.testing.assert_allclose(out[9:], expected[9:], atol=2e-5, rtol=0)


def test_what_comes_behind_a_run_that_ends_early_is_not_seen():
    """Padding behind the last token has later places, which nobody before them sees."""
    rng = np.random.default_rng(2)
    q_TNH = rng.normal(size=(128, 2, 8)).astype(np.float32)
    cell_TKC = rng.normal(size=(128, 2, 16)).astype(np.float32)
    for length in (1, 50, 127):
        changed = cell_TKC.copy()
        changed[length:] = 1e6
        outs = [
            run_ring("striped", 8, q_TNH, c, window=1 << 30)[:length] for c in (cell_TKC, changed)
        ]
        np.testing.assert_array_equal(*outs)


def work(layout, ways, tokens, page):
    """Returns int [ways, hops]: blocks of keys that each device's queries are met with."""
    places = [
        places_of(layout, tokens, ways, page, jnp.int32(d)).reshape(-1, page) for d in range(ways)
    ]
    seen = np.zeros((ways, ways), int)
    for device in range(ways):
        for hop in range(ways):
            start_R, stop_R = blocks_seen(places[device], places[(device - hop) % ways], 1 << 30, 0)
            seen[device, hop] = np.sum(stop_R - start_R)
    return seen


def test_work_is_even_but_in_the_contiguous_layout():
    """Blocks of a device over the mean, and rounds' slowest over it (ALGORITHMS: 1.87 at 8)."""
    ways, page, tokens = 8, 16, 8192
    figures = {}
    for layout in LAYOUTS:
        seen = work(layout, ways, tokens, page)
        devices = seen.sum(axis=1)
        figures[layout] = devices.max() / devices.mean(), seen.max(axis=0).sum() / devices.mean()
    print(figures)
    assert all(figure < 1.05 for figure in (*figures["striped"], *figures["zig-zag"]))
    assert figures["contiguous"][0] > 1.8 and figures["contiguous"][1] > 1.8


def test_layouts_share_out_all_tokens():
    for layout in LAYOUTS:
        order_T = np.asarray(order_of(layout, 64, 4, 4))
        assert sorted(order_T) == list(range(64))
        for device in range(4):
            places = np.asarray(places_of(layout, 64, 4, 4, jnp.int32(device)))
            assert (np.diff(places) > 0).all() and (order_T[places] // 16 == device).all()
    with pytest.raises(ValueError, match="'snake' is not known; use one of striped, contiguous"):
        check_layout("snake", 64, 4, 4)
    with pytest.raises(ValueError, match="64 tokens cannot be laid out zig-zag over 8 devices"):
        check_layout("zig-zag", 64, 8, 8)

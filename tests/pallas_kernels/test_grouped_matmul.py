# SPDX-License-Identifier: Apache-2.0
"""The grouped product equals its reference, whatever is in what nobody asked for.

Letters: V visits, C rows of a tile, R rows that have an expert.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels.backends import Backend, say_left
from pallas_kernels.grouped_matmul import OfLayers, QuantizedExperts, gpu, grouped_matmul, tpu, xla
from pallas_kernels.grouped_matmul.cases import CASES, SHAPES, Case, make_inputs
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.visits import most_visits, visits_of
from pallas_kernels.grouped_matmul.weights import matrices, stacked
from sharding import make_mesh
from tests.pallas_kernels.kinds import KINDS
from tests.pallas_kernels.quick import quick_jit

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@functools.cache
def small_tiles(kind):
    """Returns a program of the operation whose kernel has tiles so small that cases have many."""

    def tpu_rule(tile, room):
        step = tile.group or 8
        return {"rows": min(8, tile.S), "width": 16, "depth": min(3 * step, tile.D), "step": step}

    def gpu_rule(tile, room):
        depth = min(8, tile.group & -tile.group) if tile.group else 8
        return {"rows": 4, "width": 16, "depth": depth, "stages": 1, "warps": 1}

    def run(x_SD, weight, sizes_E):
        with pytest.MonkeyPatch.context() as patch:  # while it is traced
            patch.setattr(tpu, "rule", tpu_rule)
            if KINDS["gpu"].interpret:  # a GPU's own products have 16 of each axis at least
                patch.setattr(gpu, "rule", gpu_rule)
            return grouped_matmul(x_SD, weight, sizes_E, backend=KINDS[kind])

    # Nearly all of the time is the compiler's.
    return quick_jit(run)


@functools.cache
def usual_tiles(kind):
    """Returns a program of the operation as it comes."""
    return jax.jit(functools.partial(grouped_matmul, backend=KINDS[kind]))


def assert_equals_reference(program, case, seed=0):
    x_SD, weight, sizes_E = make_inputs(case, poisoned=True, seed=seed)
    expected_RF = grouped_matmul_reference(x_SD, weight, sizes_E)
    y_SF = program(x_SD, weight, sizes_E)
    assert y_SF.shape == (case.rows, case.outputs) and y_SF.dtype == jnp.float32
    most = TOLERANCE[case.dtype] * np.abs(expected_RF).max(initial=0)
    np.testing.assert_allclose(np.asarray(y_SF)[: len(expected_RF)], expected_RF, atol=most, rtol=0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_meet_their_experts_alone(kind, name):
    """With NaN in rows of no expert, in experts without rows and in other layers."""
    assert_equals_reference(small_tiles(kind), CASES[name])


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
@pytest.mark.parametrize("name", ["nothing divides", "int8, bfloat16, groups, many layers"])
def test_tiles_of_the_rule_say_the_same(kind, name):
    assert_equals_reference(usual_tiles(kind), CASES[name])


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    inputs=st.integers(1, 30),
    outputs=st.integers(1, 40),
    kind=st.sampled_from(["tpu", "gpu"]),
    codes=st.sampled_from([None, "int8", "float8_e4m3fn"]),
)
def test_any_shapes(sizes, inputs, outputs, kind, codes):
    case = Case(sizes=tuple(sizes), padding=1, inputs=inputs, outputs=outputs, codes=codes)
    assert_equals_reference(small_tiles(kind), case)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("rows", [13, 90])
@pytest.mark.parametrize("codes", [None, "int8"])
@pytest.mark.parametrize("multiply", [xla.matmul_of_tiles, xla.ragged_dot])
def test_xla_has_the_experts_of_one_layer_on_every_platform(multiply, codes, rows, layer):
    """A few rows and many; NaN is not asked of XLA's own ragged dot, which may multiply by zero."""
    sizes = (3, 0, 2, 1, rows - 9)
    case = Case(sizes=sizes, padding=3, inputs=16, outputs=12, codes=codes, layers=3, layer=layer)
    x_SD, weight, sizes_E = make_inputs(case)
    expected_RF = grouped_matmul_reference(x_SD, weight, sizes_E)
    y_SF = jax.jit(multiply)(x_SD, stacked(weight), sizes_E)
    np.testing.assert_allclose(np.asarray(y_SF)[: len(expected_RF)], expected_RF, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_stays_alone(kind):
    case = CASES["nothing divides"]
    x_SD, weight, sizes_E = make_inputs(case)
    expected_RF = grouped_matmul_reference(x_SD, weight, sizes_E)
    x_SD[2], x_SD[12] = np.nan, np.inf
    y_SF = np.array(small_tiles(kind)(x_SD, weight, sizes_E))
    assert not np.isfinite(y_SF[[2, 12]]).any()
    others = np.delete(np.arange(len(expected_RF)), [2, 12])
    np.testing.assert_allclose(y_SF[others], expected_RF[others], atol=1e-4)


def test_a_gpu_program_stores_its_own_rows_only():
    """Others run at the same time. What nobody stores is NaN in the interpreter."""
    case = CASES["all rows to the last"]  # no whole tiles of them
    y_SF = np.asarray(small_tiles("gpu")(*make_inputs(case)))
    own = sum(case.sizes)
    assert np.isfinite(y_SF[:own]).all() and np.isnan(y_SF[own:]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_times_nothing(kind):
    for rows, experts, inputs, outputs in [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (2, 0, 4, 5)]:
        x_SD, weight = jnp.ones((rows, inputs)), jnp.ones((experts, inputs, outputs))
        sizes_E = jnp.zeros(experts, jnp.int32)
        y_SF = grouped_matmul(x_SD, weight, sizes_E, backend=KINDS[kind])
        np.testing.assert_array_equal(y_SF, np.zeros((rows, outputs), np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_inside_shard_map_each_device_has_its_own_sizes(kind):
    """As the engine has it: experts split over a mesh, how many rows each has is data."""
    case = Case(sizes=(3, 0, 7, 1), inputs=9, outputs=17)
    parts = [make_inputs(case, seed=seed) for seed in range(2)]
    x_SD, weight_EDF, sizes_E = (np.concatenate([part[i] for part in parts]) for i in range(3))
    sizes_E[4:] = 0, 5, 2, 4
    spec = PartitionSpec("expert")
    program = jax.shard_map(
        functools.partial(grouped_matmul, backend=KINDS[kind]),
        mesh=make_mesh(expert=2),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    y_SF = jax.jit(program)(x_SD, weight_EDF, sizes_E)
    expected_SF = grouped_matmul_reference(x_SD, weight_EDF, sizes_E)
    np.testing.assert_allclose(y_SF, expected_SF, atol=1e-4)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("tile", [1, 4, 7])
def test_visits_have_every_row_once_and_no_expert_without_rows(tile, aligned, shape_suffixes):
    rows, experts = 60, 9
    program = jax.jit(functools.partial(visits_of, rows=rows, tile=tile, aligned=aligned))
    for seed in range(30):
        rng = np.random.default_rng(seed)
        sizes_E = rng.integers(0, 12, experts) * (rng.random(experts) < 0.6)
        sizes_E = np.minimum(sizes_E, np.maximum(rows - np.cumsum(sizes_E), 0)).astype(np.int32)
        visits = jax.tree.map(np.asarray, program(sizes_E))
        check_visits(visits, sizes_E, rows, tile, aligned)


def check_visits(visits, sizes_E, rows, tile, aligned):
    assert len(visits.expert_V) == most_visits(rows, len(sizes_E), tile) >= visits.total
    found = []
    for expert, start, begin, end in zip(*visits[:4], strict=True):
        assert 0 <= expert < len(sizes_E) and start <= begin <= end <= min(start + tile, rows)
        assert not aligned or start % tile == 0
        found += [(row, expert) for row in range(begin, end)]
    assert found == list(enumerate(np.repeat(np.arange(len(sizes_E)), sizes_E)))
    is_real = [turn < visits.total for turn in range(len(visits.expert_V))]
    assert (visits.begin_V < visits.end_V).tolist() == is_real
    if aligned:  # a tile that is visited again is visited next
        assert (np.diff(visits.start_V[: visits.total]) >= 0).all()
    else:  # as few as there can be
        assert visits.total == (-(-sizes_E // tile)).sum()


def test_sizes_beyond_the_rows_make_no_visit_beyond_them():
    visits = visits_of(jnp.array([3, 9, 4], jnp.int32), 8, 4, aligned=True)
    assert visits.total <= most_visits(8, 3, 4) and visits.end_V.max() <= 8


def test_the_suffixes_tell_the_shapes(shape_suffixes):
    for kind in KINDS:
        case = Case(sizes=(3, 1, 2, 0, 5), inputs=24, outputs=19, codes="int8", group=8)
        x_SD, weight, sizes_E = make_inputs(case)
        jax.eval_shape(
            functools.partial(grouped_matmul, backend=KINDS[kind]), x_SD, weight, sizes_E
        )


def test_matrices_are_counted_in_every_form():
    weight = jnp.zeros((5, 4, 3))
    codes = QuantizedExperts(jnp.zeros((5, 4, 3), jnp.int8), jnp.zeros((5, 1, 3)))
    layers = jax.tree.map(lambda array: array[None], codes)
    forms = weight, codes, OfLayers(weight[None], jnp.int32(0)), OfLayers(layers, jnp.int32(0))
    assert [matrices(form) for form in forms] == [5] * 4


REFUSED = {
    "x has 4 numbers a row, the matrices have 5 inputs": dict(inputs=5),
    r"sizes_E is int32 \[3\]; give int32 \[2\]": dict(sizes=3),
    "x is bfloat16, the matrices are float32; give both in one dtype": dict(dtype=jnp.bfloat16),
    r"give x \[S, D\], weight \[E, D, F\] and sizes \[E\]": dict(lead=(2, 2)),
    "codes are int16; give one of int8, float8_e4m3fn": dict(codes=jnp.int16, scales=(2, 1, 6)),
    r"scales are float32 \(2, 6\); give float32 \[E, G, F\]": dict(scales=(2, 6)),
    r"scales \(2, 1, 7\) for codes \(2, 4, 6\)": dict(scales=(2, 1, 7)),
    "3 scales for 4 inputs: give a divisor of 4": dict(scales=(2, 3, 6)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_go_together_is_refused(text):
    asked = REFUSED[text]
    x_SD = jnp.zeros((3, 4), asked.get("dtype", jnp.float32))
    shape = (*asked.get("lead", (2,)), asked.get("inputs", 4), 6)
    weight = jnp.zeros(shape)
    if "scales" in asked:
        codes = jnp.zeros(shape, asked.get("codes", jnp.int8))
        weight = QuantizedExperts(codes, jnp.zeros(asked["scales"]))
    sizes_E = jnp.zeros(asked.get("sizes", 2), jnp.int32)
    with pytest.raises(ValueError, match=text):
        grouped_matmul(x_SD, weight, sizes_E)


def described(case):
    """Returns a case's rows and weight, shapes only."""
    one = dataclasses.replace(
        case, sizes=(1,) * len(case.sizes), inputs=case.groups or 1, outputs=1
    )
    x_SD, weight, _ = make_inputs(dataclasses.replace(one, group=1 if case.codes else None))
    stack = stacked(weight)
    L, E, D, F = case.layers, len(case.sizes), case.inputs, case.outputs
    codes = jax.ShapeDtypeStruct((L, E, D, F), stack.codes_LEDF.dtype)
    scales = jax.ShapeDtypeStruct((L, E, case.groups, F), jnp.float32) if case.codes else None
    rows = jax.ShapeDtypeStruct((case.rows, D), x_SD.dtype)
    return rows, stack._replace(codes_LEDF=codes, scales_LEGF=scales)


WIDE = Case(sizes=(64, 64), inputs=4096, outputs=512, dtype="bfloat16", codes="int8")
V5P, H100 = Backend("tpu", "v5p"), Backend("gpu", "h100")
DECLINED = {
    "groups of 64 inputs; a multiple of 128 is needed": (V5P, dict(group=64)),
    "bytes of visits; 524288 of scalar memory are to be had": (V5P, dict(sizes=(1,) * 40_000)),
    "bytes of vector memory; 50331648 are to be had": (V5P, dict(inputs=2**20, group=2**17)),
    "groups of 8 inputs; a multiple of 16 is needed": (H100, dict(group=8)),
    "codes of float8_e4m3fn; h100 and h200 have them": (
        Backend("gpu", "a100"),
        dict(codes="float8_e4m3fn"),
    ),
    "an array of 3221225472 elements of a byte; 2\\*\\*31 can be numbered": (
        H100,
        dict(layers=768, layer=0),
    ),
}


@pytest.mark.parametrize("text", DECLINED)
def test_what_a_kernel_cannot_do_is_left_to_xla_with_the_reason(text):
    backend, changes = DECLINED[text]
    kernel = {"tpu": tpu, "gpu": gpu}[backend.kind]
    assert kernel.declines(*described(WIDE), backend) is None
    with pytest.raises(AssertionError, match=text):
        reason = kernel.declines(*described(dataclasses.replace(WIDE, **changes)), backend)
        assert reason is None, reason


def test_what_is_left_to_xla_is_done_all_the_same(caplog):
    say_left.cache_clear()
    case = Case(sizes=(3, 2), inputs=8, outputs=5, codes="int8", group=2)
    x_SD, weight, sizes_E = jax.tree.map(jnp.asarray, make_inputs(case))
    y_SF = grouped_matmul(x_SD, weight, sizes_E, backend=V5P)  # on a CPU: its kernel would fail
    assert "grouped_matmul is left to XLA: groups of 2 inputs" in caplog.text
    np.testing.assert_allclose(y_SF, grouped_matmul_reference(x_SD, weight, sizes_E), atol=1e-4)


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "h100"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_rule_has_tiles_for_the_shapes_of_real_models(name, chip):
    case = SHAPES[name]
    kind = "gpu" if chip == "h100" else "tpu"
    backend, kernel = Backend(kind, chip), {"tpu": tpu, "gpu": gpu}[kind]
    rows, stack = described(case)
    assert kernel.declines(rows, stack, backend) is None
    tile = kernel.tile_of(rows, stack, backend)
    if kind == "gpu":
        assert all(size & (size - 1) == 0 for size in (tile.rows, tile.width, tile.depth))
        assert tile.shared_bytes() <= backend.shared_bytes
    else:
        assert tile.width % 128 == 0 and tile.depth == case.inputs, "each matrix is read once"
        assert tile.widths >= 2, "v5p has two cores"
        assert tile.vmem_bytes() <= backend.vmem_bytes * 3 // 4

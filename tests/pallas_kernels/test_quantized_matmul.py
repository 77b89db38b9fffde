# SPDX-License-Identifier: Apache-2.0
"""The quantized product: every implementation gives what the specification does."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backends
from pallas_kernels.backends import Backend
from pallas_kernels.quantized_matmul import (
    QuantizedWeight,
    gpu,
    pack_int4,
    quantized_matmul,
    tpu,
    unpack_int4,
)
from pallas_kernels.quantized_matmul.cases import CASES, SHAPES, Case, make_inputs
from pallas_kernels.quantized_matmul.reference import numbers, quantized_matmul_reference
from tests.pallas_kernels.kinds import KINDS
from tests.pallas_kernels.quick import quick_jit

KERNELS = {name: KINDS[name] for name in ("tpu", "gpu")}
MODULES = {"tpu": tpu, "gpu": gpu}
# Interpreted kernels are long programs: compiling them is most of these tests' time.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@functools.cache
def program(backend, activations):
    """Returns the compiled operation, of any shapes; one for all tests."""
    operation = functools.partial(quantized_matmul, backend=backend, activations=activations)
    return quick_jit(operation)


def check(case, backend, *, seed=0):
    """Holds an implementation to the specification."""
    x_TD, weight = make_inputs(case, seed=seed)
    y_TF = program(backend, case.activations)(x_TD, weight)
    assert y_TF.dtype == jnp.float32
    close(y_TF, quantized_matmul_reference(x_TD, weight, activations=case.activations), case)


def close(y_TF, wanted_TF, case):
    assert y_TF.shape == wanted_TF.shape
    scale = np.abs(wanted_TF).max(initial=1e-30)
    np.testing.assert_allclose(y_TF, wanted_TF, rtol=0, atol=TOLERANCE[case.dtype] * scale)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", KINDS)
def test_an_implementation_gives_what_the_specification_does(name, backend, caplog):
    backends.say_left.cache_clear()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        check(CASES[name], KINDS[backend])
    assert ("is left to XLA" in caplog.text) == ("decline" in name and backend == "tpu")


# Tiles of every axis, and ends of all of them within one.
SMALL_TILES = {
    "tpu": {"rows": 32, "width": 128, "depth": 128},
    "gpu": {"rows": 16, "width": 16, "depth": 16, "stages": 1, "warps": 4},
}
TILED = {
    "int8": Case(rows=75, inputs=300, outputs=150),
    "int8 by 32, zeros": Case(rows=75, inputs=288, outputs=150, group=32, zeros=True),
    "int8 rows": Case(rows=75, inputs=300, outputs=150, activations="int8", zeros=True),
    "int4": Case(rows=75, inputs=556, outputs=150, codes="int4"),
    "int4 by 128": Case(rows=75, inputs=640, outputs=150, codes="int4", group=128, zeros=True),
    "int8 rows, int4 by 64": Case(
        rows=75, inputs=576, outputs=150, codes="int4", group=64, activations="int8"
    ),
    "float8": Case(rows=75, inputs=300, outputs=150, codes="float8", dtype="bfloat16"),
}


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_of_every_axis_give_what_one_does(name, kernel, monkeypatch):
    monkeypatch.setattr(MODULES[kernel], "block_sizes", lambda *args: SMALL_TILES[kernel])
    case, (x_TD, weight) = TILED[name], make_inputs(TILED[name])
    y_TF = program.__wrapped__(KERNELS[kernel], case.activations)(x_TD, weight)
    close(y_TF, quantized_matmul_reference(x_TD, weight, activations=case.activations), case)


@st.composite
def any_case(draw):
    codes = draw(st.sampled_from(["int8", "int4", "float8"]))
    group = draw(st.sampled_from([None, 32, 64, 128]))
    inputs = (group or 2) * draw(st.integers(1, 9))
    return Case(
        rows=draw(st.integers(1, 40)),
        inputs=inputs,
        outputs=draw(st.integers(1, 150)),
        codes=codes,
        group=group,
        zeros=codes != "float8" and draw(st.booleans()),
        activations="plain" if codes == "float8" else draw(st.sampled_from(["plain", "int8"])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(case=any_case(), seed=st.integers(0, 99))
def test_any_shapes_give_what_the_specification_does(case, seed):
    for backend in KINDS.values():
        check(case, backend, seed=seed)


POISONED = {
    "int8": Case(rows=6, inputs=150, outputs=37),
    "int8 by 32, zeros": Case(rows=6, inputs=160, outputs=37, group=32, zeros=True),
    "int8 by 32, many rows, zeros": Case(rows=70, inputs=160, outputs=37, group=32, zeros=True),
    "int8 rows, zeros": Case(rows=6, inputs=150, outputs=37, zeros=True, activations="int8"),
    "float8": Case(rows=6, inputs=150, outputs=37, codes="float8"),
}


@pytest.mark.parametrize("name", POISONED)
@pytest.mark.parametrize("backend", KINDS)
def test_a_row_and_an_output_that_are_no_numbers_reach_no_other(name, backend):
    """Of both, all other results are as without them to the last bit."""
    case, (x_TD, weight) = POISONED[name], make_inputs(POISONED[name])
    multiply = program(KINDS[backend], case.activations)
    clean_TF = np.asarray(multiply(x_TD, weight))
    x_TD[2] = np.nan
    weight.scales[5] = np.nan
    if weight.zeros is not None:
        weight.zeros[5] = np.nan
    if case.codes == "float8":
        weight.codes[5] = np.nan
    y_TF = np.asarray(multiply(x_TD, weight))
    others = np.delete(np.arange(case.rows), 2)[:, None], np.delete(np.arange(case.outputs), 5)
    np.testing.assert_array_equal(y_TF[others], clean_TF[others])
    assert np.isnan(y_TF[2]).all() and np.isnan(y_TF[:, 5]).all()


@pytest.mark.parametrize("backend", KINDS)
def test_rows_of_zeros_give_zeros_as_int8(backend):
    x_TD, weight = make_inputs(CASES["int8 rows, zeros"])
    x_TD[1] = 0
    y_TF = program(KINDS[backend], "int8")(x_TD, weight)
    assert not y_TF[1].any() and np.isfinite(y_TF).all()


@pytest.mark.parametrize("inputs", [0, 2, 96, 254, 256, 258, 576, 1024])
def test_what_is_packed_is_unpacked(inputs):
    rng = np.random.default_rng(inputs)
    codes_FD = rng.integers(0, 16, (3, inputs), dtype=np.uint8)
    bytes_FX = pack_int4(codes_FD)
    assert bytes_FX.shape == (3, inputs // 2) and bytes_FX.dtype == np.uint8
    np.testing.assert_array_equal(unpack_int4(bytes_FX), codes_FD)


def test_jax_packs_as_numpy_does():
    codes_FD = np.random.default_rng(0).integers(0, 16, (3, 576), dtype=np.uint8)
    bytes_FX = jax.jit(pack_int4)(codes_FD)
    np.testing.assert_array_equal(bytes_FX, pack_int4(codes_FD))
    np.testing.assert_array_equal(jax.jit(unpack_int4)(bytes_FX), codes_FD)


def test_halves_of_bytes_are_as_documented():
    """Of 256 inputs the first 128 are in low halves; what is left is halved likewise."""
    codes_FD = np.zeros((1, 260), np.uint8)
    codes_FD[0, [0, 127, 128, 255, 257, 259]] = 1, 2, 3, 4, 5, 6
    bytes_FX = pack_int4(codes_FD)
    assert [bytes_FX[0, x] for x in (0, 127, 128, 129)] == [1 + 16 * 3, 2 + 16 * 4, 0, 5 + 16 * 6]
    weight = QuantizedWeight(bytes_FX, np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(numbers(weight), codes_FD.astype(np.float64) - 8)


def test_matrices_may_be_cut_at_multiples_of_256_inputs():
    codes_FD = np.random.default_rng(0).integers(0, 16, (3, 576), dtype=np.uint8)
    parts = [pack_int4(codes_FD[:, :256]), pack_int4(codes_FD[:, 256:])]
    np.testing.assert_array_equal(pack_int4(codes_FD), np.concatenate(parts, axis=1))


X, WEIGHT = make_inputs(Case(rows=2, inputs=12, outputs=5, group=4, zeros=True))
REFUSED = {
    "activations='int4'; give one of plain, int8": (X, WEIGHT, {"activations": "int4"}),
    r"x \(12,\), codes \(5, 12\)": (X[0], WEIGHT, {}),
    "x is int8; give float32": (X.astype(np.int8), WEIGHT, {}),
    "codes are int16; give one of int8": (
        X,
        WEIGHT._replace(codes=WEIGHT.codes.astype(np.int16)),
        {},
    ),
    "which int8 rows cannot meet": (
        X,
        WEIGHT._replace(codes=WEIGHT.codes.astype(jnp.float8_e4m3fn)),
        {"activations": "int8"},
    ),
    "x has 11 numbers a row, the matrix has 12 inputs": (X[:, :11], WEIGHT, {}),
    "the matrix has 24 inputs": (X, WEIGHT._replace(codes=WEIGHT.codes.view(np.uint8)), {}),
    "scales are float64": (X, WEIGHT._replace(scales=WEIGHT.scales.astype(np.float64)), {}),
    r"scales are float32 \(4, 3\)": (X, WEIGHT._replace(scales=WEIGHT.scales[:4]), {}),
    "5 scales for 12 inputs": (X, WEIGHT._replace(scales=np.ones((5, 5), np.float32)), {}),
    r"zeros are float32 \(5, 1\)": (X, WEIGHT._replace(zeros=WEIGHT.zeros[:, :1]), {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused(message):
    x_TD, weight, more = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        quantized_matmul(x_TD, weight, **more)


def test_an_odd_number_of_inputs_is_not_packed():
    with pytest.raises(ValueError, match="7 inputs cannot be packed"):
        pack_int4(np.zeros((2, 7), np.uint8))


def abstract(case):
    """Returns a case's arguments as shapes."""
    small = dataclasses.replace(case, rows=0, outputs=1)
    x_TD, weight = make_inputs(small)
    x_TD = jax.ShapeDtypeStruct((case.rows, case.inputs), x_TD.dtype)
    with_outputs = lambda a: jax.ShapeDtypeStruct((case.outputs, a.shape[1]), a.dtype)  # noqa: E731
    return x_TD, jax.tree.map(with_outputs, weight)


@pytest.mark.parametrize("name", SHAPES)
def test_chips_have_room_for_real_shapes(name):
    """Neither kernel declines any, or asks for more memory than the formula allows."""
    case, args = SHAPES[name], abstract(SHAPES[name])
    for chip in backends.VMEM_BYTES:
        assert tpu.declines(*args, case.activations, Backend("tpu", chip)) is None
    assert gpu.declines(*args, case.activations, Backend("gpu", "h100")) is None


def test_kernels_say_what_they_decline():
    x_TD, weight = abstract(Case(rows=4, inputs=60, outputs=8, group=12))
    assert "groups of 12 inputs" in tpu.declines(x_TD, weight, "plain", Backend("tpu", "v5e"))
    assert "in groups of 12" in gpu.declines(x_TD, weight, "plain", Backend("gpu", "h100"))
    half = jax.ShapeDtypeStruct(x_TD.shape, jnp.float16)
    assert "rows of float16" in tpu.declines(half, weight, "plain", Backend("tpu", "v5e"))
    x_TD, weight = abstract(Case(rows=4, inputs=64, outputs=8, codes="float8"))
    assert "h100 and h200 have them" in gpu.declines(x_TD, weight, "plain", Backend("gpu", "a100"))
    x_TD, weight = abstract(Case(rows=4, inputs=1 << 20, outputs=128, group=32))
    assert "bytes of vector memory" in tpu.declines(x_TD, weight, "plain", Backend("tpu", "v5p"))

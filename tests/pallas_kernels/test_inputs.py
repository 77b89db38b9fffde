# SPDX-License-Identifier: Apache-2.0
"""Arguments of real shapes, and the work of a call against figures counted by hand."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import XLA, Backend
from pallas_kernels.inputs import Work, scales, scattered
from scripts.check_kernels import OPERATIONS

CASES = {name: importlib.import_module(f"pallas_kernels.{name}.cases") for name in OPERATIONS}
ALL = [(operation, shape) for operation, cases in CASES.items() for shape in cases.SHAPES]
TPU = Backend("tpu", "v5e")


def abstract(tree):
    return jax.tree.map(lambda array: (array.shape, array.dtype), tree)


@pytest.mark.parametrize("backend", [TPU, Backend("gpu", "h100")])
@pytest.mark.parametrize("operation, name", ALL)
def test_arguments_are_what_the_call_takes(operation, name, backend):
    cases = CASES[operation]
    shape = cases.SHAPES[name]
    rng = np.random.default_rng(0)
    made = jax.eval_shape(lambda: cases.concrete(shape, backend, rng))
    assert abstract(made) == abstract(cases.abstract_call(shape, backend)[1])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_small_shape_is_done_and_is_finite(operation):
    cases = CASES[operation]
    shape = cases.small(next(iter(cases.SHAPES.values())))
    call, _ = cases.abstract_call(shape, XLA)
    arguments = jax.jit(lambda: cases.concrete(shape, XLA, np.random.default_rng(0)))()
    result = jax.tree.leaves(jax.jit(call)(*arguments))[0].astype(jnp.float32)
    assert bool(jnp.isfinite(result).all()) and float(jnp.std(result)) > 1e-3


def test_scattered_numbers_are_spread_evenly_and_differ_by_place_and_seed():
    array = jax.ShapeDtypeStruct((300, 7, 50), jnp.float32)
    found = np.asarray(scattered(array, 3))
    assert abs(found.mean()) < 0.01 and abs(found.std() - 1) < 0.01
    assert np.unique(found).size > 0.99 * found.size
    assert abs(np.corrcoef(found.ravel(), np.asarray(scattered(array, 4)).ravel())[0, 1]) < 0.02
    for axis in range(3):
        one, other = np.take(found, [0], axis), np.take(found, [1], axis)
        assert not np.isclose(one, other).all()
    codes = np.asarray(scattered(jax.ShapeDtypeStruct((4096,), jnp.int8), 0))
    assert codes.min() < -120 and codes.max() > 120
    factors = np.asarray(scales(array, 0))
    assert 0.01 <= factors.min() < 0.011 and 0.029 < factors.max() <= 0.0301


def test_pages_of_contexts_are_distinct_and_full():
    cases = CASES["paged_attention"]
    shape = cases.SHAPES["llama-3.1-8b, tree"]._replace(rows=3, context=256)
    rows = cases.concrete(shape, TPU, np.random.default_rng(0))[2]
    assert sorted(np.asarray(rows.table_BJ).ravel()) == list(range(1, 13))
    assert (np.asarray(rows.start_B) + np.asarray(rows.count_B) == 256).all()
    assert np.asarray(rows.ancestors_BT)[0].tolist() == [2 ** (t + 1) - 1 for t in range(8)]


def test_cells_are_written_to_places_of_their_own():
    cases = CASES["kv_write"]
    shape = cases.SHAPES["llama-3.1-8b, chunk"]._replace(pages=64, heads=1)
    _, _, page_T, offset_T = cases.concrete(shape, TPU, np.random.default_rng(0))
    places = set(zip(page_T.tolist(), offset_T.tolist(), strict=True))
    assert len(places) == 16 * 32 and 0 not in page_T.tolist()
    steps = np.diff(np.asarray(offset_T).reshape(16, 32), axis=1)
    assert ((steps == 1) | (steps == -63)).all()


def work(operation, name, **changes):
    shape = CASES[operation].SHAPES[name]
    return CASES[operation].work(shape._replace(**changes) if changes else shape)


def test_work_of_attention():
    # 64 rows of 4,096 cells of 8 heads, 256 numbers of 2 bytes; queries and outputs of 32 x 128
    # numbers of 2 bytes; 32 log-sum-exps of 4.
    ends = 64 * (2 * 32 * 128 * 2 + 32 * 4)
    flops = 64 * 32 * 4096 * 2 * (128 + 128)
    found = work("paged_attention", "llama-3.1-8b, decode")
    assert found == Work(64 * 4096 * 8 * 256 * 2 + ends, flops) and found.bytes == 1_074_798_592
    # Codes of a byte, and two scales of 4 bytes for each cell and head.
    coded = work("paged_attention", "llama-3.1-8b, decode, int8")
    assert coded == Work(64 * 4096 * 8 * (256 + 8) + ends, flops)
    # A window of 1,024 leaves as many cells.
    windowed = work("paged_attention", "gemma-3-27b, decode, window")
    assert windowed.flops == 64 * 32 * 1024 * 2 * 256
    assert windowed.bytes == 64 * 1024 * 16 * 256 * 2 + ends
    # Two queries in a window of three, over four cells: three cells each, all four together.
    tight = work("paged_attention", "smollm2-135m, decode", rows=1, width=2, context=4, window=3)
    assert tight.flops == 9 * 6 * 2 * 128
    assert tight.bytes == 4 * 3 * 128 * 2 + 2 * 9 * (64 * 4 + 4)
    # A latent is read once for all heads: 576 numbers, of which 512 are the value.
    latent = work("latent_attention", "deepseek-v3, decode")
    assert latent.flops == 64 * 128 * 4096 * 2 * (576 + 512)
    assert latent.bytes == 64 * 4096 * 576 * 2 + 64 * 128 * (2 * 576 + 2 * 512 + 4)


def test_work_of_a_run_is_half_a_square():
    found = work("flash_attention", "llama-3.1-8b", queries=3, cells=3)
    assert found.flops == 32 * (1 + 2 + 3) * 2 * 256
    later = work("flash_attention", "llama-3.1-8b", queries=2, cells=5)
    assert later.flops == 32 * (4 + 5) * 2 * 256
    assert later.bytes == 5 * 8 * 256 * 2 + 2 * 32 * (128 * 4 + 4) + 4 * 7


def test_work_of_writing_and_of_products():
    assert work("kv_write", "llama-3.1-8b, decode") == Work(64 * 8 * 256 * 4 + 64 * 8, 0)
    stored = work("kv_write", "llama-3.1-8b, decode, int8")
    assert stored.bytes == 64 * (8 * (256 * 2 + 256 + 8) + 8)
    found = work("quantized_matmul", "llama-3.1-8b up, 16 rows, int8")
    ends = 16 * 4096 * 2 + 16 * 14336 * 4
    assert found == Work(4096 * 14336 + 4 * 14336 + ends, 2 * 16 * 4096 * 14336)
    packed = work("quantized_matmul", "llama-3.1-8b down, 64 rows, int4 by 128")
    ends = 64 * 14336 * 2 + 64 * 4096 * 4
    assert packed.bytes == 14336 * 4096 // 2 + 2 * 4 * 4096 * 112 + ends
    assert work("quantized_matmul", "llama-3.1-8b up, 64 rows, W8A8").numbers == "int8"
    # 8 rows go to 8 of 128 experts.
    found = work("grouped_matmul", "qwen3-30b-a3b up, 1 token")
    rows = 8 * (2048 * 2 + 768 * 4)
    assert found == Work(8 * 2048 * 768 * 2 + rows, 2 * 8 * 2048 * 768)
    coded = work("grouped_matmul", "deepseek-v3 up, 4 of 256 experts, float8")
    matrix = 7168 * 2048 + 4 * 2048 * 56
    assert coded.bytes == 4 * matrix + 512 * (7168 * 2 + 2048 * 4)

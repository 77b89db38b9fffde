# SPDX-License-Identifier: Apache-2.0
"""Cells of a page: what is written comes back, and nothing else changes.

Letters: J is pages of a row, C is the numbers of a cell.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.pages import NULL_PAGE, Pages, gather_pages, page_bytes, page_shape

P, K, W, C = 7, 2, 4, 16


def write(pool, cell_TKC, page_T, offset_T):
    return kv_write(Pages(pool), cell_TKC, page_T, offset_T).cells


WRITE = jax.jit(write)


@pytest.fixture
def pool():
    rng = np.random.default_rng(0)
    return rng.standard_normal((P, *page_shape(K, W, C))).astype(np.float32)


def tokens(count):
    rng = np.random.default_rng(1)
    return rng.standard_normal((count, K, C)).astype(np.float32)


def test_tokens_written_are_gathered_and_no_other_cell_changes(pool, shape_suffixes):
    cell_TKC = tokens(6)
    page_T = np.int32([3, 3, 6, 1, 1, 5])
    offset_T = np.int32([2, 3, 0, 0, 3, 1])
    after = np.asarray(WRITE(pool, cell_TKC, page_T, offset_T))
    expected = np.array(pool)
    for t in range(6):
        expected[page_T[t], :, offset_T[t]] = cell_TKC[t]
    np.testing.assert_array_equal(after, expected)

    page_BJ = np.int32([[3, 6, 0], [5, 1, 5]])
    gathered = np.asarray(jax.jit(gather_pages)(after, page_BJ))
    for b in range(2):
        for j in range(3):
            cells = slice(j * W, (j + 1) * W)
            np.testing.assert_array_equal(gathered[b, :, cells], expected[page_BJ[b, j]])


def test_idle_tokens_touch_the_null_page_only(pool):
    cell_TKC = tokens(6)
    page_T = np.full((6,), NULL_PAGE, np.int32)
    offset_T = np.int32([0, 1, 1, 3, 0, 0])
    after = np.asarray(WRITE(pool, cell_TKC, page_T, offset_T))
    np.testing.assert_array_equal(after[1:], pool[1:])
    np.testing.assert_array_equal(after[0, :, 3], cell_TKC[3])


def test_cells_of_fewer_numbers_are_filled_up_with_zeros(pool):
    cell_TKC = tokens(3)[:, :, :11]
    page_T, offset_T = np.int32([2, 2, 4]), np.int32([0, 1, 3])
    after = np.asarray(WRITE(pool, cell_TKC, page_T, offset_T))
    expected = np.array(pool)
    for t in range(3):
        expected[page_T[t], :, offset_T[t]] = np.pad(cell_TKC[t], ((0, 0), (0, 5)))
    np.testing.assert_array_equal(after, expected)


def test_a_narrower_pool_rounds_what_is_written(pool):
    cell_TKC = tokens(6)
    page_T, offset_T = np.int32([2, 2, 2, 2, 3, 3]), np.int32([0, 1, 2, 3, 0, 1])
    after = WRITE(pool.astype(jnp.bfloat16), cell_TKC, page_T, offset_T)
    assert after.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(after)[2, :, 1], cell_TKC[1].astype(jnp.bfloat16))


def test_a_donated_pool_is_written_in_place(pool):
    cell_TKC = tokens(1)
    pool = jnp.array(pool)
    place = pool.unsafe_buffer_pointer()
    zero_T = np.zeros((1,), np.int32)
    after = jax.jit(write, donate_argnums=0)(pool, cell_TKC, zero_T, zero_T)
    assert pool.is_deleted() and after.unsafe_buffer_pointer() == place


@pytest.mark.parametrize("dtype, itemsize", [(np.float32, 4), (jnp.bfloat16, 2), (np.int8, 1)])
def test_page_bytes_are_those_of_an_array(dtype, itemsize):
    array = np.zeros(page_shape(3, 16, 128), dtype)
    assert page_bytes(3, 16, 128, dtype) == array.nbytes == 3 * 16 * 128 * itemsize

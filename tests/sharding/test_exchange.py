# SPDX-License-Identifier: Apache-2.0
"""Exchanges of rows on virtual devices against NumPy, which does what JAX says of its operation."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding import Axis, make_mesh
from sharding.exchange import Sizes, exchange, padded_exchange, sizes_of

WIDTH, BEFORE = 3, -7.0


def ragged_all_to_all(operands, outputs, sizes):
    """Returns all devices' outputs, as `jax.lax.ragged_all_to_all` is documented.

    Device p's `send_sizes[q]` rows from `input_offsets[q]` are put into q's output from p's
    `output_offsets[q]`; what nobody writes stays.
    """
    results = [output.copy() for output in outputs]
    ways = len(operands)
    for p in range(ways):
        for q in range(ways):
            count = sizes.send_sizes[p, q]
            assert count == sizes.recv_sizes[q, p]
            begin, put = sizes.input_offsets[p, q], sizes.output_offsets[p, q]
            results[q][put : put + count] = operands[p][begin : begin + count]
    return results


def on_devices(function, ways):
    """Returns a program of arrays whose axis 0 is devices: `function(axis, part, ...)` of each."""
    axis, spec = Axis(("expert",), ways), PartitionSpec("expert")

    def local(*parts):
        return jax.tree.map(lambda x: x[None], function(axis, *(part[0] for part in parts)))

    mesh = make_mesh(expert=ways)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def random_counts(rng, ways, most, kind):
    """Returns int32 [ways, ways]: how many rows each device has for each."""
    counts = rng.integers(0, most + 1, (ways, ways)).astype(np.int32)
    if kind == "few":
        counts[rng.random((ways, ways)) < 0.7] = 0
    if kind == "none from one, none to one":
        counts[rng.integers(ways)] = 0
        counts[:, rng.integers(ways)] = 0
    return counts if kind != "none" else np.zeros_like(counts)


def gaps_between(rng, counts, total):
    """Returns where runs of these lengths begin in [0, total), in any order and with gaps."""
    order = rng.permutation(len(counts))
    spare = np.sort(rng.integers(0, total - counts.sum() + 1, len(counts)))
    begin = np.empty(len(counts), np.int32)
    begin[order] = np.cumsum(counts[order]) - counts[order] + spare
    return begin


KINDS = ("any", "few", "none from one, none to one", "none")


@pytest.mark.parametrize("ways, most", [(2, 5), (4, 1), (4, 6), (8, 4)])
def test_padded_rows_do_what_ragged_all_to_all_does(ways, most):
    """Runs begin anywhere, overlap nowhere in the outputs, and what is between them stays."""
    rng = np.random.default_rng(ways * most)
    sent, received = ways * most + 3, ways * most + 5
    program = on_devices(lambda axis, *x: padded_exchange(*x, axis=axis, most=most), ways)
    for kind in KINDS * 10:
        counts = random_counts(rng, ways, most, kind)
        sizes = Sizes(
            np.stack([gaps_between(rng, row, sent) for row in counts]),
            counts,
            np.stack([gaps_between(rng, column, received) for column in counts.T], axis=1),
            np.ascontiguousarray(counts.T),
        )
        rows = rng.normal(size=(ways, sent, WIDTH)).astype(np.float32)
        outputs = np.full((ways, received, WIDTH), BEFORE, np.float32)
        expected = ragged_all_to_all(rows, outputs, sizes)
        np.testing.assert_array_equal(program(rows, outputs, *sizes), expected)


@pytest.mark.parametrize("ways, most", [(2, 5), (4, 6), (8, 4)])
def test_there_and_back_is_where_it_was(ways, most):
    """Rows come in order of senders, and what was not sent comes back as zeros."""
    rng = np.random.default_rng(ways * most + 1)
    sent = ways * most + 3

    def there_and_back(axis, rows_SD, count_P, begin_P):
        sizes = sizes_of(axis.gather(count_P[None], 0), begin_P, axis)
        came = exchange(rows_SD, sizes, axis, most=most, received=ways * most)
        back_sizes = sizes.back(axis)
        return came, exchange(came, back_sizes, axis, most=most, received=sent), back_sizes

    program = on_devices(there_and_back, ways)
    for kind in KINDS * 10:
        counts = random_counts(rng, ways, most, kind)
        begins = np.stack([gaps_between(rng, row, sent) for row in counts])
        rows = rng.normal(size=(ways, sent, WIDTH)).astype(np.float32)
        came, back, back_sizes = jax.tree.map(np.asarray, program(rows, counts, begins))
        there, expected = np.zeros_like(came), np.zeros_like(rows)
        for p in range(ways):
            runs = [rows[q, begins[q, p] : begins[q, p] + counts[q, p]] for q in range(ways)]
            there[p, : counts[:, p].sum()] = np.concatenate(runs)
            for begin, count in zip(begins[p], counts[p], strict=True):
                expected[p, begin : begin + count] = rows[p, begin : begin + count]
        np.testing.assert_array_equal(came, there)
        np.testing.assert_array_equal(back, expected)
        np.testing.assert_array_equal(
            back, ragged_all_to_all(came, np.zeros_like(rows), back_sizes)
        )

# SPDX-License-Identifier: Apache-2.0
"""What heads ask of logits, with the vocabulary split over devices and whole: the same answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from engine.logits import Tables, Wishes, changed_logits, count_tokens, set_row
from engine.params import NO_TOKEN
from engine.sampling import (
    SamplingRows,
    argmax,
    checked,
    distribution,
    highest,
    logprobs_of,
    sample,
)
from engine.settings import BAD_WORD_TOKENS, BAD_WORDS, UNUSED
from sharding import ALONE, Axis, make_mesh

B = 16


def split(function, ways, size, *outs):
    """Returns `function(axis, ...)` over `ways` devices; arrays of `size` columns are split."""
    mesh, axis = make_mesh(tensor=ways), Axis(("tensor",), ways)

    def spec(array):
        return P(*("tensor" if n == size else None for n in array.shape))

    def call(*arguments):
        specs = jax.tree.map(spec, arguments)
        local = functools.partial(function, axis)
        return jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
        )(*arguments)

    return call


def rows_of(rng):
    """Returns sampling parameters that differ by row: greedy, open, top-k, top-p, min-p."""
    return SamplingRows(
        temperature_B=jnp.asarray(np.tile([0.0, 1.0, 0.7, 1.5], 4), jnp.float32),
        top_k_B=jnp.asarray(np.repeat([0, 3, 200, 0], 4), jnp.int32),
        top_p_B=jnp.asarray(np.tile([1.0, 1.0, 0.9, 0.5, 0.999], 4)[:B], jnp.float32),
        min_p_B=jnp.asarray(np.tile([0.0, 0.0, 0.05], 6)[:B], jnp.float32),
        seed_B2=jnp.asarray(rng.integers(0, 2**32, (B, 2)), jnp.uint32),
        sample_B=jnp.arange(B, dtype=jnp.int32),
        position_B=jnp.arange(B, dtype=jnp.int32) + 7,
    )


def answers(axis, logits_BV, rows, token_B):
    """Returns all that is asked of logits; those with a column an id last."""
    logprobs = logprobs_of(logits_BV, token_B, axis)
    top = highest(logits_BV, 64, axis)
    drawn_B = sample(logits_BV, rows, axis)
    tokens = (argmax(logits_BV, axis), drawn_B, checked(token_B, logits_BV, axis))
    return (*tokens, *top, *logprobs), distribution(logits_BV, rows, axis)


@pytest.mark.parametrize(
    "ways, size",
    [(8, 9600), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 304), (8, 304)))],
)
def test_answers_are_the_same_whatever_the_split(ways, size):
    rng = np.random.default_rng(size)
    logits_BV = rng.normal(size=(B, size)).astype(np.float32) * 3
    logits_BV[:, -3:] = -np.inf  # what fills up the vocabulary
    logits_BV[3, 5::7] = logits_BV[3, 5]  # ties across devices
    logits_BV[4] = 0.25
    logits_BV[5, :] = -np.inf
    logits_BV[6, size // 2] = np.nan
    rows, token_B = rows_of(rng), rng.integers(0, size - 3, B).astype(np.int32)
    whole, kept_BV = jax.jit(functools.partial(answers, ALONE))(logits_BV, rows, token_B)
    outs = (tuple(P() for _ in whole), P(None, "tensor"))
    parts, kept_parts_BV = split(answers, ways, size, *outs)(logits_BV, rows, token_B)
    sound = np.array([row not in (5, 6) for row in range(B)])
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(np.asarray(one)[sound], np.asarray(other)[sound], atol=2e-6)
    np.testing.assert_array_equal(np.isfinite(kept_BV)[sound], np.isfinite(kept_parts_BV)[sound])
    for tokens_B in (whole[2], parts[2]):
        assert list(np.asarray(tokens_B)[[5, 6]]) == [NO_TOKEN] * 2
        np.testing.assert_array_equal(np.asarray(tokens_B)[sound], token_B[sound])


def test_what_requests_change_is_the_same_whatever_the_split():
    rng, ways, size = np.random.default_rng(1), 8, 304
    tables = Tables(
        bias_RV=rng.normal(size=(B + 1, size)).astype(np.float32),
        tally_RV=rng.integers(0, 4, (B + 1, size)).astype(np.int32),
        bad_RML=np.full((B + 1, BAD_WORDS, BAD_WORD_TOKENS), UNUSED, np.int32),
        recent_RL=rng.integers(0, size, (B + 1, BAD_WORD_TOKENS - 1)).astype(np.int32),
    )
    for row in range(B):  # a bad word whose beginning the output has just said
        tables.bad_RML[row, 0, -2:] = tables.recent_RL[row, -1], rng.integers(0, size)
    wishes = Wishes(
        row_B=jnp.arange(B, dtype=jnp.int32),
        changed_B=jnp.asarray(np.tile([True, False], 8)),
        repetition_B=jnp.full((B,), 1.3, jnp.float32),
        presence_B=jnp.full((B,), 0.4, jnp.float32),
        frequency_B=jnp.full((B,), 0.2, jnp.float32),
        end_ids_BE=jnp.asarray(rng.integers(-1, size, (B, 3)), jnp.int32),
        unfinished_B=jnp.asarray(np.tile([True, True, False, False], 4)),
    )
    logits_BV = rng.normal(size=(B, size)).astype(np.float32)
    token_B = rng.integers(0, size, B).astype(np.int32)
    packed = np.concatenate(
        [
            [3],
            rng.normal(size=size).astype(np.float32).view(np.int32),
            rng.integers(0, 5, size),
            rng.integers(0, size, BAD_WORDS * BAD_WORD_TOKENS),
            rng.integers(0, size, BAD_WORD_TOKENS - 1),
        ]
    ).astype(np.int32)

    def change(axis, logits_BV, tables, wishes, token_B, packed):
        changed_BV = changed_logits(logits_BV, tables, wishes, axis)
        counted = count_tokens(tables, wishes.row_B, token_B, axis)
        return changed_BV, set_row(counted, packed, axis)

    arguments = (logits_BV, tables, wishes, token_B, packed)
    by_id = P(None, "tensor")
    outs = (by_id, Tables(by_id, by_id, P(), P()))
    whole = jax.jit(functools.partial(change, ALONE))(*arguments)
    parts = split(change, ways, size, *outs)(*arguments)
    assert not np.array_equal(whole[0], logits_BV)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)

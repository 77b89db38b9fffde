# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens follow the float64 distribution, and depend on nothing but their own request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.params import NO_TOKEN
from engine.sampling import (
    CANDIDATES,
    TOP_LOGPROBS,
    SamplingRows,
    argmax,
    checked,
    distribution,
    highest,
    logprobs_of,
    pick,
    sample,
)

V = 300
WIDE = 2 * CANDIDATES * 64 + 100  # a vocabulary whose highest are looked for in blocks
ROWS = 64  # of every call that can use it: one shape, one program
DRAWN, SAMPLE, LOGPROBS = jax.jit(distribution), jax.jit(sample), jax.jit(logprobs_of)


def make_logits():
    """Returns rows of V logits by kind; distances between unequal ones are at least 1/1024."""
    rng = np.random.default_rng(0)
    return {
        "peaked": np.round(rng.normal(0, 4, V) * 1024) / 1024,
        "wide": np.round(rng.normal(0, 1, V) * 1024) / 1024,
        "flat": rng.permutation(V) / 1024,
        "tied": rng.integers(0, 6, V) / 2,
        "equal": np.zeros(V),
    }


LOGITS = {name: row.astype(np.float32) for name, row in make_logits().items()}
# top_k, top_p: neither, each alone and both; sets that end within 64 candidates and beyond.
LIMITS = [
    (0, 1.0),
    (1, 1.0),
    (7, 1.0),
    (64, 1.0),
    (65, 1.0),
    (150, 1.0),
    (V, 1.0),
    (0, 0.0001),
    (0, 0.3004),
    (-1, 0.9503),
    (10**7, 0.9503),
    (20, 0.5004),
    (150, 0.8004),
    (V - 1, 0.9804),
]


def sampling_rows(count=ROWS, temperature=1.0, k=0, p=1.0, min_p=0.0, seed=0, index=0, position=0):
    """Returns the settings of `count` rows; each may be one for all, or one a row."""

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (count,))

    seeds = column(seed, np.uint64)
    return SamplingRows(
        temperature_B=column(temperature, np.float32),
        top_k_B=column(k, np.int32),
        top_p_B=column(p, np.float32),
        min_p_B=column(min_p, np.float32),
        seed_B2=np.stack([seeds >> np.uint64(32), seeds & np.uint64(2**32 - 1)], 1).astype(
            np.uint32
        ),
        sample_B=column(index, np.int32),
        position_B=column(position, np.int32),
    )


def tile(row, count=ROWS):
    return np.broadcast_to(np.asarray(row, np.float32), (count, len(row)))


def draw(logits_BV, **settings):
    return np.asarray(SAMPLE(logits_BV, sampling_rows(len(logits_BV), **settings)))


def exact(row, temperature, k, p, min_p=0.0):
    """Returns float64 probabilities of a row of logits, zero for tokens that are not kept."""
    scaled = row.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    order = order[np.exp(scaled[order] - scaled.max()) >= min_p]
    order = order[: k if 0 < k < len(row) else None]
    weights = np.exp(scaled[order] - scaled.max())
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    if p < 1:
        assert np.abs(before - np.float32(p)).min() > 1e-5, "no set here hangs on rounding"
        order, weights = order[before < p], weights[before < p]
    probabilities = np.zeros(len(row))
    probabilities[order] = weights / weights.sum()
    return probabilities


def kept_sets(logits_BV, k, p, min_p=0.0):
    """Returns what is kept of up to ROWS rows, by a call of one shape."""
    count = len(logits_BV)
    padding = [(0, ROWS - count)]
    logits_BV = np.pad(logits_BV, [*padding, (0, 0)])
    k_B, p_B = np.pad(np.int32(k), padding), np.pad(np.float32(p), padding, constant_values=1)
    drawn_BV = DRAWN(logits_BV, sampling_rows(k=k_B, p=p_B, min_p=min_p))
    return np.asarray(drawn_BV)[:count] > -np.inf


@pytest.mark.parametrize("kind", LOGITS)
def test_kept_sets_are_exact_together_and_alone(kind):
    row = LOGITS[kind]
    want = np.array([exact(row, 1.0, k, p) > 0 for k, p in LIMITS])
    k, p = zip(*LIMITS, strict=True)
    np.testing.assert_array_equal(kept_sets(tile(row, len(LIMITS)), k, p), want)
    # Alone, a row whose set is small is settled without the search that others bring.
    for each, (k, p) in zip(want, LIMITS, strict=True):
        np.testing.assert_array_equal(kept_sets(tile(row, 1), [k], [p])[0], each)


@pytest.mark.parametrize("kind", ["peaked", "flat", "tied"])
def test_min_p_comes_before_the_others(kind):
    row = LOGITS[kind]
    k, p = zip(*LIMITS, strict=True)
    for min_p in (0.0101, 0.5003, 1.0):
        want = np.array([exact(row, 1.0, k, p, min_p) > 0 for k, p in LIMITS])
        np.testing.assert_array_equal(kept_sets(tile(row, len(LIMITS)), k, p, min_p), want)


def wide_rows():
    """Returns rows over WIDE ids: sets that end in the first blocks, far behind, and among ties."""
    rng = np.random.default_rng(6)
    peaked = np.round(rng.normal(0, 4, WIDE) * 1024) / 1024
    flat = rng.permutation(WIDE) / 1024 / 16
    return np.stack([peaked, flat, rng.integers(0, 6, WIDE) / 2, np.zeros(WIDE)]).astype(np.float32)


def test_the_highest_of_a_large_vocabulary_are_found_by_blocks():
    rows = wide_rows()
    for count in (CANDIDATES, TOP_LOGPROBS):
        values, ids = jax.jit(highest, static_argnums=1)(rows, count)
        want = np.argsort(-rows, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(ids, want)
        np.testing.assert_array_equal(values, np.take_along_axis(rows, want, axis=1))


@pytest.mark.parametrize("k, p", [(0, 0.9003), (500, 1.0), (3000, 0.7003), (40, 0.9003)])
def test_kept_sets_are_exact_in_a_large_vocabulary(k, p):
    rows = wide_rows()
    got = np.asarray(DRAWN(rows, sampling_rows(len(rows), k=k, p=p))) > -np.inf
    for row, kept in zip(rows, got, strict=True):
        order = np.argsort(-row.astype(np.float64), kind="stable")[: k or None]
        weights = np.exp(row[order].astype(np.float64) - row.max())
        before = (np.cumsum(weights) - weights) / weights.sum()
        want = np.zeros(WIDE, bool)
        want[order[(before < p) | (p >= 1)]] = True
        # A float32 sum of 8,000 numbers may be off by one token of the flattest rows.
        assert np.sum(want != kept) <= (1 if p < 1 else 0)


def test_pick_inverts_the_distribution_function():
    """By hand: places of a uniform number among weights, zeros and the ends of blocks included."""
    weights = np.zeros((1, 200), np.float32)
    weights[0, [3, 64, 127, 199]] = [1, 2, 1, 4]
    places = {0.0: 3, 0.124: 3, 0.125: 64, 0.374: 64, 0.375: 127, 0.5: 199, 0.999: 199}
    for uniform, token in places.items():
        assert pick(jnp.asarray(weights), jnp.float32([uniform])).tolist() == [token]


def test_rows_without_finite_logits_get_no_token():
    rows = np.tile(LOGITS["wide"], (5, 1))
    rows[1, 7] = np.nan
    rows[2, 9] = np.inf
    rows[3] = -np.inf
    rows[4, 3:] = -np.inf  # some forbidden: nothing is wrong
    tokens = checked(argmax(rows), rows)
    want = [int(rows[0].argmax()), NO_TOKEN, NO_TOKEN, NO_TOKEN, int(rows[4].argmax())]
    assert tokens.tolist() == want


def test_draws_follow_the_exact_distribution_in_a_mixed_batch():
    settings = [
        ("wide", 1.0, 0, 1.0),
        ("wide", 0.7, 40, 1.0),
        ("wide", 1.3, 0, 0.8003),
        ("tied", 1.0, 100, 0.9003),
        ("peaked", 2.0, 0, 0.9003),
        ("flat", 1.0, 0, 0.5004),
        ("equal", 1.0, 5, 1.0),
    ]
    draws = 3000
    rows = np.repeat(np.arange(len(settings)), draws)
    turn = np.tile(np.arange(draws), len(settings))
    third = turn % 3  # a third of the draws differ by seed, by sample and by position each
    tokens = draw(
        np.stack([LOGITS[kind] for kind, *_ in settings])[rows],
        temperature=np.array([setting[1] for setting in settings])[rows],
        k=np.array([setting[2] for setting in settings])[rows],
        p=np.array([setting[3] for setting in settings])[rows],
        seed=np.where(third == 0, turn + (turn << 40), 5),
        index=np.where(third == 1, turn, 0),
        position=np.where(third == 2, turn, 0),
    )
    for row, (kind, temperature, k, p) in enumerate(settings):
        want = exact(LOGITS[kind], temperature, k, p) * draws
        got = np.bincount(tokens[rows == row], minlength=V)
        assert not got[want == 0].any(), "only kept tokens are drawn"
        assert chi_square_z(got, want) < 4 and abs(mean_z(got, want)) < 4, settings[row]


def chi_square_z(got, want):
    """Returns how many standard deviations above chance the counts differ (Wilson-Hilferty)."""
    rare = want < 5
    got = np.append(got[~rare], got[rare].sum())[: None if rare.any() else -1]
    want = np.append(want[~rare], want[rare].sum())[: None if rare.any() else -1]
    freedom = len(want) - 1
    statistic = ((got - want) ** 2 / np.maximum(want, 1e-9)).sum()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def mean_z(got, want):
    """Returns how many standard deviations the drawn tokens' mean log-likelihood is off by."""
    value = np.log(np.maximum(want, 1e-300))
    p = want / want.sum()
    variance = p @ value**2 - (p @ value) ** 2
    return (got - want) @ value / max(variance * want.sum(), 1e-3) ** 0.5


def test_the_statistics_see_a_wrong_temperature():
    want = exact(LOGITS["wide"], 1.0, 0, 1.0) * 150 * ROWS
    for temperature, enough in ((1.3, chi_square_z), (1.1, mean_z)):
        tokens = [
            draw(tile(LOGITS["wide"]), temperature=temperature, seed=turn, position=np.arange(ROWS))
            for turn in range(150)
        ]
        assert abs(enough(np.bincount(np.concatenate(tokens), minlength=V), want)) > 4


def test_a_token_does_not_change_with_company_or_place():
    rng = np.random.default_rng(3)
    names = rng.choice(list(LOGITS), ROWS)
    logits_BV = np.stack([LOGITS[name] for name in names])
    limits = [LIMITS[i] for i in rng.integers(0, len(LIMITS), ROWS)]
    columns = {
        "temperature": rng.choice([0, 0.5, 1, 2], ROWS),
        "k": np.array([k for k, _ in limits]),
        "p": np.array([p for _, p in limits]),
        "seed": rng.integers(0, 2**63, ROWS),
        "position": rng.integers(0, 4096, ROWS),
    }
    together = draw(logits_BV, **columns)
    order = rng.permutation(ROWS)
    moved = draw(logits_BV[order], **{name: value[order] for name, value in columns.items()})
    np.testing.assert_array_equal(moved, together[order])
    for row in range(0, ROWS, 4):
        settings = {name: value[row] for name, value in columns.items()}
        assert set(draw(tile(logits_BV[row]), **settings)) == {together[row]}


def test_seed_sample_and_position_each_make_other_draws():
    places = np.arange(ROWS)
    first = {"seed": 7, "index": 0, "position": places}
    keys = [
        first,
        first | {"seed": 8},
        first | {"seed": 7 + 2**32},
        first | {"index": 1},
        first | {"position": places + ROWS},
        {"seed": 7, "index": places + 1, "position": 0},
    ]
    draws = [tuple(draw(tile(LOGITS["equal"]), **key)) for key in keys]
    assert len(set(draws)) == len(keys)
    assert draws[0] == tuple(draw(tile(LOGITS["equal"]), **first))
    # By chance two draws agree in one place of 300.
    for one in range(len(draws)):
        for other in range(one):
            assert np.sum(np.equal(draws[one], draws[other])) < 5


def test_temperature_zero_tiny_temperatures_and_top_k_1_give_the_argmax():
    """CASES S-06."""
    row = np.random.default_rng(4).uniform(-60, 50, V).astype(np.float32)
    row[[17, 5, 200, 9]] = 60, 59.5, -60, -np.inf
    temperatures = [0, 1e-40, 2e-38, 1e-30, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3]
    temperature = np.resize(temperatures, ROWS)
    keys = {"seed": np.arange(ROWS), "position": np.arange(ROWS) // 3}
    for k, p in LIMITS:
        assert set(draw(tile(row), temperature=temperature, k=k, p=p, **keys)) == {17}
    assert set(draw(tile(row), temperature=1.0, k=1, **keys)) == {17}
    tied = row.copy()
    tied[[5, 250]] = 60
    assert set(draw(tile(tied), temperature=0, **keys)) == {5}, "the lowest id of a tie"
    assert set(draw(tile(tied), temperature=1.0, k=1, **keys)) == {5}
    assert set(draw(tile(tied), temperature=1.0, k=2, **keys)) == {5, 17}
    assert set(np.asarray(argmax(tile(tied)))) == {5}


def test_forbidden_tokens_are_never_drawn():
    row = LOGITS["equal"].copy()
    row[10:] = -np.inf
    keys = {"position": np.arange(ROWS)}
    for temperature, (k, p) in ((t, limit) for t in (1.0, 100.0) for limit in LIMITS):
        assert draw(tile(row), temperature=temperature, k=k, p=p, **keys).max() < 10


def test_top_k_edges_in_a_mixed_batch():
    """CASES S-07."""
    row = LOGITS["peaked"]
    edges = np.array([0, 0, -1, 1, V - 1, V, 10_000_000])
    temperature = np.where(np.arange(ROWS) % len(edges) == 0, 0, 3.0)  # the first is greedy
    k = np.resize(edges, ROWS)
    order = np.argsort(-row, kind="stable")
    for turn in range(70):
        position = turn * ROWS + np.arange(ROWS) // len(edges)  # edges side by side share a key
        tokens = draw(tile(row), temperature=temperature, k=k, seed=1, position=position)
        off = tokens[: ROWS // len(edges) * len(edges)].reshape(-1, len(edges))
        assert (off[:, 0] == order[0]).all() and (off[:, 3] == order[0]).all()
        assert (off[:, [2, 5, 6]] == off[:, [1]]).all(), "at or above V is off"
        assert (off[:, 4] != order[-1]).all()


def test_log_probabilities_ranks_and_the_top():
    for count, logits_BV in (
        (ROWS, np.resize(np.stack(list(LOGITS.values())), (ROWS, V))),
        (3, None),
    ):
        if logits_BV is None:
            logits_BV = np.float32([[1, 2, 2, 0, -np.inf], [0, 0, 0, 0, 0], [-60, 60, 59.5, 60, 1]])
        token_B = np.arange(count, dtype=np.int32) % logits_BV.shape[1]
        got = jax.tree.map(np.asarray, LOGPROBS(logits_BV, token_B))
        exact_BV = logits_BV.astype(np.float64)
        exact_BV = exact_BV - np.log(np.exp(exact_BV).sum(axis=1, keepdims=True))
        own_B = exact_BV[np.arange(count), token_B]
        np.testing.assert_allclose(got.logprob_B, own_B, rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(got.rank_B, 1 + (exact_BV > own_B[:, None]).sum(axis=1))
        top_BC = np.argsort(-exact_BV, axis=1, kind="stable")[:, :TOP_LOGPROBS]
        np.testing.assert_array_equal(got.top_id_BC, top_BC)
        want_BC = np.take_along_axis(exact_BV, top_BC, axis=1)
        np.testing.assert_allclose(got.top_logprob_BC, want_BC, rtol=1e-6, atol=1e-5)
        assert got.rank_B.dtype == got.top_id_BC.dtype == np.int32


def test_names_state_the_shapes(shape_suffixes):
    # Fresh functions are traced anew, so that there is something to check.
    tokens = jax.eval_shape(lambda *args: sample(*args), tile(LOGITS["wide"]), sampling_rows())
    logprobs = jax.eval_shape(lambda *args: logprobs_of(*args), tile(LOGITS["wide"]), tokens)
    assert tokens.dtype == jnp.int32 and logprobs.top_id_BC.shape == (ROWS, TOP_LOGPROBS)

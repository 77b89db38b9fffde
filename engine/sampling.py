# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens and log-probabilities, row by row.

Keys are (seed, sample index, position), so a token depends on nothing but its own request. Where
the vocabulary is split over devices, `axis` is the mesh axis, and columns are those of one device:
ids are told apart, and so much travels as there are candidates.
Letters: B rows, V ids of one device, C candidates, K blocks of them, S ids of a block.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from engine.params import NO_TOKEN
from engine.vocabulary import ids, log_total, take
from sharding import ALONE, Axis

# Highest logits taken at once; a row whose set may reach beyond them is searched by bisection.
CANDIDATES = 64
# Log-probabilities returned for each token, beside its own.
TOP_LOGPROBS = 20
# Ids whose maximum, or sum, is taken first: both take one pass over the vocabulary.
BLOCK = 64


class SamplingRows(NamedTuple):
    """The sampling parameters of the rows of a head."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    seed_B2: jax.Array
    sample_B: jax.Array
    position_B: jax.Array


class Logprobs(NamedTuple):
    """Log-softmax values: the token's own, its rank (1 is the best), and the top ones."""

    logprob_B: jax.Array  # float32
    rank_B: jax.Array  # int32
    top_id_BC: jax.Array  # int32
    top_logprob_BC: jax.Array  # float32


def argmax(logits_BV: jax.Array, axis: Axis = ALONE) -> jax.Array:
    """Returns the id of the highest logit of each row, the lowest id where several tie."""
    place_B = jax.lax.platform_dependent(logits_BV, cpu=_argmax_of_blocks, default=_argmax_of_all)
    if axis.ways == 1:
        return place_B
    top_B1 = jnp.take_along_axis(logits_BV, place_B[:, None], axis=1)
    id_BX = axis.gather((place_B + axis.here() * logits_BV.shape[1])[:, None], 1)
    best_B1 = _argmax_of_all(axis.gather(top_B1, 1))[:, None]
    return jnp.take_along_axis(id_BX, best_B1, axis=1)[:, 0]


def _argmax_of_all(logits_BV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def _argmax_of_blocks(logits_BV: jax.Array) -> jax.Array:
    """The first block with the highest maximum, then in the block: four times as fast on CPU."""
    logits_BKS = blocks(logits_BV, -jnp.inf)
    block_B = _argmax_of_all(logits_BKS.max(axis=-1))
    logits_BS = jnp.take_along_axis(logits_BKS, block_B[:, None, None], axis=1)[:, 0]
    return jnp.minimum(block_B * BLOCK + _argmax_of_all(logits_BS), logits_BV.shape[1] - 1)


def checked(token_B: jax.Array, logits_BV: jax.Array, axis: Axis = ALONE) -> jax.Array:
    """Returns the tokens, NO_TOKEN where a row has a NaN or no finite logit at the top."""
    # A sum sees every NaN; XLA's CPU backend may pass over one as it takes the highest.
    total_B = logits_BV.sum(axis=-1)
    finite_B = jnp.isfinite(axis.max(logits_BV.max(axis=-1))) & ~jnp.isnan(axis.sum(total_B))
    return jnp.where(finite_B, token_B, NO_TOKEN)


def sample_or_argmax(logits_BV: jax.Array, rows: SamplingRows, axis: Axis = ALONE) -> jax.Array:
    """Returns `sample`, or just the argmax where all rows are greedy."""
    greedy = jnp.all(rows.temperature_B == 0)
    return jax.lax.cond(
        greedy, lambda: argmax(logits_BV, axis), lambda: sample(logits_BV, rows, axis)
    )


def sample(logits_BV: jax.Array, rows: SamplingRows, axis: Axis = ALONE) -> jax.Array:
    """Returns one token a row, drawn from `distribution`; rows of temperature 0 take the argmax.

    By inverting the distribution function, in the order of ids, at one uniform number a row.
    """
    scaled_BV = distribution(logits_BV, rows, axis)
    uniform_B = jax.vmap(uniform)(rows.seed_B2, rows.sample_B, rows.position_B)
    drawn_B = pick(jnp.exp(scaled_BV), uniform_B, axis)
    return jnp.where(rows.temperature_B == 0, argmax(logits_BV, axis), drawn_B)


def distribution(logits_BV: jax.Array, rows: SamplingRows, axis: Axis = ALONE) -> jax.Array:
    """Returns what tokens are drawn from, as logits with a maximum of 0, -inf where none is kept.

    Temperature, then min-p, then top-k, then top-p of what is left, as vLLM has it. Of equal logits
    the lowest ids are kept, so that top_k=1 is the argmax. A greedy row keeps everything, at the
    temperature 1: it costs its neighbours no search.
    """
    greedy_B = rows.temperature_B == 0
    # Of the distance to the maximum, so that a tiny temperature leaves the maximum finite.
    distance_BV = logits_BV - axis.max(logits_BV.max(axis=-1, keepdims=True))
    smallest = jnp.finfo(jnp.float32).tiny
    temperature_B = jnp.where(greedy_B, 1.0, jnp.maximum(rows.temperature_B, smallest))
    scaled_BV = distance_BV / temperature_B[:, None]
    least_B = jnp.where(greedy_B, -jnp.inf, jnp.log(rows.min_p_B))
    scaled_BV = jnp.where(scaled_BV >= least_B[:, None], scaled_BV, -jnp.inf)
    id_V = ids(scaled_BV.shape[1], axis)
    V = scaled_BV.shape[1] * axis.ways
    no_k_B = greedy_B | (rows.top_k_B <= 0) | (rows.top_k_B >= V)
    k_B = jnp.where(no_k_B, V, rows.top_k_B)
    p_B = jnp.where(greedy_B, 1.0, rows.top_p_B)
    off_B = no_k_B & (p_B >= 1.0)

    # A branch returns no logits: they would be copied.
    floor_B, last_B = jax.lax.cond(
        jnp.all(off_B),
        lambda: (jnp.full(off_B.shape, -jnp.inf), jnp.zeros(off_B.shape, jnp.int32)),
        lambda: last_kept(scaled_BV, k_B, p_B, ~off_B, axis),
    )
    floor_B = jnp.where(off_B, -jnp.inf, floor_B)
    tied_BV = scaled_BV == floor_B[:, None]
    tied_BV = tied_BV & (id_V[None] <= last_B[:, None])
    return jnp.where((scaled_BV > floor_B[:, None]) | tied_BV, scaled_BV, -jnp.inf)


def uniform(seed_2: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
    """Returns a float32 in [0, 1): the noise of one token of one request."""
    key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return jax.random.uniform(key, (), jnp.float32)


def blocks(values_BV: jax.Array, fill: Any) -> jax.Array:
    """Returns [B, K, S]: the vocabulary in blocks, the last one filled up."""
    B, V = values_BV.shape
    K = -(-V // BLOCK)
    padded = jnp.pad(values_BV, ((0, 0), (0, K * BLOCK - V)), constant_values=fill)
    return padded.reshape(B, K, BLOCK)


def pick(weight_BV: jax.Array, uniform_B: jax.Array, axis: Axis = ALONE) -> jax.Array:
    """Returns the id where the running sum of a row's weights passes `uniform` of their total.

    First among the sums of devices, then of blocks, then in the block: one pass over the
    vocabulary. Never an id without weight, whatever the rounding.
    """
    weight_BKS = blocks(weight_BV, 0.0)
    sum_BK = weight_BKS.sum(axis=-1)
    sum_BX = axis.gather(sum_BK.sum(axis=-1, keepdims=True), 1)
    target_B = uniform_B * sum_BX.sum(axis=-1)
    if axis.ways == 1:
        return _pick_of_blocks(weight_BKS, sum_BK, target_B)
    before_BX = jnp.cumsum(sum_BX, axis=-1) - sum_BX
    device_B = _last_reached(before_BX, sum_BX, target_B)
    rest_B = target_B - jnp.take_along_axis(before_BX, device_B[:, None], axis=1)[:, 0]
    id_B = _pick_of_blocks(weight_BKS, sum_BK, rest_B) + axis.here() * weight_BV.shape[1]
    return axis.sum(jnp.where(device_B == axis.here(), id_B, 0))


def _pick_of_blocks(weight_BKS: jax.Array, sum_BK: jax.Array, target_B: jax.Array) -> jax.Array:
    before_BK = jnp.cumsum(sum_BK, axis=-1) - sum_BK
    block_B = _last_reached(before_BK, sum_BK, target_B)
    weight_BS = jnp.take_along_axis(weight_BKS, block_B[:, None, None], axis=1)[:, 0]
    rest_B = target_B - jnp.take_along_axis(before_BK, block_B[:, None], axis=1)[:, 0]
    before_BS = jnp.cumsum(weight_BS, axis=-1) - weight_BS
    return block_B * BLOCK + _last_reached(before_BS, weight_BS, rest_B)


def _last_reached(before_BX: jax.Array, weight_BX: jax.Array, target_B: jax.Array) -> jax.Array:
    """Returns the last place with weight that begins at or before the target; else the first."""
    reached_BX = (weight_BX > 0) & (before_BX <= target_B[:, None])
    place_X = jnp.arange(before_BX.shape[1], dtype=jnp.int32)
    first_B = jnp.argmax(weight_BX > 0, axis=-1).astype(jnp.int32)
    return jnp.maximum(jnp.where(reached_BX, place_X[None], -1).max(axis=-1), first_B)


def highest(values_BV: jax.Array, count: int, axis: Axis = ALONE) -> tuple[jax.Array, jax.Array]:
    """Returns (values_BC, id_BC), the `count` highest, falling; of equal ones the lowest ids."""
    top_BC, id_BC = jax.lax.platform_dependent(
        values_BV,
        tpu=partial(_highest_of_all, count=count),  # which has an operation for it
        default=partial(_highest_of_blocks, count=count),
    )
    if axis.ways == 1:
        return top_BC, id_BC
    id_BX = axis.gather(id_BC + axis.here() * values_BV.shape[1], 1)
    top_BC, place_BC = _highest_of_all(axis.gather(top_BC, 1), count)
    return top_BC, jnp.take_along_axis(id_BX, place_BC, axis=1)


def _highest_of_all(values_BV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    top_BC, id_BC = jax.lax.top_k(values_BV, min(count, values_BV.shape[1]))
    return top_BC, id_BC.astype(jnp.int32)


def _highest_of_blocks(values_BV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The blocks with the highest maxima hold them: so only those are sorted.

    Twice as fast on CPU; on GPU XLA would sort the whole vocabulary.
    """
    if values_BV.shape[1] <= 2 * count * BLOCK:
        return _highest_of_all(values_BV, count)
    values_BKS = blocks(values_BV, -jnp.inf)
    block_BC = jnp.sort(jax.lax.top_k(values_BKS.max(axis=-1), count)[1], axis=-1)
    chosen_BCS = jnp.take_along_axis(values_BKS, block_BC[:, :, None], axis=1)
    top_BC, place_BC = jax.lax.top_k(chosen_BCS.reshape(len(values_BV), -1), count)
    block_BC = jnp.take_along_axis(block_BC, place_BC // BLOCK, axis=1)
    return top_BC, (block_BC * BLOCK + place_BC % BLOCK).astype(jnp.int32)


def last_kept(
    scaled_BV: jax.Array,
    k_B: jax.Array,
    p_B: jax.Array,
    wanted_B: jax.Array,
    axis: Axis = ALONE,
) -> tuple[jax.Array, jax.Array]:
    """Returns (value_B, id_B) of the last token that top-k and then top-p keep of each row.

    top-p keeps the smallest set whose probability reaches p of what top-k left. Values are at most
    0. Exact: rows whose set may reach beyond the candidates are searched, those of `wanted_B`.
    """
    V = scaled_BV.shape[1] * axis.ways
    sorted_BC, id_BC = highest(scaled_BV, CANDIDATES, axis)
    C = sorted_BC.shape[1]
    index_C = jnp.arange(C, dtype=jnp.int32)
    in_k_BC = index_C[None] < k_B[:, None]
    mass_BC = jnp.where(in_k_BC, jnp.exp(sorted_BC), 0.0)
    whole_B = axis.sum(jnp.exp(scaled_BV).sum(axis=-1))
    total_B = jnp.where(k_B < V, mass_BC.sum(axis=-1), whole_B)
    before_BC = jnp.cumsum(mass_BC, axis=-1) - mass_BC
    kept_BC = in_k_BC & (before_BC < (p_B * total_B)[:, None])
    kept_BC = kept_BC | (in_k_BC & (p_B >= 1.0)[:, None])
    last_B1 = jnp.maximum(kept_BC.sum(axis=-1, keepdims=True) - 1, 0)
    # Beyond the candidates lies more of top-k's mass, or perhaps more of top-p's set.
    complete_B = (k_B <= C) | ((k_B == V) & ~kept_BC[:, -1]) | (C == V)
    value_B = jnp.take_along_axis(sorted_BC, last_B1, axis=1)[:, 0]
    id_B = jnp.take_along_axis(id_BC, last_B1, axis=1)[:, 0]
    search_B = wanted_B & ~complete_B
    order_B = jnp.argsort(~search_B, stable=True)

    def search(index, found):
        row = order_B[index]
        value, last = search_row(scaled_BV[row], sorted_BC[row, -1], k_B[row], p_B[row], axis)
        return found[0].at[row].set(value), found[1].at[row].set(last)

    return jax.lax.fori_loop(0, search_B.sum(), search, (value_B, id_B))


def search_row(
    scaled_V: jax.Array, candidate: jax.Array, k: jax.Array, p: jax.Array, axis: Axis = ALONE
) -> tuple[jax.Array, jax.Array]:
    """Returns what `last_kept` returns, of one row, by search.

    `candidate`: a value that fewer than `k` exceed. By bisection over the values' bits, which for
    numbers up to 0 grow as the number falls, until no two different values are left: exact, in
    some 20 passes for each of the two.
    """
    V = scaled_V.shape[0] * axis.ways
    # Sums go by columns first, which is twice as fast on CPU. What fills up has no mass.
    scaled_KS = blocks(scaled_V[None], -jnp.inf)[0]
    bits_KS = jax.lax.bitcast_convert_type(jnp.abs(scaled_KS), jnp.int32)
    mass_KS = jnp.exp(scaled_KS)
    first = jax.lax.bitcast_convert_type(jnp.abs(candidate), jnp.int32)

    def total(chosen_KS, each_KS):
        return axis.sum(jnp.sum(jnp.sum(jnp.where(chosen_KS, each_KS, 0.0), axis=0)))

    def count(chosen_KS):
        return total(chosen_KS, 1.0).astype(jnp.int32)  # exact: there are fewer than 2 ** 24

    def mass(chosen_KS):
        return total(chosen_KS, mass_KS)

    def highest_bits(bits_KS):
        return axis.max(jnp.max(jnp.max(bits_KS, axis=0)))

    def least(enough, high):
        """Returns the least bits of a value for which `enough` of the values up to it is true.

        It is false, then true, and true at `high`.
        """

        def is_open(bounds):
            low, high = bounds
            return (low < high) & (count((bits_KS >= low) & (bits_KS <= high)) > 1)

        def halve(_, bounds):
            low, high = bounds
            middle = low + (high - low) // 2
            ends = enough(bits_KS <= middle)
            return jnp.where(ends, low, middle + 1), jnp.where(ends, middle, high)

        low = jnp.where(enough(bits_KS < first), 0, first)
        # The look at what is left costs a pass too.
        bounds = jax.lax.while_loop(
            is_open, lambda bounds: jax.lax.fori_loop(0, 8, halve, bounds), (low, high)
        )
        return highest_bits(jnp.where(bits_KS <= bounds[1], bits_KS, 0))

    # Top-k ends among the tokens of `edge`, of which it keeps the first `ties`.
    most = highest_bits(bits_KS)
    edge = jax.lax.cond(k < V, lambda: least(lambda c_KS: count(c_KS) >= k, most), lambda: most)
    ties = k - count(bits_KS < edge)
    each = jnp.exp(-jax.lax.bitcast_convert_type(edge, jnp.float32))
    wanted = p * (mass(bits_KS < edge) + ties.astype(jnp.float32) * each)
    # Top-p may end before.
    last = jax.lax.cond(
        p < 1.0, lambda: least(lambda c_KS: mass(c_KS) >= wanted, edge), lambda: edge
    )
    each = jnp.exp(-jax.lax.bitcast_convert_type(last, jnp.float32))
    lacking = jnp.where(p < 1.0, wanted - mass(bits_KS < last), jnp.inf)
    needed = jnp.ceil(lacking / jnp.maximum(each, jnp.finfo(jnp.float32).tiny))
    kept = jnp.where(last == edge, ties, jnp.int32(V)).astype(jnp.float32)
    kept = jnp.clip(needed, 1.0, kept).astype(jnp.int32)
    tied_KS = bits_KS == last
    some = count(tied_KS) > kept
    place = jax.lax.cond(
        some, lambda: nth(tied_KS, kept, scaled_V.shape[0], axis), lambda: jnp.int32(V - 1)
    )
    return -jax.lax.bitcast_convert_type(last, jnp.float32), place


def nth(chosen_KS: jax.Array, n: jax.Array, size: int, axis: Axis = ALONE) -> jax.Array:
    """Returns the id of the `n`-th that is true, n from 1, where devices have `size` ids each.

    First its device, then its block, then in the block.
    """
    if axis.ways == 1:
        return _nth_of_blocks(chosen_KS, n)
    count = jnp.sum(chosen_KS, dtype=jnp.int32)
    count_X = axis.gather(count[None], 0)
    upto_X = jnp.cumsum(count_X)
    device = jnp.argmax(upto_X >= n).astype(jnp.int32)
    place = _nth_of_blocks(chosen_KS, n - upto_X[device] + count_X[device])
    return axis.sum(jnp.where(device == axis.here(), place + device * size, 0))


def _nth_of_blocks(chosen_KS: jax.Array, n: jax.Array) -> jax.Array:
    upto_K = jnp.cumsum(jnp.sum(chosen_KS, axis=1, dtype=jnp.int32))
    block = jnp.argmax(upto_K >= n).astype(jnp.int32)
    chosen_S = chosen_KS[block].astype(jnp.int32)
    before = upto_K[block] - jnp.sum(chosen_S)
    return block * BLOCK + jnp.argmax(before + jnp.cumsum(chosen_S) >= n).astype(jnp.int32)


def logprobs_of(logits_BV: jax.Array, token_B: jax.Array, axis: Axis = ALONE) -> Logprobs:
    """Returns the log-probabilities of `token_B` and of each row's most likely tokens."""
    total_B = log_total(logits_BV, axis)
    own_B = take(logits_BV, jnp.maximum(token_B, 0), axis)
    rank_B = 1 + axis.sum(jnp.sum(logits_BV > own_B[:, None], axis=-1, dtype=jnp.int32))
    top_BC, id_BC = highest(logits_BV, TOP_LOGPROBS, axis)
    return Logprobs(own_B - total_B, rank_B, id_BC, top_BC - total_B[:, None])

# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens and log-probabilities, row by row.

Keys are (seed, sample index, position), so a token depends on nothing but its own request.
Letters: B rows, V vocabulary, C candidates.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Highest logits taken without sorting the vocabulary; rows that need more take the sort.
CANDIDATES = 64
# Log-probabilities returned for each token, beside its own.
TOP_LOGPROBS = 20


class SamplingRows(NamedTuple):
    """The sampling parameters of the rows of a head."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    seed_B2: jax.Array
    sample_B: jax.Array
    position_B: jax.Array


class Logprobs(NamedTuple):
    """Raw log-softmax values: the token's own, its rank (1 is the best), and the top ones."""

    logprob_B: jax.Array  # float32
    rank_B: jax.Array  # int32
    top_id_BC: jax.Array  # int32
    top_logprob_BC: jax.Array  # float32


def argmax(logits_BV: jax.Array) -> jax.Array:
    """Returns the id of the highest logit of each row, the lowest id where several tie."""
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def sample_or_argmax(logits_BV: jax.Array, rows: SamplingRows) -> jax.Array:
    """Returns `sample`, without its noise and order where all rows are greedy."""
    greedy = jnp.all(rows.temperature_B == 0)
    return jax.lax.cond(greedy, lambda: argmax(logits_BV), lambda: sample(logits_BV, rows))


def sample(logits_BV: jax.Array, rows: SamplingRows) -> jax.Array:
    """Returns one token a row: temperature, then top-k, then top-p of what is left (as vLLM).

    Gumbel-max over the kept logits; rows of temperature 0 take the argmax. Of equal logits the
    lowest ids are kept, so that top_k=1 is the argmax too.
    """
    greedy_B = rows.temperature_B == 0
    # Scaling the distance to the maximum cannot overflow, however small the temperature is.
    distance_BV = logits_BV - logits_BV.max(axis=-1, keepdims=True)
    smallest = jnp.finfo(jnp.float32).tiny
    temperature_B = jnp.where(greedy_B, 1.0, jnp.maximum(rows.temperature_B, smallest))
    scaled_BV = jnp.maximum(distance_BV / temperature_B[:, None], jnp.finfo(jnp.float32).min)
    # A greedy row asks for no set, so that it never costs its neighbours the sort.
    top_k_B = jnp.where(greedy_B, 0, rows.top_k_B)
    kept_BV = kept(scaled_BV, top_k_B, jnp.where(greedy_B, 1.0, rows.top_p_B))
    noise_BV = jax.vmap(gumbel, in_axes=(0, 0, 0, None))(
        rows.seed_B2, rows.sample_B, rows.position_B, logits_BV.shape[1]
    )
    return jnp.where(
        greedy_B, argmax(logits_BV), argmax(jnp.where(kept_BV, scaled_BV + noise_BV, -jnp.inf))
    )


def gumbel(seed_2: jax.Array, sample_index: jax.Array, position: jax.Array, V: int) -> jax.Array:
    """Returns float32 [V] Gumbel noise of one token of one request."""
    key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return jax.random.gumbel(key, (V,), jnp.float32)


def kept(scaled_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Returns bool [B, V]: the tokens that top-k and top-p both keep.

    top-p keeps the smallest set whose probability reaches p, after top-k has been renormalised.
    Exact: the head of the order comes from `top_k`, and where a row's set may reach beyond it the
    whole vocabulary is sorted. Either order has the lowest id first among equal logits.
    """
    V = scaled_BV.shape[1]
    C = min(CANDIDATES, V)
    full_B = jax.scipy.special.logsumexp(scaled_BV, axis=-1)
    off_B = ((top_k_B <= 0) | (top_k_B >= V)) & (top_p_B >= 1.0)
    k_B = jnp.where((top_k_B <= 0) | (top_k_B > V), V, top_k_B)
    id_V = jnp.arange(V, dtype=jnp.int32)

    def last_of(sorted_BC, id_BC):
        """The last logit kept and its id, from each row's highest; right if `complete_B`."""
        index_C = jnp.arange(sorted_BC.shape[1], dtype=jnp.int32)
        in_k_BC = index_C[None] < k_B[:, None]
        mass_BC = jnp.where(in_k_BC, jnp.exp(sorted_BC - full_B[:, None]), 0.0)
        total_B = jnp.where(k_B < V, mass_BC.sum(axis=-1), 1.0)
        before_BC = jnp.cumsum(mass_BC, axis=-1) - mass_BC
        kept_BC = in_k_BC & (before_BC < (top_p_B * total_B)[:, None])
        kept_BC = kept_BC | (in_k_BC & (top_p_B >= 1.0)[:, None])
        last_B1 = jnp.maximum(kept_BC.sum(axis=-1, keepdims=True) - 1, 0)
        # Beyond the candidates lies more of top-k's mass, or perhaps more of top-p's set.
        complete_B = (k_B <= sorted_BC.shape[1]) | ((k_B == V) & ~kept_BC[:, -1])
        floor_B = jnp.take_along_axis(sorted_BC, last_B1, axis=1)[:, 0]
        return floor_B, jnp.take_along_axis(id_BC, last_B1, axis=1)[:, 0], complete_B

    floor_B, last_id_B, complete_B = last_of(*jax.lax.top_k(scaled_BV, C))

    def sort_all(_):
        id_BV = jnp.broadcast_to(id_V[None], scaled_BV.shape)
        falling_BV, id_BV = jax.lax.sort((-scaled_BV, id_BV), num_keys=1, is_stable=True)
        return last_of(-falling_BV, id_BV)[:2]

    floor_B, last_id_B = jax.lax.cond(
        jnp.all(complete_B | off_B), lambda head: head, sort_all, (floor_B, last_id_B)
    )
    tied_BV = (scaled_BV == floor_B[:, None]) & (id_V[None] <= last_id_B[:, None])
    return (scaled_BV > floor_B[:, None]) | tied_BV | off_B[:, None]


def logprobs_of(logits_BV: jax.Array, token_B: jax.Array) -> Logprobs:
    """Returns the raw log-probabilities of `token_B` and of each row's most likely tokens."""
    total_B = jax.scipy.special.logsumexp(logits_BV, axis=-1)
    own_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
    rank_B = 1 + jnp.sum(logits_BV > own_B[:, None], axis=-1, dtype=jnp.int32)
    top_BC, id_BC = jax.lax.top_k(logits_BV, min(TOP_LOGPROBS, logits_BV.shape[1]))
    return Logprobs(own_B - total_B, rank_B, id_BC.astype(jnp.int32), top_BC - total_B[:, None])

# SPDX-License-Identifier: Apache-2.0
"""The online softmax that all attention shares: block by block, without a second look.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (arXiv 1805.02867).

Letters: X queries, S cells of a block, V numbers of a value.
"""

import jax
import jax.numpy as jnp

# Below any logit, and finite: a difference of two of them is 0, not NaN.
LOWEST = -1e30


def softmax_step(
    high_X1: jax.Array, total_X1: jax.Array, logits_XS: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (high_X1, total_X1, keep_X1, weight_XS) after one more block of logits.

    `keep_X1` is what sums of values before it are multiplied by. Where nothing is seen logits are
    LOWEST or near it: LOWEST - LOWEST would weigh 1, so those weigh 0.
    """
    now_X1 = jnp.maximum(high_X1, jnp.max(logits_XS, axis=1, keepdims=True))
    weight_XS = jnp.where(logits_XS > LOWEST / 2, jnp.exp(logits_XS - now_X1), 0.0)
    keep_X1 = jnp.exp(high_X1 - now_X1)
    total_X1 = total_X1 * keep_X1 + jnp.sum(weight_XS, axis=1, keepdims=True)
    return now_X1, total_X1, keep_X1, weight_XS


def softmax_end(
    sum_XV: jax.Array, high_X1: jax.Array, total_X1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_XV, lse_X1) of the sums of all blocks: 0 and LOWEST of a query without any."""
    is_any_X1, least_X1 = total_X1 > 0, jnp.maximum(total_X1, 1e-30)
    out_XV = jnp.where(is_any_X1, sum_XV / least_X1, 0.0)
    return out_XV, jnp.where(is_any_X1, high_X1 + jnp.log(least_X1), LOWEST)

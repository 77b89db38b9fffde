# SPDX-License-Identifier: Apache-2.0
"""Latent attention: absorbed weights equal the expanded form, and what its cells hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.kv import empty_pool, kv_layout
from engine.models.decoder import LayerData, after_attention, before_attention
from engine.models.oracle import dense_attend
from engine.models.rope import rope_tables
from engine.models.specs import layer_specs
from pallas_kernels.paged_attention import NO_WINDOW
from tests.engine.conftest import golden

TOKENS = 9


def layer_of(arch, seed):
    """Returns (config, random parameters of layer 0, x_TD) of a tiny checkpoint's sizes."""
    config = golden(arch).model_config
    rng = np.random.default_rng(seed)
    specs = layer_specs(config, np.dtype(np.float32), 0)
    params = {
        name: jnp.asarray(rng.normal(0, 0.3, spec.shape), jnp.float32)
        for name, spec in specs.items()
    }
    return config, params, jnp.asarray(rng.normal(0, 1, (TOKENS, config.width)), jnp.float32)


def by_hand(x, p, config, cos, sin):
    """Returns the layer's output in float64 for keys and values of every head, by definition."""
    p = {name: np.asarray(weight, np.float64) for name, weight in p.items()}
    latent, N = config.latent, config.query_heads

    def norm(y, weight, eps):
        return y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + eps) * weight

    def turned(y):  # [T, heads, 2X]
        a, b = np.split(y, 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    h = norm(x, p["attention_norm"], config.norm_eps)
    if latent.query_rank is None:
        query = h @ p["q"].T
    else:
        query = norm(h @ p["q_down"].T, p["q_norm"], latent.norm_eps) @ p["q_up"].T
    query = query.reshape(len(x), N, -1)
    down = h @ p["kv_down"].T
    c, shared = np.split(down, [latent.rank], axis=-1)
    c, shared = norm(c, p["kv_norm"], latent.norm_eps), turned(shared[:, None])
    plain, rotated = np.split(query, [latent.plain_width], axis=-1)
    out = np.zeros((len(x), N, latent.value_width))
    for n in range(N):
        key = np.concatenate([c @ p["k_up"][n].T, shared[:, 0]], axis=-1)
        asked = np.concatenate([plain[:, n], turned(rotated)[:, n]], axis=-1)
        scores = asked @ key.T * config.attention_scale
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:, n] = weights @ (c @ p["v_up"][n].T)
    return out.reshape(len(x), -1) @ p["o"].T


@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v3"])
def test_absorbed_weights_equal_the_expanded_form(own_cache, arch):
    for seed in range(3):
        config, params, x_TD = layer_of(arch, seed)
        params["down"] = jnp.zeros_like(params["down"])  # no feed-forward
        position_T = jnp.arange(3, 3 + TOKENS, dtype=jnp.int32)
        length_T = jnp.full_like(position_T, 3 + TOKENS)
        cos, sin = (
            tables[0]
            for tables in rope_tables(config.ropes, config.rope_width, position_T, length_T)
        )
        expected = by_hand(np.asarray(x_TD, np.float64), params, config, cos, sin)
        for expand in (True, False):
            heads = before_attention(x_TD, params, config, cos, sin, expand)
            if not expand:
                assert heads.v_TKY is None and heads.k_TKH.shape[1] == 1
                heads = heads._replace(v_TKY=heads.k_TKH[..., : config.latent.rank])
            layer = LayerData(window=NO_WINDOW, rope=0, group=0, place=0, number=0)
            _, out_TNY = dense_attend(config, None)(None, layer, heads)
            valid_T = jnp.ones(TOKENS, bool)
            out_TD = after_attention(x_TD, out_TNY, valid_T, params, config, expand)[0] - x_TD
            np.testing.assert_allclose(out_TD, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v3"])
def test_cells_hold_the_latent_and_the_shared_key(own_cache, arch):
    llm = golden(arch)
    config, layout = llm.model_config, llm.built.factory.cfg.layout
    numbers = config.latent.rank + config.latent.rope_width
    pages = llm.built.factory.num_pages
    pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.worker.state.pool))
    assert pool_bytes == pages * layout.page_size * config.num_layers * numbers * 4
    half = kv_layout(config, 16, np.dtype(jnp.bfloat16))
    pool = empty_pool(half, 5, stacked=True)
    assert pool.nbytes == 5 * half.page_bytes == 5 * 16 * config.num_layers * numbers * 2

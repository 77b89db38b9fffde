# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model, as they follow from what it is made of.

Matrices are [out, in], as checkpoints have them, heads folded into one axis: XLA's CPU backend
would transpose a matrix of three axes at every step. Those of experts are [expert, in, out], as
grouped products take them.
"""

import numpy as np

from engine.models.config import Experts, Latent, ModelConfig
from sharding import Spec

F32 = np.dtype(np.float32)  # of norms, and of what routing depends on
I32 = np.dtype(np.int32)


def layer_specs(config: ModelConfig, dtype: np.dtype, layer: int = 0) -> dict[str, Spec]:
    """Returns one layer's parameters."""
    norm = Spec((config.width,), ("width",), F32)
    specs: dict[str, Spec] = {}
    if config.pre_norms:
        specs |= {"attention_norm": norm, "mlp_norm": norm}
    if config.post_norms:
        specs |= {"post_attention_norm": norm, "post_mlp_norm": norm}
    if config.latent is not None:
        specs |= latent_specs(config, config.latent, dtype)
    else:
        specs |= attention_specs(config, dtype)
    if config.experts is not None and config.has_experts(layer):
        return specs | expert_specs(config, config.experts, dtype)
    return specs | mlp_specs(config, dtype)


def attention_specs(config: ModelConfig, dtype: np.dtype) -> dict[str, Spec]:
    """Returns the parameters of grouped-query attention."""
    D, H = config.width, config.head_width
    NH, KH = config.query_heads * H, config.kv_heads * H
    specs = {
        "q": Spec((NH, D), ("query_heads", "width"), dtype),
        "k": Spec((KH, D), ("kv_heads", "width"), dtype),
        "v": Spec((KH, D), ("kv_heads", "width"), dtype),
        "o": Spec((D, NH), ("width", "query_heads"), dtype),
    }
    if config.qkv_bias:
        specs["q_bias"] = Spec((NH,), ("query_heads",), dtype)
        specs["k_bias"] = Spec((KH,), ("kv_heads",), dtype)
        specs["v_bias"] = Spec((KH,), ("kv_heads",), dtype)
    if config.output_bias:
        specs["o_bias"] = Spec((D,), ("width",), dtype)
    if config.qk_norm == "head":
        specs |= dict.fromkeys(("q_norm", "k_norm"), Spec((H,), (None,), F32))
    if config.qk_norm == "whole":
        specs["q_norm"] = Spec((NH,), ("query_heads",), F32)
        specs["k_norm"] = Spec((KH,), ("kv_heads",), F32)
    if config.sinks:
        specs["sinks"] = Spec((config.query_heads,), ("query_heads",), F32)
    return specs


def latent_specs(config: ModelConfig, latent: Latent, dtype: np.dtype) -> dict[str, Spec]:
    """Returns the parameters of latent attention."""
    D, N, R = config.width, config.query_heads, latent.rank
    query = N * (latent.plain_width + latent.rope_width)
    specs = {
        "kv_down": Spec((latent.cell_width, D), (None, "width"), dtype),
        "kv_norm": Spec((R,), (None,), F32),
        "k_up": Spec((N, latent.plain_width, R), ("query_heads", None, None), dtype),
        "v_up": Spec((N, latent.value_width, R), ("query_heads", None, None), dtype),
        "o": Spec((D, N * latent.value_width), ("width", "query_heads"), dtype),
    }
    if latent.query_rank is None:
        return specs | {"q": Spec((query, D), ("query_heads", "width"), dtype)}
    return specs | {
        "q_down": Spec((latent.query_rank, D), (None, "width"), dtype),
        "q_norm": Spec((latent.query_rank,), (None,), F32),
        "q_up": Spec((query, latent.query_rank), ("query_heads", None), dtype),
    }


def mlp_specs(config: ModelConfig, dtype: np.dtype) -> dict[str, Spec]:
    """Returns the parameters of a dense feed-forward."""
    D, F = config.width, config.ffn_width
    specs = gated_specs("", F, D, dtype)
    if config.mlp_bias:
        specs["gate_bias"] = specs["up_bias"] = Spec((F,), ("ffn",), dtype)
        specs["down_bias"] = Spec((D,), ("width",), dtype)
    return specs


def gated_specs(prefix: str, ffn: int, width: int, dtype: np.dtype) -> dict[str, Spec]:
    """Returns the three matrices of a gated MLP."""
    return {
        f"{prefix}gate": Spec((ffn, width), ("ffn", "width"), dtype),
        f"{prefix}up": Spec((ffn, width), ("ffn", "width"), dtype),
        f"{prefix}down": Spec((width, ffn), ("width", "ffn"), dtype),
    }


def expert_specs(config: ModelConfig, experts: Experts, dtype: np.dtype) -> dict[str, Spec]:
    """Returns the parameters of a feed-forward of experts."""
    D, E, S, F = config.width, experts.count, experts.places, experts.width
    specs = {
        "router": Spec((E, D), (None, "width"), dtype),
        "experts_gate": Spec((S, D, F), ("experts", "width", "expert_ffn"), dtype),
        "experts_up": Spec((S, D, F), ("experts", "width", "expert_ffn"), dtype),
        "experts_down": Spec((S, F, D), ("experts", "expert_ffn", "width"), dtype),
    }
    if experts.slots:
        specs["expert_slots"] = Spec((E, experts.most_copies), (None, None), I32)
        specs["expert_copies"] = Spec((E,), (None,), I32)
    if experts.router_bias:
        specs["router_bias"] = Spec((E,), (None,), F32)
    if experts.correction:
        specs["router_correction"] = Spec((E,), (None,), F32)
    if experts.biases:
        bias = Spec((S, F), ("experts", "expert_ffn"), dtype)
        specs |= {"experts_gate_bias": bias, "experts_up_bias": bias}
        specs["experts_down_bias"] = Spec((S, D), ("experts", "width"), dtype)
    if experts.shared_width:
        specs |= gated_specs("shared_", experts.shared_width, D, dtype)
    if experts.shared_gate:
        specs["gate_of_shared"] = Spec((1, D), (None, "width"), dtype)
    return specs


def outer_specs(config: ModelConfig, dtype: np.dtype) -> dict[str, Spec]:
    """Returns the parameters outside the layers."""
    V, D = config.vocab_size, config.width
    specs = {
        "embedding": Spec((V, D), ("vocab", "width"), dtype, by_rows=True),
        "final_norm": Spec((D,), ("width",), F32),
    }
    if not config.tied_embeddings:
        specs["head"] = Spec((V, D), ("vocab", "width"), dtype)
    return specs

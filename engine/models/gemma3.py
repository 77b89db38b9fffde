# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 (text): windowed and full layers with their own ropes, sandwich norms, q/k norms."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models.config import ModelConfig
from engine.models.family import Family, Names, first_id, ids_of, required, rope_from_hf

HF_LAYERS = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def plus_one(weight: np.ndarray) -> np.ndarray:
    """Returns 1 + weight in float32: Hugging Face stores Gemma's norms as w - 1."""
    return weight.astype(np.float32) + 1


def layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Returns each layer's attention type, from `layer_types` or the older pattern key."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    full, sliding = "full_attention", "sliding_attention"
    return [full if (layer + 1) % pattern == 0 else sliding for layer in range(layers)]


def ropes(config: Mapping[str, Any]):
    """Returns (full rope, sliding rope) from nested `rope_parameters` or the older keys."""
    nested = config.get("rope_parameters") or {}
    if "full_attention" in nested:
        return tuple(
            rope_from_hf(config, nested[kind]) for kind in ("full_attention", "sliding_attention")
        )
    local = {"rope_theta": config.get("rope_local_base_freq") or 10000.0}
    full = {**config, "rope_theta": config.get("rope_theta") or 1e6}
    return rope_from_hf(full, nested or None), rope_from_hf({}, local)


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face gemma3_text config, old or new keys."""
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: a decoder is causal")
    layers = required(config, "num_hidden_layers")
    types = layer_types(config, layers)
    window = required(config, "sliding_window")
    width = required(config, "hidden_size")
    return ModelConfig(
        family="gemma3",
        vocab_size=required(config, "vocab_size"),
        width=width,
        ffn_width=required(config, "intermediate_size"),
        num_layers=layers,
        query_heads=required(config, "num_attention_heads"),
        kv_heads=required(config, "num_key_value_heads"),
        head_width=config.get("head_dim") or 256,
        max_position=config.get("max_position_embeddings") or 131072,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation="gelu_tanh",
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        ropes=ropes(config),
        rope_of_layer=tuple(int(kind == "sliding_attention") for kind in types),
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        attention_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        embedding_scale=width**0.5,
        qk_norm=True,
        post_norms=True,
        attention_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
        bos_id=first_id(config.get("bos_token_id")),
        eos_ids=ids_of(config.get("eos_token_id")),
    )


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a Hugging Face folder."""
    norms = [name for name in HF_LAYERS if name.endswith("norm")]
    layers = {
        name: (f"model.layers.{{layer}}.{tensor}", plus_one if name in norms else None)
        for name, tensor in HF_LAYERS.items()
    }
    outer = {
        "embedding": ("model.embed_tokens.weight", None),
        "final_norm": ("model.norm.weight", plus_one),
    }
    if not config.tied_embeddings:
        outer["head"] = ("lm_head.weight", None)
    return Names(outer, layers)


FAMILY = Family("gemma3", ("gemma3_text",), from_hf, None, names)

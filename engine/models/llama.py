# SPDX-License-Identifier: Apache-2.0
"""The Llama family (Llama, SmolLM2 and others that keep the architecture)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models.config import ModelConfig
from engine.models.family import (
    Conversions,
    Family,
    Names,
    Transform,
    gguf_names,
    hf_names,
    sizes_from_gguf,
    sizes_from_hf,
    sizes_to_hf,
)
from engine.models.rope_keys import (
    rope_from_gguf,
    rope_from_hf,
    rope_to_hf,
    rotary_width,
    rotary_width_from_gguf,
)
from engine.models.values import choice, flag

HF_LAYERS = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
GGUF_LAYERS = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face llama config, old or new keys."""
    return ModelConfig(
        family="llama",
        **plain_from_hf(config, max_position=2048),
        qkv_bias=flag(config, "attention_bias", False),
        output_bias=flag(config, "attention_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
    )


def plain_from_hf(config: Mapping[str, Any], *, max_position: int) -> dict[str, Any]:
    """Returns the fields of a decoder with SwiGLU, one rope, full attention and no extra norms.

    `max_position` holds where the config has none.
    """
    choice(config, "hidden_act", "silu", ["silu"])
    sizes = sizes_from_hf(config, max_position=max_position)
    sizes["tied_embeddings"] = flag(config, "tie_word_embeddings", False)
    rope = config.get("rope_parameters")
    width = rotary_width(config, rope, sizes["head_width"])
    return plain(sizes, width) | {"ropes": (rope_from_hf(config, rope),)}


def plain(sizes: dict[str, Any], rotary: int) -> dict[str, Any]:
    """Returns `sizes` with what such a decoder has in every layer; `rotary` of a head turns."""
    return sizes | {
        "rotary_width": None if rotary == sizes["head_width"] else rotary,
        "activation": "silu",
        "rope_of_layer": (0,) * sizes["num_layers"],
        "windows": (None,) * sizes["num_layers"],
        "attention_scale": sizes["head_width"] ** -0.5,
    }


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json of a llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **plain_to_hf(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def plain_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `plain_from_hf` reads."""
    rope = rope_to_hf(config.ropes[0])
    if config.rotary_width is not None:
        rope["partial_rotary_factor"] = config.rotary_width / config.head_width
    return {**sizes_to_hf(config), "hidden_act": "silu", "rope_parameters": rope}


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file's metadata (architecture "llama")."""
    return ModelConfig(family="llama", **plain_from_gguf(meta, "llama"))


def plain_from_gguf(meta: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the same fields as `plain_from_hf`, of a GGUF file's metadata."""
    rope = rope_from_gguf(meta, architecture, theta=10000.0)
    sizes = sizes_from_gguf(meta, architecture)
    width = rotary_width_from_gguf(meta, architecture, sizes["head_width"])
    return plain(sizes, width) | {"ropes": (rope,)}


def unpermute(heads: int) -> Transform:
    """Returns the transform that undoes GGUF's reordering of the rows of q and k, or their biases.

    GGUF pairs coordinates (2i, 2i+1) of a head for rope; the decoder rotates (i, i + H/2).
    """

    def transform(weight: np.ndarray) -> np.ndarray:
        pairs = weight.reshape(heads, len(weight) // heads // 2, 2, *weight.shape[1:])
        return pairs.swapaxes(1, 2).reshape(weight.shape)

    return transform


def unpermuted(config: ModelConfig) -> Conversions:
    """Returns the conversions of q and k, each by its own heads."""
    by_heads = {
        ("q", "q_bias"): unpermute(config.query_heads),
        ("k", "k_bias"): unpermute(config.kv_heads),
    }
    return {name: (function, None) for names, function in by_heads.items() for name in names}


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind."""
    if kind != "gguf":
        return hf_names(config, HF_LAYERS)
    return gguf_names(config, GGUF_LAYERS, unpermuted(config))


FAMILY = Family("llama", ("llama",), ("llama",), from_hf, names, to_hf, from_gguf)

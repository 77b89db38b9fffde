# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 (text): windowed and full layers with their own ropes, sandwich norms, q/k norms."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models.config import ModelConfig
from engine.models.family import (
    Family,
    Names,
    attention_types,
    gguf_names,
    hf_names,
    sizes_from_gguf,
    sizes_from_hf,
    sizes_to_hf,
)
from engine.models.rope import Rope
from engine.models.rope_keys import metadata_number, rope_from_gguf, rope_from_hf, rope_to_hf
from engine.models.values import choice, count, flag, mapping, number, optional_number, required

FULL, SLIDING = "full_attention", "sliding_attention"
GELU = "gelu_pytorch_tanh"
PERIOD = 6  # every sixth layer attends to all, unless the checkpoint says otherwise
LAYERS_OF_27B = 62

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
GGUF_LAYERS = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}
NORMS = ("final_norm", *(name for name in HF_LAYERS if name.endswith("norm")))


def plus_one(weight: np.ndarray) -> np.ndarray:
    """Returns 1 + weight in float32: Hugging Face stores Gemma's norms as w - 1."""
    return weight.astype(np.float32) + 1


def minus_one(weight: np.ndarray) -> np.ndarray:
    """Returns weight - 1 in float32, what `plus_one` takes."""
    return weight.astype(np.float32) - 1


def layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Returns each layer's attention type, from `layer_types` or the older pattern key."""
    if config.get("layer_types"):
        return attention_types(config["layer_types"], layers)
    older = count(config, "_sliding_window_pattern", PERIOD)
    return periodic(count(config, "sliding_window_pattern", older), layers)


def periodic(period: int, layers: int) -> list[str]:
    """Returns the types of layers of which every `period`th is full."""
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]


def by_layer(types: list[str], window: int) -> dict[str, Any]:
    """Returns the fields that follow from the layers' types; rope 0 is that of full layers."""
    return {
        "rope_of_layer": tuple(int(kind == SLIDING) for kind in types),
        "windows": tuple(window if kind == SLIDING else None for kind in types),
    }


def ropes(config: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Returns (full rope, sliding rope) from nested `rope_parameters` or the older keys."""
    nested = mapping(config, "rope_parameters")
    if FULL in nested:
        required(nested, SLIDING)
        both = (mapping(nested, FULL), mapping(nested, SLIDING))
        return rope_from_hf(config, both[0]), rope_from_hf(config, both[1])
    local = {"rope_theta": number(config, "rope_local_base_freq", 10000.0)}
    full = {**config, "rope_theta": number(config, "rope_theta", 1e6)}
    return rope_from_hf(full, nested or None), rope_from_hf({}, local)


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face gemma3_text config, old or new keys."""
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: a decoder is causal")
    choice(config, "hidden_activation", GELU, [GELU])
    # The text settings of the larger models leave out what transformers has as defaults.
    config = {"vocab_size": 262208, **config}
    sizes = sizes_from_hf(config, max_position=131072, head_width=256)
    types = layer_types(config, sizes["num_layers"])
    return ModelConfig(
        **sizes,
        **by_layer(types, count(config, "sliding_window")),
        **ALWAYS,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        ropes=ropes(config),
        attention_scale=number(config, "query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=sizes["width"] ** 0.5,
        attention_softcap=optional_number(config, "attn_logit_softcapping"),
        logit_softcap=optional_number(config, "final_logit_softcapping"),
    )


ALWAYS: dict[str, Any] = {
    "family": "gemma3",
    "activation": "gelu_tanh",
    "qk_norm": "head",
    "post_norms": True,
}


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json of a gemma3_text."""
    # The scalar is an integer in every published config, and readers expect one where they can.
    scalar = round(config.attention_scale**-2, 6)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **sizes_to_hf(config),
        "hidden_activation": GELU,
        "attention_bias": False,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "layer_types": [SLIDING if rope else FULL for rope in config.rope_of_layer],
        "sliding_window": next((w for w in config.windows if w is not None), config.max_position),
        "rope_parameters": {
            FULL: rope_to_hf(config.ropes[0]),
            SLIDING: rope_to_hf(config.ropes[1]),
        },
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file's metadata (architecture "gemma3").

    The 27B model alone scales its queries by the width per head; the file does not say so.
    """
    sizes = sizes_from_gguf(meta, "gemma3")
    width = sizes["width"]
    is_27b = sizes["num_layers"] == LAYERS_OF_27B
    types = types_from_gguf(meta, "gemma3", PERIOD, sizes["num_layers"])
    return ModelConfig(
        **sizes,
        **by_layer(types, count(meta, "gemma3.attention.sliding_window")),
        **ALWAYS,
        ropes=(
            rope_from_gguf(meta, "gemma3", theta=1e6),
            Rope(metadata_number(meta, "gemma3.rope.freq_base_swa", 10000.0)),
        ),
        attention_scale=(width / sizes["query_heads"] if is_27b else sizes["head_width"]) ** -0.5,
        embedding_scale=width**0.5,
        attention_softcap=optional_number(meta, "gemma3.attn_logit_softcapping"),
        logit_softcap=optional_number(meta, "gemma3.final_logit_softcapping"),
    )


def types_from_gguf(
    meta: Mapping[str, Any], architecture: str, period: int, layers: int
) -> list[str]:
    """Returns the layers' types; `period` holds where the file says nothing of them."""
    key = f"{architecture}.attention.sliding_window_pattern"
    if isinstance(pattern := meta.get(key), list):  # one flag a layer, in newer files
        return [SLIDING if slides else FULL for slides in pattern]
    return periodic(count(meta, key, period), layers)


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind; GGUF stores norms as they multiply."""
    if kind == "gguf":
        return gguf_names(config, GGUF_LAYERS)
    return hf_names(config, HF_LAYERS, dict.fromkeys(NORMS, (plus_one, minus_one)))


FAMILY = Family("gemma3", ("gemma3_text",), ("gemma3",), from_hf, names, to_hf, from_gguf)

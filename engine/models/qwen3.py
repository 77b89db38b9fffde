# SPDX-License-Identifier: Apache-2.0
"""Qwen 3: a llama with norms of each head of q and k, and windows in some layers if so configured.

GGUF files of it keep the rows of q and k in Hugging Face's order.
"""

from collections.abc import Mapping
from typing import Any

from engine.models import llama, qwen2
from engine.models.config import ModelConfig
from engine.models.family import Family, Names, gguf_names, hf_names
from engine.models.values import flag

HEAD_WIDTH = 128  # where the config has none
HF_LAYERS = llama.HF_LAYERS | {
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
GGUF_LAYERS = llama.GGUF_LAYERS | {"q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight"}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face qwen3 config."""
    return ModelConfig(family="qwen3", **fields_from_hf(config))


def fields_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a qwen3 with and without experts share."""
    fields = llama.plain_from_hf({"head_dim": HEAD_WIDTH, **config}, max_position=32768)
    biased = flag(config, "attention_bias", False)
    return fields | {
        "windows": qwen2.windows(config, fields["num_layers"]),
        "qkv_bias": biased,
        "output_bias": biased,
        "qk_norm": "head",
    }


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json of a qwen3."""
    return qwen2.to_hf(config) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": config.qkv_bias,
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file's metadata (architecture "qwen3")."""
    return ModelConfig(family="qwen3", **llama.plain_from_gguf(meta, "qwen3"), qk_norm="head")


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind."""
    return gguf_names(config, GGUF_LAYERS) if kind == "gguf" else hf_names(config, HF_LAYERS)


FAMILY = Family("qwen3", ("qwen3",), ("qwen3",), from_hf, names, to_hf, from_gguf)

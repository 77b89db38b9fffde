# SPDX-License-Identifier: Apache-2.0
"""Phi 3: a llama whose q, k and v, and whose gate and up, are one matrix each.

Longer contexts have LongRoPE; Phi 4 mini rotates a part of each head.
"""

from collections.abc import Mapping
from typing import Any

from engine.models import llama
from engine.models.config import ModelConfig
from engine.models.family import Family, Names, Parts, gguf_names, hf_names
from engine.models.values import count

HF_LAYERS = llama.HF_LAYERS | {
    **dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj.weight"),
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj.weight"),
}
GGUF_LAYERS = llama.GGUF_LAYERS | {
    **dict.fromkeys(("q", "k", "v"), "attn_qkv.weight"),
    **dict.fromkeys(("gate", "up"), "ffn_up.weight"),
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face phi3 config; a window of null is none."""
    fields = llama.plain_from_hf(config, max_position=4096)
    if config.get("sliding_window") is not None:
        fields["windows"] = (count(config, "sliding_window"),) * fields["num_layers"]
    return ModelConfig(family="phi3", **fields)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json of a phi3."""
    rope = config.ropes[0]
    longrope = rope.kind == "longrope"
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **llama.plain_to_hf(config),
        "sliding_window": config.windows[0],
        "original_max_position_embeddings": (
            rope.original_max_position if longrope else config.max_position
        ),
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file's metadata (architecture "phi3"); window 0 is none."""
    fields = llama.plain_from_gguf(meta, "phi3")
    if window := count(meta, "phi3.attention.sliding_window", 0, low=0):
        fields["windows"] = (window,) * fields["num_layers"]
    return ModelConfig(family="phi3", **fields)


def parts(config: ModelConfig) -> Parts:
    """Returns which rows of the joined matrices each parameter is."""
    q, kv = config.query_heads * config.head_width, config.kv_heads * config.head_width
    ffn = config.ffn_width
    rows = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    return rows | {"gate": (0, ffn), "up": (ffn, 2 * ffn)}


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind."""
    if kind == "gguf":
        return gguf_names(config, GGUF_LAYERS, parts=parts(config))
    return hf_names(config, HF_LAYERS, parts=parts(config))


FAMILY = Family("phi3", ("phi3",), ("phi3",), from_hf, names, to_hf, from_gguf)

# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 2.5: a llama with biases on q, k and v, and windows in some layers if so configured.

GGUF files of it keep the rows of q and k in Hugging Face's order.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import ModelConfig
from engine.models.family import Family, Names, attention_types, gguf_names, hf_names
from engine.models.llama import GGUF_LAYERS, HF_LAYERS, plain_from_gguf, plain_from_hf, plain_to_hf
from engine.models.values import count, flag


def windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window: none at all unless `use_sliding_window` is set.

    With it, `layer_types` says which layers slide; in older configs those from
    `max_window_layers` on.
    """
    slides_at_all = flag(config, "use_sliding_window", False)
    if not slides_at_all or config.get("sliding_window", 4096) is None:
        return (None,) * layers
    window = count(config, "sliding_window", 4096)
    if types := config.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in attention_types(types, layers)]
        return tuple(window if s else None for s in slides)
    first = count(config, "max_window_layers", 28, low=0)
    return tuple(window if layer >= first else None for layer in range(layers))


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face qwen2 config, old or new keys."""
    fields = plain_from_hf(config, max_position=32768)
    fields["windows"] = windows(config, fields["num_layers"])
    return ModelConfig(family="qwen2", **fields, qkv_bias=True)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json of a qwen2."""
    slides = [window is not None for window in config.windows]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **plain_to_hf(config),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "use_sliding_window": any(slides),
        "sliding_window": next((w for w in config.windows if w is not None), None),
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file's metadata (architecture "qwen2")."""
    return ModelConfig(family="qwen2", **plain_from_gguf(meta, "qwen2"), qkv_bias=True)


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind."""
    if kind == "gguf":
        return gguf_names(config, GGUF_LAYERS)
    return hf_names(config, HF_LAYERS)


FAMILY = Family("qwen2", ("qwen2",), ("qwen2",), from_hf, names, to_hf, from_gguf)

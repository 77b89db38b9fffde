# SPDX-License-Identifier: Apache-2.0
"""Gemma and Gemma 2 (text): norms kept as w - 1, scaled embeddings, GELU.

Gemma 2 adds windows in every other layer, norms of the outputs, and softcaps.
"""

from collections.abc import Mapping
from typing import Any

from engine.models import gemma3
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
from engine.models.gemma3 import FULL, GELU, NORMS, SLIDING, minus_one, plus_one
from engine.models.rope_keys import metadata_number, rope_from_gguf, rope_from_hf, rope_to_hf
from engine.models.values import choice, count, flag, number, optional_number

LAYERS_OF_27B = 46  # the one Gemma 2 whose queries are scaled by the width per head
FIRST_HF = {name: key for name, key in gemma3.HF_LAYERS.items() if "post" not in name} | {
    "mlp_norm": "post_attention_layernorm.weight"
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face gemma or gemma2 config."""
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: a decoder is causal")
    key = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    choice(config, key, GELU, [GELU, "gelu"])  # the first Gemma's configs say gelu and mean this
    second = config.get("model_type") == "gemma2"
    sizes = sizes_from_hf(config, max_position=8192, head_width=256)
    types = [FULL] * sizes["num_layers"]
    if second:
        types = layer_types(config, sizes["num_layers"])
    scalar = number(config, "query_pre_attn_scalar", 256) if second else sizes["head_width"]
    return ModelConfig(
        **sizes,
        **fields(types, count(config, "sliding_window", 4096) if second else 0, second),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        ropes=(rope_from_hf(config, config.get("rope_parameters")),),
        attention_scale=scalar**-0.5,
        embedding_scale=sizes["width"] ** 0.5,
        attention_softcap=optional_number(config, "attn_logit_softcapping") if second else None,
        logit_softcap=optional_number(config, "final_logit_softcapping") if second else None,
    )


def layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Returns each layer's attention type: the even ones slide, unless the config lists them."""
    if config.get("layer_types"):
        return attention_types(config["layer_types"], layers)
    return gemma3.periodic(2, layers)


def fields(types: list[str], window: int, second: bool) -> dict[str, Any]:
    """Returns the fields that follow from the layers' types and the generation."""
    return {
        "family": "gemma2" if second else "gemma",
        "activation": "gelu_tanh",
        "post_norms": second,
        "rope_of_layer": (0,) * len(types),
        "windows": tuple(window if kind == SLIDING else None for kind in types),
    }


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json of a gemma or a gemma2."""
    second = config.family == "gemma2"
    shared = {
        "architectures": ["Gemma2ForCausalLM" if second else "GemmaForCausalLM"],
        "model_type": config.family,
        **sizes_to_hf(config),
        "attention_bias": False,
        "hidden_activation": GELU,
        "rope_parameters": rope_to_hf(config.ropes[0]),
    }
    if not second:
        return shared | {"hidden_act": GELU}
    scalar = round(config.attention_scale**-2, 6)
    return shared | {
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "layer_types": [FULL if window is None else SLIDING for window in config.windows],
        "sliding_window": next((w for w in config.windows if w is not None), config.max_position),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file's metadata (architecture "gemma" or "gemma2").

    The 27B model alone scales its queries by the width per head; the file does not say so.
    """
    architecture = meta["general.architecture"]
    second = architecture == "gemma2"
    sizes = sizes_from_gguf(meta, architecture)
    layers, width = sizes["num_layers"], sizes["width"]
    types = gemma3.types_from_gguf(meta, architecture, 2 if second else 1, layers)
    window = count(meta, "gemma2.attention.sliding_window", 4096) if second else 0
    is_27b = second and layers == LAYERS_OF_27B
    scale = (width / sizes["query_heads"] if is_27b else sizes["head_width"]) ** -0.5
    return ModelConfig(
        **sizes,
        **fields(types, window, second),
        ropes=(rope_from_gguf(meta, architecture, theta=10000.0),),
        attention_scale=scale,
        embedding_scale=width**0.5,
        attention_softcap=softcap(meta, "attn", 50.0) if second else None,
        logit_softcap=softcap(meta, "final", 30.0) if second else None,
    )


def softcap(meta: Mapping[str, Any], which: str, default: float) -> float:
    """Returns a softcap of a Gemma 2; older files do not name it."""
    return metadata_number(meta, f"gemma2.{which}_logit_softcapping", default)


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind; GGUF stores norms as they multiply."""
    if kind == "gguf":
        return gguf_names(config, gemma3.GGUF_LAYERS)
    layers = gemma3.HF_LAYERS if config.family == "gemma2" else FIRST_HF
    return hf_names(config, layers, dict.fromkeys(NORMS, (plus_one, minus_one)))


FAMILY = Family(
    "gemma2", ("gemma", "gemma2"), ("gemma", "gemma2"), from_hf, names, to_hf, from_gguf
)

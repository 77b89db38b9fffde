# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: sinks, windows in every other layer, experts with biases and a clamped activation.

The gate's and the up's columns of an expert alternate in one tensor.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models import gemma3, llama
from engine.models.config import Experts, ModelConfig
from engine.models.family import (
    MOST_EXPERTS,
    Family,
    Names,
    attention_types,
    hf_names,
    sizes_from_hf,
)
from engine.models.mixtral import all_layers
from engine.models.rope_keys import rope_from_hf
from engine.models.values import count, flag, number

EXPERTS = "mlp.experts."
HF_LAYERS = {
    **{name: key for name, key in llama.HF_LAYERS.items() if "mlp." not in key},
    "sinks": "self_attn.sinks",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "experts_gate": EXPERTS + "gate_up_proj",
    "experts_up": EXPERTS + "gate_up_proj",
    "experts_down": EXPERTS + "down_proj",
    "experts_gate_bias": EXPERTS + "gate_up_proj_bias",
    "experts_up_bias": EXPERTS + "gate_up_proj_bias",
    "experts_down_bias": EXPERTS + "down_proj_bias",
}
PARTS = {
    "experts_gate": "gate",
    "experts_up": "up",
    "experts_gate_bias": "gate",
    "experts_up_bias": "up",
}


def even(weight: np.ndarray) -> np.ndarray:
    """Returns the columns of the gate."""
    return weight[..., ::2]


def odd(weight: np.ndarray) -> np.ndarray:
    """Returns the columns of the up."""
    return weight[..., 1::2]


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face gpt_oss config."""
    sizes = sizes_from_hf(config, max_position=131072, head_width=64)
    layers = sizes["num_layers"]
    types = config.get("layer_types")
    types = attention_types(types, layers) if types else gemma3.periodic(2, layers)
    window = count(config, "sliding_window", 128)
    biased = flag(config, "attention_bias", True)
    experts = Experts(
        count=count(config, "num_local_experts", most=MOST_EXPERTS),
        chosen=count(config, "num_experts_per_tok"),
        width=sizes["ffn_width"],
        router_bias=True,
        biases=True,
        clamp=number(config, "swiglu_limit", 7.0),
        swish_slope=number(config, "swiglu_alpha", 1.702),
    )
    return ModelConfig(
        family="gpt_oss",
        **sizes,
        activation="silu",
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        ropes=(rope_from_hf(config, config.get("rope_parameters")),),
        rope_of_layer=(0,) * layers,
        windows=tuple(window if kind == gemma3.SLIDING else None for kind in types),
        attention_scale=sizes["head_width"] ** -0.5,
        qkv_bias=biased,
        output_bias=biased,
        sinks=True,
        **all_layers(experts, layers),
    )


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a Hugging Face folder."""
    cuts = {name: (even if part == "gate" else odd, None) for name, part in PARTS.items()}
    return hf_names(config, HF_LAYERS, cuts, PARTS)


FAMILY = Family("gpt_oss", ("gpt_oss",), (), from_hf, names)

# SPDX-License-Identifier: Apache-2.0
"""OLMo 2: norms of the outputs of attention and MLP only, and of q and k as wholes."""

from collections.abc import Mapping
from typing import Any

from engine.models import llama
from engine.models.config import ModelConfig
from engine.models.family import Family, Names, hf_names
from engine.models.values import flag

HF_LAYERS = {name: key for name, key in llama.HF_LAYERS.items() if "norm" not in name} | {
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face olmo2 config."""
    biased = flag(config, "attention_bias", False)
    return ModelConfig(
        family="olmo2",
        **llama.plain_from_hf(config, max_position=2048),
        qkv_bias=biased,
        output_bias=biased,
        qk_norm="whole",
        pre_norms=False,
        post_norms=True,
    )


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a Hugging Face folder."""
    return hf_names(config, HF_LAYERS)


FAMILY = Family("olmo2", ("olmo2",), (), from_hf, names)

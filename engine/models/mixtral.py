# SPDX-License-Identifier: Apache-2.0
"""Mixtral: a mistral whose feed-forward is of experts, their weights normalised over the chosen.

GGUF files call it a llama, with a number of experts.
"""

from collections.abc import Mapping
from typing import Any

from engine.models import llama, mistral
from engine.models.config import Experts, ModelConfig
from engine.models.family import (
    MOST_EXPERTS,
    Family,
    Names,
    gguf_names,
    hf_names,
    transposed,
)
from engine.models.values import count

EXPERT = "block_sparse_moe.experts.{expert}."
HF_LAYERS = llama.HF_LAYERS | {
    "router": "block_sparse_moe.gate.weight",
    "experts_gate": EXPERT + "w1.weight",
    "experts_up": EXPERT + "w3.weight",
    "experts_down": EXPERT + "w2.weight",
}
GGUF_EXPERTS = {
    "router": "ffn_gate_inp.weight",
    "experts_gate": "ffn_gate_exps.weight",
    "experts_up": "ffn_up_exps.weight",
    "experts_down": "ffn_down_exps.weight",
}
MATRICES = ("experts_gate", "experts_up", "experts_down")
TRANSPOSED = dict.fromkeys(MATRICES, (transposed, transposed))


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face mixtral config."""
    dense = mistral.fields_from_hf(config)
    experts = Experts(
        count=count(config, "num_local_experts", most=MOST_EXPERTS),
        chosen=count(config, "num_experts_per_tok"),
        width=dense["ffn_width"],
    )
    return ModelConfig(family="mixtral", **dense, **all_layers(experts, dense["num_layers"]))


def all_layers(experts: Experts, layers: int) -> dict[str, Any]:
    """Returns the fields of a model that has experts in every layer."""
    return {"experts": experts, "expert_layers": (True,) * layers}


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json of a mixtral."""
    assert config.experts is not None, "every mixtral has them"
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **llama.plain_to_hf(config),
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.chosen,
        "sliding_window": config.windows[0],
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file's metadata (architecture "llama", with experts)."""
    dense = llama.plain_from_gguf(meta, "llama")
    experts = experts_from_gguf(meta, "llama", width=dense["ffn_width"])
    return ModelConfig(family="mixtral", **dense, **all_layers(experts, dense["num_layers"]))


def experts_from_gguf(meta: Mapping[str, Any], architecture: str, **more: Any) -> Experts:
    """Returns the experts of a GGUF file; it does not say how weights are normalised."""
    key = f"{architecture}.expert_weights_scale"
    if (scale := meta.get(key)) not in (None, 0, 1):
        raise ValueError(f"{key} {scale!r} is not supported; use a file without it, or with 1")
    return Experts(
        count=count(meta, f"{architecture}.expert_count"),
        chosen=count(meta, f"{architecture}.expert_used_count"),
        **more,
    )


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind."""
    if kind != "gguf":
        return hf_names(config, HF_LAYERS, TRANSPOSED)
    conversions = {**llama.unpermuted(config), **TRANSPOSED}
    return gguf_names(config, llama.GGUF_LAYERS | GGUF_EXPERTS, conversions)


FAMILY = Family("mixtral", ("mixtral",), ("llama with experts",), from_hf, names, to_hf, from_gguf)

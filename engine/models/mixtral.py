# SPDX-License-Identifier: Apache-2.0
"""Mixtral: a mistral whose feed-forward is of experts, their weights normalised over the chosen."""

from collections.abc import Mapping
from typing import Any

from engine.models import llama, mistral
from engine.models.config import Experts, ModelConfig
from engine.models.family import MOST_EXPERTS, Family, Names, hf_names, transposed
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


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind."""
    return hf_names(config, HF_LAYERS, TRANSPOSED)


FAMILY = Family("mixtral", ("mixtral",), (), from_hf, names)

# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and Qwen 3 with experts: some layers may be dense; Qwen 2 has a gated shared expert."""

from collections.abc import Mapping
from typing import Any

from engine.models import llama, qwen2, qwen3
from engine.models.config import Experts, ModelConfig
from engine.models.family import MOST_EXPERTS, Family, Names, hf_names
from engine.models.mixtral import TRANSPOSED
from engine.models.values import count, flag, indices

EXPERT = "mlp.experts.{expert}."
HF_EXPERTS = {
    "router": "mlp.gate.weight",
    "experts_gate": EXPERT + "gate_proj.weight",
    "experts_up": EXPERT + "up_proj.weight",
    "experts_down": EXPERT + "down_proj.weight",
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "gate_of_shared": "mlp.shared_expert_gate.weight",
}


def expert_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Returns which layers have experts: every `decoder_sparse_step`th, but the dense ones."""
    step = count(config, "decoder_sparse_step", 1)
    dense = indices(config, "mlp_only_layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def experts_from_hf(config: Mapping[str, Any], **more: Any) -> Experts:
    """Returns the experts of a config, whose count has two spellings."""
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    return Experts(
        count=count(config, key, most=MOST_EXPERTS),
        chosen=count(config, "num_experts_per_tok"),
        width=count(config, "moe_intermediate_size"),
        normalize=flag(config, "norm_topk_prob", False),
        **more,
    )


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face qwen2_moe or qwen3_moe config."""
    second = config.get("model_type") == "qwen2_moe"
    if second:
        fields = llama.plain_from_hf(config, max_position=32768)
        fields["windows"] = qwen2.windows(config, fields["num_layers"])
        fields["qkv_bias"] = flag(config, "qkv_bias", True)
        width = count(config, "shared_expert_intermediate_size")
        experts = experts_from_hf(config, shared_width=width, shared_gate=True)
    else:
        fields = qwen3.fields_from_hf(config)
        experts = experts_from_hf(config)
    return ModelConfig(
        family="qwen2_moe" if second else "qwen3_moe",
        **fields,
        experts=experts,
        expert_layers=expert_layers(config, fields["num_layers"]),
    )


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind."""
    return hf_names(config, qwen3.HF_LAYERS | HF_EXPERTS, TRANSPOSED)


FAMILY = Family("qwen_moe", ("qwen2_moe", "qwen3_moe"), (), from_hf, names)

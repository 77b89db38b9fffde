# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and Qwen 3 with experts: some layers may be dense; Qwen 2 has a gated shared expert.

In GGUF files every layer has experts.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models import llama, mixtral, qwen2, qwen3
from engine.models.config import Experts, ModelConfig
from engine.models.family import MOST_EXPERTS, Family, Names, gguf_names, hf_names
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
GGUF_EXPERTS = mixtral.GGUF_EXPERTS | {
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "gate_of_shared": "ffn_gate_inp_shexp.weight",
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


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns config.json of a qwen2_moe or qwen3_moe."""
    experts = config.experts
    assert experts is not None, "every one of them has some"
    shared = {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n, routed in enumerate(config.expert_layers) if not routed],
    }
    if config.family == "qwen3_moe":
        names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        return qwen3.to_hf(config) | names | shared
    return qwen2.to_hf(config) | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "qkv_bias": config.qkv_bias,
        "shared_expert_intermediate_size": experts.shared_width,
        **shared,
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file (architecture "qwen2moe" or "qwen3moe").

    The weights of Qwen 3's chosen experts are normalised, those of Qwen 2's are not.
    """
    architecture = meta["general.architecture"]
    second = architecture == "qwen2moe"
    fields = llama.plain_from_gguf(meta, architecture)
    ffn, chosen = fields["ffn_width"], count(meta, f"{architecture}.expert_used_count")
    more: dict[str, Any] = {
        "width": count(meta, f"{architecture}.expert_feed_forward_length", ffn // chosen),
        "normalize": not second,
    }
    if second:
        shared = count(meta, f"{architecture}.expert_shared_feed_forward_length", ffn)
        more |= {"shared_width": shared, "shared_gate": True}
        fields["qkv_bias"] = True
    else:
        fields["qk_norm"] = "head"
    experts = mixtral.experts_from_gguf(meta, architecture, **more)
    return ModelConfig(
        family="qwen2_moe" if second else "qwen3_moe",
        **fields,
        **mixtral.all_layers(experts, fields["num_layers"]),
    )


def row(weight: np.ndarray) -> np.ndarray:
    """Returns a vector as the one row of a matrix."""
    return weight.reshape(1, -1)


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind."""
    if kind != "gguf":
        return hf_names(config, qwen3.HF_LAYERS | HF_EXPERTS, TRANSPOSED)
    conversions = TRANSPOSED | {"gate_of_shared": (row, None)}
    return gguf_names(config, qwen3.GGUF_LAYERS | GGUF_EXPERTS, conversions)


FAMILY = Family(
    "qwen_moe",
    ("qwen2_moe", "qwen3_moe"),
    ("qwen2moe", "qwen3moe"),
    from_hf,
    names,
    to_hf,
    from_gguf,
)

# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3: latent attention, dense layers first, then groups of experts and shared ones.

Checkpoints pair coordinates (2i, 2i + 1) for rope; the decoder rotates (i, i + half), so the rows
of what is rotated are reordered at load. Weights of multi-token prediction are recognised and left.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models import llama, qwen_moe
from engine.models.config import Experts, Latent, ModelConfig
from engine.models.family import MOST_EXPERTS, Family, Names, Transform, hf_names, sizes_from_hf
from engine.models.mixtral import TRANSPOSED
from engine.models.rope_keys import ROPE, rope_from_hf, rope_settings, yarn_scale
from engine.models.values import choice, count, flag, number

HF_LAYERS = {
    **{name: key for name, key in llama.HF_LAYERS.items() if not name.endswith("bias")},
    **qwen_moe.HF_EXPERTS,
    "q_down": "self_attn.q_a_proj.weight",
    "q_norm": "self_attn.q_a_layernorm.weight",
    "q_up": "self_attn.q_b_proj.weight",
    "kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    "k_up": "self_attn.kv_b_proj.weight",
    "v_up": "self_attn.kv_b_proj.weight",
    "router_correction": "mlp.gate.e_score_correction_bias",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face deepseek_v2 or deepseek_v3 config."""
    third = config.get("model_type") == "deepseek_v3"
    choice(config, "hidden_act", "silu", ["silu"])
    if flag(config, "attention_bias", False):
        raise ValueError("attention_bias of latent attention is not supported")
    latent = latent_from_hf(config)
    head_width = latent.plain_width + latent.rope_width
    sizes = sizes_from_hf(config, max_position=2048, head_width=head_width)
    layers = sizes["num_layers"]
    sizes |= {"kv_heads": sizes["query_heads"], "head_width": head_width}
    first = count(config, "first_k_dense_replace", 0, low=0)
    step = count(config, "moe_layer_freq", 1)
    routed = count(config, "n_routed_experts", 0, low=0, most=MOST_EXPERTS)
    kinds = tuple(bool(routed) and n >= first and n % step == 0 for n in range(layers))
    return ModelConfig(
        family="deepseek_v3" if third else "deepseek_v2",
        **sizes,
        activation="silu",
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        ropes=(rope_from_hf(config, config.get("rope_parameters")),),
        rope_of_layer=(0,) * layers,
        windows=(None,) * layers,
        attention_scale=attention_scale(config, sizes["head_width"]),
        rotary_width=latent.rope_width,
        latent=latent,
        experts=experts_from_hf(config, third) if routed else None,
        expert_layers=kinds if routed else (),
    )


def latent_from_hf(config: Mapping[str, Any]) -> Latent:
    """Returns the sizes of latent attention."""
    return Latent(
        rank=count(config, "kv_lora_rank"),
        rope_width=count(config, "qk_rope_head_dim"),
        plain_width=count(config, "qk_nope_head_dim"),
        value_width=count(config, "v_head_dim"),
        query_rank=None if config.get("q_lora_rank") is None else count(config, "q_lora_rank"),
    )


def attention_scale(config: Mapping[str, Any], head_width: int) -> float:
    """Returns what logits are multiplied by: with YaRN, its temperature squared is part of it."""
    settings = rope_settings(config, config.get("rope_parameters"))
    if settings["rope_type"] != "yarn" or not settings.get("mscale_all_dim"):
        return head_width**-0.5
    factor, weight = (number(settings, key, owner=ROPE) for key in ("factor", "mscale_all_dim"))
    return head_width**-0.5 * yarn_scale(factor, weight) ** 2


def experts_from_hf(config: Mapping[str, Any], third: bool) -> Experts:
    """Returns the experts; V3 chooses by sigmoids and a correction, V2 by `topk_method`."""
    width = count(config, "moe_intermediate_size")
    methods = ("greedy", "group_limited_greedy", "noaux_tc")
    method = choice(config, "topk_method", "noaux_tc" if third else "greedy", methods)
    if third != (method == "noaux_tc"):
        raise ValueError(f"topk_method {method!r} does not go with {config.get('model_type')}")
    kinds = ("softmax", "sigmoid")
    scoring = choice(config, "scoring_func", "sigmoid" if third else "softmax", kinds)
    normalize = flag(config, "norm_topk_prob", third)
    scale = number(config, "routed_scaling_factor", 1.0)
    grouped = method != "greedy"
    return Experts(
        count=count(config, "n_routed_experts", most=MOST_EXPERTS),
        chosen=count(config, "num_experts_per_tok"),
        width=width,
        scoring=scoring,
        normalize=normalize,
        # V2 scales the weights that it does not normalise.
        scale=1.0 if normalize and not third else scale,
        groups=count(config, "n_group", 1) if grouped else 1,
        chosen_groups=count(config, "topk_group", 1) if grouped else 1,
        group_best=2 if third else 1,
        correction=third,
        shared_width=width * count(config, "n_shared_experts", 0, low=0, most=MOST_EXPERTS),
    )


def halves(rows: int, rotated: int) -> np.ndarray:
    """Returns the order of one head's rows: those not rotated, then the even, then the odd ones."""
    first = rows - rotated
    turned = np.arange(first, rows).reshape(-1, 2)
    return np.concatenate([np.arange(first), turned[:, 0], turned[:, 1]])


def reorder(heads: int, rotated: int) -> tuple[Transform, Transform]:
    """Returns the transform of a matrix whose heads end in rotated rows, and its inverse."""

    def ordered(weight: np.ndarray, inverse: bool) -> np.ndarray:
        by_head = weight.reshape(heads, -1, *weight.shape[1:])
        order = halves(by_head.shape[1], rotated)
        order = np.argsort(order) if inverse else order
        return by_head[:, order].reshape(weight.shape)

    return lambda weight: ordered(weight, False), lambda weight: ordered(weight, True)


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a Hugging Face folder."""
    latent = config.latent
    assert latent is not None
    heads, plain = config.query_heads, latent.plain_width

    def by_head(weight: np.ndarray) -> np.ndarray:
        return weight.reshape(heads, -1, weight.shape[-1])

    conversions = TRANSPOSED | {
        "q": reorder(heads, latent.rope_width),
        "q_up": reorder(heads, latent.rope_width),
        "kv_down": reorder(1, latent.rope_width),
        "k_up": (lambda weight: by_head(weight)[:, :plain], None),
        "v_up": (lambda weight: by_head(weight)[:, plain:], None),
    }
    return hf_names(config, HF_LAYERS, conversions, {"k_up": "keys", "v_up": "values"})


FAMILY = Family("deepseek", ("deepseek_v2", "deepseek_v3"), (), from_hf, names, predictors=True)

# SPDX-License-Identifier: Apache-2.0
"""The Llama family (Llama, SmolLM2 and others that keep the architecture)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.models.config import ModelConfig, Rope
from engine.models.family import Family, Names, Transform, first_id, ids_of, required, rope_from_hf

HF_LAYERS = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
GGUF_LAYERS = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face llama config, old or new keys."""
    layers = required(config, "num_hidden_layers")
    heads = required(config, "num_attention_heads")
    width = required(config, "hidden_size")
    head_width = config.get("head_dim") or width // heads
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"hidden_act {config['hidden_act']!r} is not supported for llama; use silu"
        )
    return ModelConfig(
        family="llama",
        vocab_size=required(config, "vocab_size"),
        width=width,
        ffn_width=required(config, "intermediate_size"),
        num_layers=layers,
        query_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=head_width,
        max_position=config.get("max_position_embeddings") or 2048,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation="silu",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        ropes=(rope_from_hf(config, config.get("rope_parameters")),),
        rope_of_layer=(0,) * layers,
        windows=(None,) * layers,
        attention_scale=head_width**-0.5,
        qkv_bias=bool(config.get("attention_bias", False)),
        output_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        bos_id=first_id(config.get("bos_token_id")),
        eos_ids=ids_of(config.get("eos_token_id")),
    )


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file's metadata (architecture "llama")."""
    layers = int(required(meta, "llama.block_count"))
    heads = int(required(meta, "llama.attention.head_count"))
    width = int(required(meta, "llama.embedding_length"))
    head_width = int(meta.get("llama.attention.key_length") or width // heads)
    if (kind := meta.get("llama.rope.scaling.type")) not in (None, "none", "linear"):
        raise ValueError(f"GGUF rope scaling {kind!r} is not supported; use none or linear")
    if (rotated := meta.get("llama.rope.dimension_count", head_width)) != head_width:
        raise ValueError(f"llama.rope.dimension_count {rotated} must be the head size {head_width}")
    linear = meta.get("llama.rope.scaling.type") == "linear"
    rope = Rope(
        theta=float(meta.get("llama.rope.freq_base") or 10000.0),
        kind="linear" if linear else "default",
        factor=float(meta.get("llama.rope.scaling.factor") or 1.0),
    )
    vocab_size = meta.get("llama.vocab_size") or len(required(meta, "tokenizer.ggml.tokens"))
    return ModelConfig(
        family="llama",
        vocab_size=int(vocab_size),
        width=width,
        ffn_width=int(required(meta, "llama.feed_forward_length")),
        num_layers=layers,
        query_heads=heads,
        kv_heads=int(meta.get("llama.attention.head_count_kv") or heads),
        head_width=head_width,
        max_position=int(required(meta, "llama.context_length")),
        norm_eps=float(required(meta, "llama.attention.layer_norm_rms_epsilon")),
        activation="silu",
        tied_embeddings=True,  # settled by whether the file has an output matrix
        ropes=(rope,),
        rope_of_layer=(0,) * layers,
        windows=(None,) * layers,
        attention_scale=head_width**-0.5,
        bos_id=first_id(meta.get("tokenizer.ggml.bos_token_id")),
        eos_ids=ids_of(meta.get("tokenizer.ggml.eos_token_id")),
    )


def unpermute(heads: int) -> Transform:
    """Returns the transform that undoes GGUF's reordering of q and k rows for llama.

    GGUF pairs coordinates (2i, 2i+1) of a head for rope; the decoder rotates (i, i + H/2).
    """

    def transform(weight: np.ndarray) -> np.ndarray:
        rows, width = weight.shape
        pairs = weight.reshape(heads, rows // heads // 2, 2, width)
        return pairs.swapaxes(1, 2).reshape(rows, width)

    return transform


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a checkpoint kind."""
    present = config.layer_specs(np.dtype(np.float32))
    if kind == "gguf":
        transforms = {"q": unpermute(config.query_heads), "k": unpermute(config.kv_heads)}
        layers = {
            name: (f"blk.{{layer}}.{tensor}", transforms.get(name))
            for name, tensor in GGUF_LAYERS.items()
        }
        outer = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight"}
        head = "output.weight"
    else:
        layers = {
            name: (f"model.layers.{{layer}}.{tensor}", None)
            for name, tensor in HF_LAYERS.items()
            if name in present
        }
        outer = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
        head = "lm_head.weight"
    if not config.tied_embeddings:
        outer["head"] = head
    return Names({name: (tensor, None) for name, tensor in outer.items()}, layers)


FAMILY = Family("llama", ("llama",), from_hf, from_gguf, names)

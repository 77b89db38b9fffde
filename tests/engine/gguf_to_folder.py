# SPDX-License-Identifier: Apache-2.0
"""Writes a GGUF as a Hugging Face folder, by gguf-py's dequantization and none of ours."""

import json
import pathlib

import gguf
import numpy as np
from safetensors.numpy import save_file

from checkpoints import open_checkpoint

TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# What config.json says beside the sizes, in the spelling of before transformers 5.
MORE = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
}


def rotate_half_rows(weight, heads):
    """Returns rows in Hugging Face's order: a head's even coordinates, then its odd ones."""
    size = len(weight) // heads
    order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
    rows = (np.arange(heads)[:, None] * size + order[None]).reshape(-1)
    return weight[rows]


def tensor_name(name, tensors):
    """Returns the name in a Hugging Face folder of a tensor of a GGUF file."""
    *place, part, kind = name.split(".")
    if place:
        return f"model.layers.{place[1]}.{tensors[part]}.{kind}"
    return f"{OUTER[part]}.{kind}"


def write_folder(gguf_path, folder) -> pathlib.Path:
    """Returns `folder`, a Hugging Face folder of the model at `gguf_path`, float32.

    Of gemma3 only the 270M model: what its file does not say is in MORE.
    """
    reader = gguf.GGUFReader(gguf_path)

    def field(name):
        return reader.fields[name].contents()

    architecture = field("general.architecture")
    heads = {
        "attn_q": field(f"{architecture}.attention.head_count"),
        "attn_k": field(f"{architecture}.attention.head_count_kv"),
    }
    names = TENSORS | (GEMMA3_NORMS if architecture == "gemma3" else {})
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if architecture == "llama" and part in heads:
            weight = rotate_half_rows(weight, heads[part])
        if architecture == "gemma3" and part.endswith("norm"):
            weight = weight - np.float32(1)
        tensors[tensor_name(tensor.name, names)] = np.ascontiguousarray(weight)
    config = MORE[architecture] | {
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": field(f"{architecture}.embedding_length"),
        "intermediate_size": field(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": field(f"{architecture}.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "max_position_embeddings": field(f"{architecture}.context_length"),
        "rms_norm_eps": float(field(f"{architecture}.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field(f"{architecture}.rope.freq_base")),  # the older spelling
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float32",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    folder = pathlib.Path(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = open_checkpoint(pathlib.Path(gguf_path)).tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return folder

# SPDX-License-Identifier: Apache-2.0
"""Writes a llama GGUF as a Hugging Face folder, by gguf-py's dequantization and none of ours."""

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
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def field(reader, name):
    return reader.fields[name].contents()


def rotate_half_rows(weight, heads):
    """Returns rows in Hugging Face's order: a head's even coordinates, then its odd ones."""
    size = len(weight) // heads
    order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
    rows = (np.arange(heads)[:, None] * size + order[None]).reshape(-1)
    return weight[rows]


def write_folder(gguf_path, folder) -> pathlib.Path:
    """Returns `folder`, a Hugging Face folder of the llama model at `gguf_path`, float32."""
    reader = gguf.GGUFReader(gguf_path)
    heads = {
        "attn_q": field(reader, "llama.attention.head_count"),
        "attn_k": field(reader, "llama.attention.head_count_kv"),
    }
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                weight = rotate_half_rows(weight, heads[parts[2]])
            name = f"model.layers.{parts[1]}.{TENSORS[parts[2]]}.weight"
        else:
            name = f"{OUTER[parts[0]]}.weight"
        tensors[name] = np.ascontiguousarray(weight)
    config = {
        "model_type": "llama",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": field(reader, "llama.embedding_length"),
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rms_norm_eps": float(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field(reader, "llama.rope.freq_base")),  # the older spelling
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder = pathlib.Path(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = open_checkpoint(pathlib.Path(gguf_path)).tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return folder

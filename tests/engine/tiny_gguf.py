# SPDX-License-Identifier: Apache-2.0
"""A small random llama as a GGUF file, by the format's own package."""

import json

import gguf
import numpy as np

from tests.checkpoints.gguf_files import write_gguf
from tests.fixtures import byte_tokenizer, llama_config, llama_shapes

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
CONFIG = llama_config(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def gguf_name(name):
    """Returns GGUF's name of a tensor of a Hugging Face folder."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def tokenizer_metadata(add_bos=True):
    """Returns the tables of the byte-level tokenizer, two of its words marked as unused."""
    tokenizer = byte_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    added = tokenizer.get_added_tokens_decoder()
    types = [NORMAL] * len(tokens)
    for token_id, token in added.items():
        types[token_id] = CONTROL if token.special else USER_DEFINED
    types[290] = types[291] = UNUSED
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", "gpt-2"),
        ("add_token_list", tokens),
        ("add_token_types", types),
        ("add_token_merges", merges),
        ("add_bos_token_id", 1),
        ("add_eos_token_id", 2),
        ("add_eot_token_id", 299),
        ("add_add_bos_token", add_bos),
        ("add_chat_template", "{{ messages[0] }}"),
    ]


def write_tiny_gguf(path, add_bos=True):
    """Writes the model: matrices in Q8_0, norms in float32; returns the path.

    q and k are random, so that their rows need no reordering here.
    """
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in llama_shapes(CONFIG).items():
        values = rng.normal(0, 1 / shape[-1] ** 0.5, shape).astype(np.float32)
        if "norm" in name:
            tensors[gguf_name(name)] = (1 + values, gguf.GGMLQuantizationType.F32)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            tensors[gguf_name(name)] = (gguf.quantize(values, kind), kind)
    metadata = [
        ("add_block_count", CONFIG["num_hidden_layers"]),
        ("add_context_length", CONFIG["max_position_embeddings"]),
        ("add_embedding_length", CONFIG["hidden_size"]),
        ("add_feed_forward_length", CONFIG["intermediate_size"]),
        ("add_head_count", CONFIG["num_attention_heads"]),
        ("add_head_count_kv", CONFIG["num_key_value_heads"]),
        ("add_layer_norm_rms_eps", CONFIG["rms_norm_eps"]),
        ("add_rope_freq_base", 20000.0),
    ]
    return write_gguf(path, tensors, metadata + tokenizer_metadata(add_bos))

# SPDX-License-Identifier: Apache-2.0
"""Writes a model as llama.cpp's converter does, by the gguf package and by none of our code.

Every conversion moves whole rows, and blocks of quantized values lie within rows: so each matrix is
encoded in Hugging Face's order first, and what those rows decode to is what the model is.
"""

import itertools
import re

import gguf
import numpy as np

from tests.checkpoints.gguf_files import write_gguf

F32, F16, Q8_0, Q4_K, Q6_K = (
    gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0", "Q4_K", "Q6_K")
)
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
# Keys of config.json, and what adds them to a GGUF file's metadata.
NUMBERS = {
    "num_hidden_layers": "add_block_count",
    "max_position_embeddings": "add_context_length",
    "hidden_size": "add_embedding_length",
    "intermediate_size": "add_feed_forward_length",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "vocab_size": "add_vocab_size",
    "bos_token_id": "add_bos_token_id",
    "eos_token_id": "add_eos_token_id",
    "head_dim": "add_key_length",
    "num_local_experts": "add_expert_count",
    "num_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
}


def write_model(path, config, tensors, kinds):
    """Writes a GGUF of `tensors` {name in a folder: float32 values}.

    Matrices take turns in `kinds`; vectors, and what routes, stay float32. Returns the tensors of
    the folder of the same model, as the gguf package decodes them.
    """
    rng, turns = np.random.default_rng(0), itertools.cycle(kinds)
    stored, decoded = {}, {}
    for name, parts in places(config, tensors).items():
        plain = tensors[parts[0]].ndim == 1 or "ffn_gate_inp" in name
        kind = F32 if plain else next(turns)
        encoded = [encode(tensors[part], kind, rng) for part in parts]
        for part, data in zip(parts, encoded, strict=True):
            values = gguf.dequantize(data, kind).astype(np.float32)
            decoded[part] = values.reshape(tensors[part].shape)
        merged = np.stack(encoded) if ".experts." in parts[0] else encoded[0]
        stored[name] = (converted(config, name, merged), kind)
    for name, values in rope_factors(config).items():
        stored[name] = (np.array(values, np.float32), F32)
    architecture = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]
    write_gguf(path, stored, metadata(config), architecture)
    return decoded


def places(config, names):
    """Returns {name in the GGUF file: names in the folder}; experts are merged, in their order."""
    architecture, layers = ARCHITECTURES[config["model_type"]], config["num_hidden_layers"]
    known, found = gguf.get_tensor_name_map(architecture, layers), {}
    by_number = sorted(names, key=lambda name: [int(n) for n in re.findall(r"\.(\d+)\.", name)])
    for name in by_number:
        one = re.sub(r"(\.experts)\.\d+", r"\1", name)
        one = one.replace("model.layers", "layers") if "block_sparse_moe.experts" in one else one
        one = one.replace("block_sparse_moe.experts", "feed_forward.experts")
        stem, _, suffix = one.rpartition(".")
        found.setdefault(f"{known.get_name(stem)}.{suffix}", []).append(name)
    assert not any(name.startswith("None") for name in found)
    return found


def encode(values, kind, rng):
    """Returns the rows in a type: K types, which the package does not write, of random bytes."""
    if kind not in (Q4_K, Q6_K):
        return gguf.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*values.shape[:-1], values.shape[-1] // block, size)
    data = rng.integers(0, 256, shape, np.uint8)
    scales = {Q4_K: (slice(0, 2), slice(2, 4)), Q6_K: (slice(208, 210),)}[kind]
    for place in scales:
        halves = rng.uniform(1e-4, 1e-3, shape[:-1]).astype(np.float16)
        data[..., place] = halves[..., None].view(np.uint8)
    return data.reshape(*values.shape[:-1], -1)


def converted(config, name, data):
    """Returns a tensor's rows as the converter of its architecture stores them."""
    part, model_type = name.split(".")[-2], config["model_type"]
    if part in ("attn_q", "attn_k") and model_type in ("llama", "mixtral"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        halves = data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
    if part.endswith("norm") and model_type.startswith("gemma"):
        return data + np.float32(1)
    return data.reshape(-1) if part == "ffn_gate_inp_shexp" else data


def metadata(config):
    """Returns what describes the model, as calls of the package's writer."""
    calls = [(call, config[key]) for key, call in NUMBERS.items() if config.get(key) is not None]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    ropes = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        calls.append(("add_sliding_window_pattern", slides))
        calls.append(("add_rope_freq_base_swa", ropes["sliding_attention"]["rope_theta"]))
        ropes = ropes["full_attention"]
    if config["model_type"] in ("phi3", "gemma2", "gemma3_text"):
        calls.append(("add_sliding_window", config["sliding_window"] or 0))
    calls.append(("add_rope_freq_base", ropes["rope_theta"]))
    part = ropes.get("partial_rotary_factor", 1)
    calls.append(("add_rope_dimension_count", int(width * part)))
    kind = ropes["rope_type"]
    if kind in ("linear", "yarn"):
        calls.append(("add_rope_scaling_type", gguf.RopeScalingType(kind)))
        calls.append(("add_rope_scaling_factor", ropes["factor"]))
    if kind in ("longrope", "yarn"):
        original = ropes["original_max_position_embeddings"]
        calls.append(("add_rope_scaling_orig_ctx_len", original))
    if kind == "longrope":
        scale = config["max_position_embeddings"] / original
        factor = (1 + np.log(scale) / np.log(original)) ** 0.5
        calls.append(("add_rope_scaling_attn_factors", factor))
    if kind == "yarn" and "beta_fast" in ropes:
        calls.append(("add_rope_scaling_yarn_beta_fast", ropes["beta_fast"]))
    return calls


def rope_factors(config):
    """Returns the tensors of rope factors: two lists of longrope, one of Llama 3.1."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{x}.weight": rope[f"{x}_factor"] for x in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    width = config["head_dim"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": 1 / ((1 - smooth) / rope["factor"] + smooth)}

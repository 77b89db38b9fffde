# SPDX-License-Identifier: Apache-2.0
"""A llama in NumPy and float64, written from the papers: shares nothing with the engine.

Ropes follow transformers 5: arXiv 2306.15595 (linear), NTK-aware scaling by length (dynamic), arXiv
2309.00071 (yarn), Llama 3.1's rule in wavelengths, arXiv 2402.13753 (longrope).
"""

import json
import math

import numpy as np
from safetensors.numpy import load_file


def inverse_frequencies(rope, width, length, longest):
    """Returns ([angle a position of each pair], what multiplies cosines and sines) of settings.

    `width` coordinates are rotated; the sequence ends with `length` tokens; the model's own context
    is `longest`.
    """
    kind, base = rope.get("rope_type") or rope["type"], rope["rope_theta"]
    pairs = range(width // 2)
    plain = [base ** (-2 * i / width) for i in pairs]
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    if kind == "dynamic":
        if length <= original:
            return plain, 1.0
        grown = base * (factor * length / original - (factor - 1)) ** (width / (width - 2))
        return [grown ** (-2 * i / width) for i in pairs], 1.0
    if kind == "longrope":
        divisors = rope["long_factor"] if length > original else rope["short_factor"]
        scale = math.sqrt(1 + math.log(longest / original) / math.log(original))
        return [f / d for f, d in zip(plain, divisors, strict=True)], scale
    if kind == "llama3":
        return [llama3(rope, f) for f in plain], 1.0
    assert kind == "yarn", kind
    return yarn(rope, plain, width), 0.1 * math.log(factor) + 1


def llama3(rope, frequency):
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def yarn(rope, plain, width):
    original, base = rope["original_max_position_embeddings"], rope["rope_theta"]

    def dimension(turns):
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(rope.get("beta_slow", 1))), width - 1)
    mixed = []
    for i, frequency in enumerate(plain):
        divided = min(max((i - low) / (high - low), 0), 1)
        mixed.append(frequency * (1 - divided) + frequency / rope["factor"] * divided)
    return mixed


def rotate(x, angles, scale):
    """Returns heads [T, heads, width] whose first coordinates (i, i + half) are turned."""
    half = angles.shape[1]
    cos, sin = scale * np.cos(angles)[:, None], scale * np.sin(angles)[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def llama_logits(folder, ids, length=None):
    """Returns float64 [len(ids), vocabulary] of a llama's folder, for a sequence of `length`."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {n: t.astype(np.float64) for n, t in load_file(folder / "model.safetensors").items()}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width, rope = config["head_dim"], config["rope_parameters"]
    part = int(width * rope.get("partial_rotary_factor", 1))
    longest = config["max_position_embeddings"]
    frequencies, scale = inverse_frequencies(rope, part, length or len(ids), longest)
    angles = np.outer(np.arange(len(ids)), frequencies)
    seen = np.tri(len(ids), dtype=bool)

    def norm(x, name):
        size = np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"]
        return x / np.sqrt(size) * tensors[name]

    def by_head(x, count):
        return x.reshape(len(ids), count, width)

    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weight = {n: tensors[f"{at}self_attn.{n}_proj.weight"] for n in "qkvo"}
        h = norm(x, at + "input_layernorm.weight")
        q = rotate(by_head(h @ weight["q"].T, heads), angles, scale)
        k = rotate(by_head(h @ weight["k"].T, groups), angles, scale)
        v = by_head(h @ weight["v"].T, groups)
        attended = []
        for head in range(heads):
            group = head // (heads // groups)
            logits = np.where(seen, q[:, head] @ k[:, group].T / math.sqrt(width), -np.inf)
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            attended.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, group])
        x = x + np.concatenate(attended, axis=-1) @ weight["o"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ tensors[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + gate / (1 + np.exp(-gate)) * up @ tensors[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ tensors["lm_head.weight"].T

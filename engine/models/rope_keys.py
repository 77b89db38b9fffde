# SPDX-License-Identifier: Apache-2.0
"""Ropes as checkpoints spell them: the keys of Hugging Face configs and of GGUF metadata."""

import math
from collections.abc import Mapping
from typing import Any

from engine.models.rope import Rope

ANY = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
ANY |= {"original_max_position_embeddings"}  # of the config, repeated here by some
# (keys that a kind needs, keys that it may have), beside those of any.
KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor"}),
}
ALIASES = {"su": "longrope"}


def rope_settings(
    config: Mapping[str, Any], parameters: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the settings of one rope, from `rope_parameters` (new) or the older keys, checked.

    Raises ValueError, naming the key, for a kind that is not known and for settings that it lacks
    or does not know.
    """
    old = config.get("rope_scaling") or {}
    settings = {"rope_theta": config.get("rope_theta"), **old, **(parameters or {})}
    kind = settings.get("rope_type") or settings.get("type")
    if kind is None and settings.keys() - ANY:
        raise ValueError(f"the rope has {min(settings.keys() - ANY)!r} but no 'rope_type'")
    kind = ALIASES.get(str(kind), kind or "default")
    if kind not in KEYS:
        known = ", ".join(KEYS)
        raise ValueError(
            f"rope type {kind!r} is not supported; use a checkpoint with one of {known}"
        )
    needed, more = KEYS[kind]
    given = {key for key, value in settings.items() if value is not None}
    if missing := needed - given:
        raise ValueError(f"the rope of type {kind} has no {min(missing)!r}; it is incomplete")
    if unknown := given - ANY - needed - more:
        raise ValueError(f"the rope of type {kind} has {min(unknown)!r}, which is not supported")
    return {key: settings[key] for key in given} | {"rope_type": kind}


def rope_from_hf(config: Mapping[str, Any], parameters: Mapping[str, Any] | None) -> Rope:
    """Returns the rope of a config; see `rope_settings`."""
    settings = rope_settings(config, parameters)
    kind, theta = settings["rope_type"], float(settings.get("rope_theta") or 10000.0)
    longest = config.get("max_position_embeddings")
    original = settings.get("original_max_position_embeddings")
    original = original or config.get("original_max_position_embeddings") or longest
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, number(settings, "factor"))
    if original is None:
        raise ValueError(
            f"the rope of type {kind} has no 'original_max_position_embeddings'; it is incomplete"
        )
    fields: dict[str, Any] = {"original_max_position": int(original)}
    if kind == "longrope":
        factor = number(settings, "factor") if "factor" in settings else (longest or 0) / original
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        fields |= {
            "short_factors": factors(settings, "short_factor"),
            "long_factors": factors(settings, "long_factor"),
            "attention_factor": float(settings.get("attention_factor") or default),
        }
        return Rope(theta, kind, **fields)
    factor = number(settings, "factor")
    if kind == "llama3":
        fields |= {key: number(settings, key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        fields |= {
            "beta_fast": float(settings.get("beta_fast") or 32.0),
            "beta_slow": float(settings.get("beta_slow") or 1.0),
            "truncate": bool(settings.get("truncate", True)),
            "attention_factor": yarn_attention_factor(settings, factor),
        }
    return Rope(theta, kind, factor, **fields)


def yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """Returns what multiplies cosines and sines: as given, or by the rule of the paper.

    DeepSeek names two scales instead, of which the quotient counts here.
    """
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        above, below = float(settings["mscale"]), float(settings["mscale_all_dim"])
        return yarn_scale(factor, above) / yarn_scale(factor, below)
    return yarn_scale(factor)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Returns YaRN's temperature of a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def number(settings: Mapping[str, Any], key: str) -> float:
    """Returns settings[key] as a positive number; raises ValueError naming the key."""
    value = settings[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"the rope has {key} {value!r}; a positive number is needed")
    return float(value)


def factors(settings: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """Returns a list of positive numbers; raises ValueError naming the key."""
    values = settings[key]
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"the rope has {key} {values!r}; a list of numbers is needed")
    return tuple(number({key: value}, key) for value in values)


def rotary_width(
    config: Mapping[str, Any], parameters: Mapping[str, Any] | None, head_width: int
) -> int:
    """Returns how many coordinates of a head are rotated: the first ones, an even number."""
    settings = rope_settings(config, parameters)
    part = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    return checked_width(int(head_width * part), head_width, f"partial_rotary_factor {part!r}")


def checked_width(width: int, head_width: int, what: str) -> int:
    """Returns the width; raises ValueError unless so many coordinates of a head can be rotated."""
    if not 0 < width <= head_width or width % 2:
        raise ValueError(
            f"{what} rotates {width} of a head's {head_width} coordinates; an even number is needed"
        )
    return width


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """Returns the `rope_parameters` that `rope_from_hf` reads as this rope."""
    settings: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind in ("linear", "llama3", "dynamic", "yarn"):
        settings["factor"] = rope.factor
    if rope.kind == "llama3":
        settings["low_freq_factor"] = rope.low_freq_factor
        settings["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        settings["beta_fast"], settings["beta_slow"] = rope.beta_fast, rope.beta_slow
        settings["truncate"] = rope.truncate
    if rope.kind == "longrope":
        settings["short_factor"] = list(rope.short_factors)
        settings["long_factor"] = list(rope.long_factors)
    if rope.kind in ("yarn", "longrope"):
        settings["attention_factor"] = rope.attention_factor
    if rope.kind not in ("default", "linear"):
        settings["original_max_position_embeddings"] = rope.original_max_position
    return settings


def rope_from_gguf(meta: Mapping[str, Any], architecture: str, *, theta: float) -> Rope:
    """Returns the rope of GGUF metadata; `theta` is the base where the file names none.

    A factor without a scaling type is linear, as the format has it, and so is its older key,
    `scale_linear`. `attn_factor` multiplies what the scaling gives cosines and sines. Raises
    ValueError for other scalings.
    """
    prefix = f"{architecture}.rope"
    theta = float(meta.get(f"{prefix}.freq_base") or theta)
    older = meta.get(f"{prefix}.scale_linear")
    factor = float(meta.get(f"{prefix}.scaling.factor") or older or 1.0)
    scale = float(meta.get(f"{prefix}.scaling.attn_factor") or 1.0)
    kind = meta.get(f"{prefix}.scaling.type") or "linear"
    if kind == "yarn":
        return yarn_from_gguf(meta, f"{prefix}.scaling", theta, factor, scale)
    if kind not in ("none", "linear", "longrope"):
        raise ValueError(
            f"GGUF rope scaling {kind!r} is not supported; use none, linear, yarn or longrope"
        )
    # Equal ropes compare equal: a factor of 1 is no scaling. The lists of longrope are tensors.
    if kind == "linear" and factor != 1:
        return Rope(theta, "linear", factor, attention_factor=scale)
    return Rope(theta, attention_factor=scale)


def yarn_from_gguf(
    meta: Mapping[str, Any], prefix: str, theta: float, factor: float, scale: float
) -> Rope:
    """Returns the rope of keys below `prefix`; `scale` multiplies the temperature that follows.

    llama.cpp works the temperature out and passes over `yarn_attn_factor`, which its converter
    takes from the model's config: files in which the two differ are refused.
    """
    original = meta.get(f"{prefix}.original_context_length")
    if original is None:
        raise ValueError(f"{prefix}.original_context_length is missing; yarn needs it")
    weight = float(meta.get(f"{prefix}.yarn_log_multiplier") or 0.0)
    temperature = yarn_scale(factor) / yarn_scale(factor, weight)
    for key, usual in (("yarn_attn_factor", temperature), ("yarn_ext_factor", 1.0)):
        value = meta.get(f"{prefix}.{key}")
        if value is not None and value >= 0 and not math.isclose(value, usual, rel_tol=1e-5):
            raise ValueError(
                f"{prefix}.{key} {value} is not supported, but {usual:.6g}; use the Hugging Face "
                "folder of the model"
            )
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_position=int(original),
        beta_fast=float(meta.get(f"{prefix}.yarn_beta_fast") or 32.0),
        beta_slow=float(meta.get(f"{prefix}.yarn_beta_slow") or 1.0),
        attention_factor=temperature * scale,
    )


def rotary_width_from_gguf(meta: Mapping[str, Any], architecture: str, head_width: int) -> int:
    """Returns how many coordinates of a head are rotated."""
    key = f"{architecture}.rope.dimension_count"
    width = int(meta.get(key) or head_width)
    return checked_width(width, head_width, f"{key} {width}")


def with_factors(
    rope: Rope, meta: Mapping[str, Any], short: list[float], long: list[float]
) -> Rope:
    """Returns the rope with the lists of factors that a GGUF file keeps beside its metadata.

    They hold beside a linear factor; raises ValueError beside yarn.
    """
    architecture = meta["general.architecture"]
    if rope.kind == "yarn":
        raise ValueError(f"{architecture}.rope.scaling.type is yarn, beside lists of rope factors")
    original = meta.get(f"{architecture}.rope.scaling.original_context_length")
    longest = meta.get(f"{architecture}.context_length") or 0
    if original is None and short != long:
        raise ValueError(
            f"{architecture}.rope.scaling.original_context_length is missing; two lists need it"
        )
    return Rope(
        rope.theta,
        "longrope",
        original_max_position=int(original or longest),
        attention_factor=rope.attention_factor,
        short_factors=tuple(factor * rope.factor for factor in short),
        long_factors=tuple(factor * rope.factor for factor in long),
    )

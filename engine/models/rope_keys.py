# SPDX-License-Identifier: Apache-2.0
"""Ropes as checkpoints spell them: the keys of Hugging Face configs and of GGUF metadata."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from engine.models.rope import Rope
from engine.models.values import count, flag, mapping, number, wrong

ROPE = "the rope"

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
    old = mapping(config, "rope_scaling")
    new = mapping({"rope_parameters": parameters}, "rope_parameters")
    settings = {"rope_theta": config.get("rope_theta"), **old, **new}
    kind = settings.get("rope_type") or settings.get("type")
    if kind is not None and not isinstance(kind, str):
        raise wrong(ROPE, "rope_type", kind, "a name")
    if kind is None and settings.keys() - ANY:
        raise ValueError(f"the rope has {min(settings.keys() - ANY)!r} but no 'rope_type'")
    kind = ALIASES.get(kind or "", kind or "default")
    if kind not in KEYS:
        known = ", ".join(KEYS)
        raise ValueError(
            f"rope type {reprlib.repr(kind)} is not supported; use a checkpoint with one of {known}"
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
    kind, theta = settings["rope_type"], number(settings, "rope_theta", 10000.0, owner=ROPE)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, number(settings, "factor", owner=ROPE))
    original = original_length(config, settings)
    fields: dict[str, Any] = {"original_max_position": original}
    if kind == "longrope":
        longest = config.get("max_position_embeddings")
        factor = number(settings, "factor", (longest or original) / original, owner=ROPE)
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        fields |= {
            "short_factors": factors(settings, "short_factor"),
            "long_factors": factors(settings, "long_factor"),
            "attention_factor": number(settings, "attention_factor", default, owner=ROPE),
        }
        return Rope(theta, kind, **fields)
    factor = number(settings, "factor", owner=ROPE)
    if kind == "llama3":
        keys = ("low_freq_factor", "high_freq_factor")
        fields |= {key: number(settings, key, owner=ROPE) for key in keys}
    if kind == "yarn":
        fields |= {
            "beta_fast": number(settings, "beta_fast", 32.0, owner=ROPE),
            "beta_slow": number(settings, "beta_slow", 1.0, owner=ROPE),
            "truncate": flag(settings, "truncate", True),
            "attention_factor": yarn_attention_factor(settings, factor),
        }
    return Rope(theta, kind, factor, **fields)


def original_length(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Returns the context before scaling, from the rope's settings or, if absent, the config's."""
    key = "original_max_position_embeddings"
    for holder, name in ((settings, key), (config, key), (config, "max_position_embeddings")):
        if holder.get(name) is not None:
            return count(holder, name, low=2)
    raise ValueError(f"the rope of type {settings['rope_type']} has no {key!r}; it is incomplete")


def yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """Returns what multiplies cosines and sines: as given, or by the rule of the paper.

    DeepSeek names two scales instead, of which the quotient counts here.
    """
    if settings.get("attention_factor") is not None:
        return number(settings, "attention_factor", owner=ROPE)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        keys = ("mscale", "mscale_all_dim")
        above, below = (number(settings, key, owner=ROPE) for key in keys)
        return yarn_scale(factor, above) / yarn_scale(factor, below)
    return yarn_scale(factor)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Returns YaRN's temperature of a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def factors(settings: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """Returns a list of positive numbers; raises ValueError naming the key."""
    values = settings[key]
    if not isinstance(values, list | tuple) or not values:
        raise wrong(ROPE, key, values, "a list of numbers")
    return tuple(number({key: value}, key, owner=ROPE) for value in values)


def rotary_width(
    config: Mapping[str, Any], parameters: Mapping[str, Any] | None, head_width: int
) -> int:
    """Returns how many coordinates of a head are rotated: the first ones, an even number."""
    settings = rope_settings(config, parameters)
    key = "partial_rotary_factor"
    part = number(settings, key, number(config, key, 1.0), owner=ROPE)
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
    theta = metadata_number(meta, f"{prefix}.freq_base", theta)
    older = metadata_number(meta, f"{prefix}.scale_linear", 1.0)
    factor = metadata_number(meta, f"{prefix}.scaling.factor", older)
    scale = metadata_number(meta, f"{prefix}.scaling.attn_factor", 1.0)
    kind = meta.get(f"{prefix}.scaling.type") or "linear"
    if kind == "yarn":
        return yarn_from_gguf(meta, f"{prefix}.scaling", theta, factor, scale)
    if kind not in ("none", "linear", "longrope"):
        raise ValueError(
            f"GGUF rope scaling {reprlib.repr(kind)} is not supported; use none, linear, "
            "yarn or longrope"
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
    key = f"{prefix}.original_context_length"
    if meta.get(key) is None:
        raise ValueError(f"{key} is missing; yarn needs it")
    weight = 0.0
    if meta.get(f"{prefix}.yarn_log_multiplier"):
        weight = number(meta, f"{prefix}.yarn_log_multiplier")
    temperature = yarn_scale(factor) / yarn_scale(factor, weight)
    for name, usual in (("yarn_attn_factor", temperature), ("yarn_ext_factor", 1.0)):
        value = meta.get(f"{prefix}.{name}", usual)
        negative = isinstance(value, int | float) and value < 0  # which stands for absence
        if not negative and not math.isclose(value, usual, rel_tol=1e-5):
            raise ValueError(
                f"{prefix}.{name} {value} is not supported, but {usual:.6g}; use the Hugging Face "
                "folder of the model"
            )
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_position=count(meta, key, low=2),
        beta_fast=metadata_number(meta, f"{prefix}.yarn_beta_fast", 32.0),
        beta_slow=metadata_number(meta, f"{prefix}.yarn_beta_slow", 1.0),
        attention_factor=temperature * scale,
    )


def metadata_number(meta: Mapping[str, Any], key: str, default: float) -> float:
    """Returns the number above 0 of a GGUF key; there 0 stands for the default as absence does."""
    return default if meta.get(key) == 0 else number(meta, key, default)


def rotary_width_from_gguf(meta: Mapping[str, Any], architecture: str, head_width: int) -> int:
    """Returns how many coordinates of a head are rotated."""
    key = f"{architecture}.rope.dimension_count"
    width = count(meta, key, head_width)
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
    key = f"{architecture}.rope.scaling.original_context_length"
    longest = count(meta, f"{architecture}.context_length")
    lists = {"short factors": short, "long factors": long}
    checked = {name: factors(lists, name) for name in lists}
    if meta.get(key) is None and short != long:
        raise ValueError(f"{key} is missing; two lists need it")
    return Rope(
        rope.theta,
        "longrope",
        original_max_position=count(meta, key, longest),
        attention_factor=rope.attention_factor,
        short_factors=tuple(factor * rope.factor for factor in checked["short factors"]),
        long_factors=tuple(factor * rope.factor for factor in checked["long factors"]),
    )

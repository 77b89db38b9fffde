# SPDX-License-Identifier: Apache-2.0
"""What a family file declares, and the readings of a config that families share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine.models.config import ModelConfig, Rope

Transform = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Names:
    """Where parameters stand in a checkpoint: parameter -> (tensor name, transform or None).

    `layers` names contain "{layer}".
    """

    outer: Mapping[str, tuple[str, Transform | None]]
    layers: Mapping[str, tuple[str, Transform | None]]


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family. `names(kind, config)` gives the name table of a checkpoint kind."""

    name: str
    model_types: tuple[str, ...]  # `model_type` of config.json, `general.architecture` of GGUF
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    from_gguf: Callable[[Mapping[str, Any]], ModelConfig] | None
    names: Callable[[str, ModelConfig], Names]


def required(config: Mapping[str, Any], key: str) -> Any:
    """Returns config[key]; raises ValueError naming the key."""
    if config.get(key) is None:
        raise ValueError(f"the model's config has no {key!r}; the checkpoint is incomplete")
    return config[key]


def rope_from_hf(config: Mapping[str, Any], parameters: Mapping[str, Any] | None) -> Rope:
    """Returns the rope of a config, from `rope_parameters` (new) or the older top-level keys."""
    old = config.get("rope_scaling") or {}
    parameters = {"rope_theta": config.get("rope_theta"), **old, **(parameters or {})}
    theta = float(parameters.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    factor = float(parameters.get("factor") or 1.0)
    if kind != "llama3":
        # Equal ropes compare equal: only what the kind reads is set.
        return Rope(theta, kind, factor) if kind == "linear" else Rope(theta, kind)
    original = parameters.get("original_max_position_embeddings")
    return Rope(
        theta,
        kind,
        factor,
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        original_max_position=int(original or config.get("max_position_embeddings") or 8192),
    )


def ids_of(value: Any) -> tuple[int, ...]:
    """Returns token ids given as nothing, one id or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def first_id(value: Any) -> int | None:
    """Returns the first of `ids_of(value)`, or None."""
    ids = ids_of(value)
    return ids[0] if ids else None

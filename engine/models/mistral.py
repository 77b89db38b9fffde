# SPDX-License-Identifier: Apache-2.0
"""Mistral: a llama whose layers all have one window, or none. GGUF files call it a llama."""

from collections.abc import Mapping
from typing import Any

from engine.models.config import ModelConfig
from engine.models.family import Family, Names, hf_names
from engine.models.llama import HF_LAYERS, plain_from_hf
from engine.models.values import count


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face mistral config."""
    return ModelConfig(family="mistral", **fields_from_hf(config))


def fields_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a llama with one window in all layers; one of null is none."""
    fields = plain_from_hf(config, max_position=131072)
    if config.get("sliding_window") is not None:
        fields["windows"] = (count(config, "sliding_window"),) * fields["num_layers"]
    return fields


def names(kind: str, config: ModelConfig) -> Names:
    """Returns the name table of a Hugging Face folder."""
    return hf_names(config, HF_LAYERS)


FAMILY = Family("mistral", ("mistral",), (), from_hf, names)

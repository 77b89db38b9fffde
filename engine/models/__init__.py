# SPDX-License-Identifier: Apache-2.0
"""Model families: each file maps a checkpoint's config and tensor names to the one decoder."""

from engine.models import (
    deepseek,
    gemma2,
    gemma3,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen_moe,
)
from engine.models.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    phi3.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    olmo2.FAMILY,
    mixtral.FAMILY,
    qwen_moe.FAMILY,
    deepseek.FAMILY,
    gpt_oss.FAMILY,
)

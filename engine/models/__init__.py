# SPDX-License-Identifier: Apache-2.0
"""Model families: each file maps a checkpoint's config and tensor names to the one decoder."""

from engine.models import gemma3, llama, qwen2
from engine.models.family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen2.FAMILY, gemma3.FAMILY)

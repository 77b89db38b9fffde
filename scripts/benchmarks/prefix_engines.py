# SPDX-License-Identifier: Apache-2.0
"""Of the suite prefix: engines with pools of a chosen size, for requests of a known length."""

from typing import Any

import numpy as np

from checkpoints import store
from engine import LLM
from engine.kv import kv_layout
from engine.loading import open_model
from scripts.benchmarks.settings import Settings
from scripts.command_line import UsageError, usage_errors

PAGE_SIZE = 16  # unless --page_size says otherwise


def page_size(settings: Settings) -> int:
    return settings.options.get("page_size", PAGE_SIZE)


def load_with_pages(settings: Settings, pages: int, length: int, **options: Any) -> LLM:
    """Returns the model with a pool of so many pages in every page group.

    Raises UsageError unless requests of `length` tokens fit the model.
    """
    with usage_errors():
        config = open_model(store.resolve(settings.model)).config
    most = settings.options.get("max_model_len", config.max_position)
    if length > most:
        raise UsageError(
            f"--prefix_tokens={settings.prefix_tokens} makes requests of {length} tokens and "
            f"max_model_len is {most}; give fewer"
        )
    groups = len(kv_layout(config, page_size(settings), np.dtype(np.float32)).groups)
    return settings.load(page_size=PAGE_SIZE, num_pages=groups * pages + 1, **options)

# SPDX-License-Identifier: Apache-2.0
"""One engine with two sets of options, decoding in turn."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from scripts.benchmarks.rounds import Run, median_ratio, medians, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.workload import run_batch, run_decode, workload_prompts

FIGURE = "decode_tokens_per_s"


def compare_variants(
    settings: Settings, count: int, variants: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the medians of `count` requests with each of two sets of options.

    `ratio` is of the tokens a second: the first set's over the second's.
    """
    runs: dict[str, Run] = {}
    for name, options in variants.items():
        llm = settings.load_rows(max(settings.counts), **options)
        prompts = workload_prompts(count, llm.model_config.vocab_size)
        runs[name] = partial(run_decode, partial(run_batch, llm), prompts)
        runs[name]()  # warms up
    rounds, void = quiet_rounds(runs, [os.getpid()], settings.repeats or 5, settings.most_void)
    first, second = variants
    return {
        "requests": count,
        "engines": {name: medians([figures[name] for figures in rounds]) for name in runs},
        "ratio": median_ratio(rounds, first, second, FIGURE),
        "void": void,
        "rounds": rounds,
    }

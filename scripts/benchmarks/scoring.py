# SPDX-License-Identifier: Apache-2.0
"""The suite scoring: choices scored in one call, and one by one."""

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from engine import LLM
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Figures, Run, median_ratio, medians, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.workload import workload_prompts

CONTEXT_TOKENS = 24
CHOICE_TOKENS = 4
RATE = "choices_per_s"

Pair = tuple[list[int], list[int]]


def measure(settings: Settings) -> dict[str, Any]:
    llm = settings.load()
    ids = workload_prompts(
        settings.num_requests, llm.model_config.vocab_size, CONTEXT_TOKENS + CHOICE_TOKENS
    )
    pairs = [(one[:CONTEXT_TOKENS], one[CONTEXT_TOKENS:]) for one in ids]
    runs: dict[str, Run] = {
        "together": partial(score_in_calls, llm, [pairs]),
        "one by one": partial(score_in_calls, llm, [[pair] for pair in pairs]),
    }
    score_in_calls(llm, [pairs[:64], pairs[:1]])  # warms up
    rounds, void = quiet_rounds(runs, [os.getpid()], settings.repeats or 3, settings.most_void)
    return {
        "choices": len(pairs),
        "tokens": CONTEXT_TOKENS + CHOICE_TOKENS,
        "scoring": {name: medians([figures[name] for figures in rounds]) for name in runs},
        "ratio": median_ratio(rounds, "together", "one by one", RATE),
        "void": void,
        "rounds": rounds,
    }


def score_in_calls(llm: LLM, calls: Sequence[Sequence[Pair]]) -> Figures:
    """Returns the rate at which the calls' pairs were scored, one call after the other."""
    start = time.perf_counter()
    count = sum(len(llm.score(pairs)) for pairs in calls)
    return {RATE: count / (time.perf_counter() - start)}


def tables(figures: dict[str, Any]) -> list[Table]:
    rates = [shown(rate[RATE], ".1f") for rate in figures["scoring"].values()]
    row = [str(figures["choices"]), *rates, shown(figures["ratio"], ".2f"), str(figures["void"])]
    heads = ["choices", *(f"{name}, a second" for name in figures["scoring"]), "ratio", "void"]
    return [Table(f"Choices of {figures['tokens']} tokens, context included", heads, [row])]


def charts(figures: dict[str, Any]) -> list[Chart]:
    series = {name: [rate[RATE]] for name, rate in figures["scoring"].items()}
    labels = [f"{figures['choices']} choices"]
    return [Chart("scoring", "Choices scored", "choices/s", labels, series)]

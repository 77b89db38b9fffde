# SPDX-License-Identifier: Apache-2.0
"""Of the suite prefix: requests at once that share much, or nothing, on an engine of each kind."""

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from engine import LLM
from scripts.benchmarks.goals import WITH, WITHOUT, Goal, compare, gain
from scripts.benchmarks.prefix_engines import load_with_pages, page_size
from scripts.benchmarks.rounds import Figures, Run
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.workload import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    middle_step_s,
    run_batch,
    workload_prompts,
)

REQUESTS = 32
OWN_TOKENS = 20  # of a prompt, behind what all share
OUTPUT_TOKENS = 16
# As of a test whose questions have a few examples in front, the same for all.
EXAMPLE_TOKENS = 200
QUESTION_TOKENS = 50
CHOICES = 4  # of a question
CHOICE_TOKENS = 4

Pair = dict[str, LLM]


def load_pair(settings: Settings) -> Pair:
    """Returns an engine with a cache and one without, with room for all that runs at once."""
    rows = settings.options.get("max_num_seqs", REQUESTS)
    length = max(shared_length(settings), PROMPT_TOKENS + NEW_TOKENS)
    pages = rows * (-(-length // page_size(settings)) + 1)
    pair = {}
    for name in (WITH, WITHOUT):
        pair[name] = load_with_pages(
            settings, pages, length, max_num_seqs=rows, prefix_cache=name == WITH
        )
    return pair


def shared_length(settings: Settings) -> int:
    return settings.prefix_tokens + OWN_TOKENS + OUTPUT_TOKENS


def measure_shared(settings: Settings, pair: Pair) -> dict[str, Any]:
    """Returns the figures of requests that come at once and share a prefix that nobody has."""
    llm = pair[WITH]
    length = settings.prefix_tokens + OWN_TOKENS
    prompts = workload_prompts(llm.config.max_num_seqs, llm.model_config.vocab_size, length)
    shared = prompts[0][: settings.prefix_tokens]
    prompts = [shared + prompt[settings.prefix_tokens :] for prompt in prompts]
    for one in pair.values():
        run_batch(one, [prompt[-OWN_TOKENS:] for prompt in prompts], [2] * len(prompts))  # warms up
    runs: dict[str, Run] = {name: partial(run_shared, one, prompts) for name, one in pair.items()}
    rate = Goal("output_tokens_per_s", (WITH, WITHOUT), 3.0)
    return compare(settings, runs, [gain("ttft_s", 8.0), gain("ttft_p50_s", 8.0), rate], 3)


def run_shared(llm: LLM, prompts: Sequence[list[int]]) -> Figures:
    """Returns mean and median of the time to first token, and the rate of all output tokens."""
    llm.cache.clear()
    start, token_times = run_batch(llm, prompts, [OUTPUT_TOKENS] * len(prompts))
    first = [times[0] - start for times in token_times]
    total_s = max(times[-1] for times in token_times) - start
    return {
        "ttft_s": statistics.fmean(first),
        "ttft_p50_s": statistics.median(first),
        "output_tokens_per_s": sum(map(len, token_times)) / total_s,
    }


def measure_unshared(settings: Settings, pair: Pair) -> dict[str, Any]:
    """Returns the figures of requests that share nothing, with any before them either."""
    runs: dict[str, Run] = {
        name: partial(run_unshared, llm, itertools.count()) for name, llm in pair.items()
    }
    for run in runs.values():
        run()  # warms up
    cost = [Goal(name, (WITH, WITHOUT), 1.03, is_least=False) for name in ("step_s", "prefill_s")]
    return compare(settings, runs, cost, 11)


def run_unshared(llm: LLM, seeds: Iterator[int]) -> Figures:
    """Returns the time of all prompts, and of the middle step in which all rows decode."""
    rng, vocabulary = random.Random(next(seeds)), llm.model_config.vocab_size
    rows = llm.config.max_num_seqs
    prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    start, token_times = run_batch(llm, prompts, [NEW_TOKENS] * rows)
    prefill_s = max(times[0] for times in token_times) - start
    return {"step_s": middle_step_s(token_times), "prefill_s": prefill_s}


def measure_scoring(settings: Settings, pair: Pair) -> dict[str, Any]:
    """Returns the figures of choices in one call: several a question, with examples before all.

    Where only the choices of a question share, no more can be gained than there are choices.
    """
    questions = -(-settings.num_requests // CHOICES)
    length = min(EXAMPLE_TOKENS, settings.prefix_tokens)
    vocabulary, rng = pair[WITH].model_config.vocab_size, random.Random(1)
    examples = [rng.randrange(vocabulary) for _ in range(length)]
    pairs = [
        (examples + question, [rng.randrange(vocabulary) for _ in range(CHOICE_TOKENS)])
        for question in workload_prompts(questions, vocabulary, QUESTION_TOKENS)
        for _ in range(CHOICES)
    ][: settings.num_requests]
    for llm in pair.values():
        llm.score(pairs[:1])  # warms up
    runs: dict[str, Run] = {name: partial(run_scoring, llm, pairs) for name, llm in pair.items()}
    goal = Goal("choices_per_s", (WITH, WITHOUT), 4.0)
    facts = {
        "choices": len(pairs),
        "choices of a question": CHOICES,
        "tokens of the examples": length,
        "tokens of a question": QUESTION_TOKENS,
        "tokens of a choice": CHOICE_TOKENS,
    }
    return compare(settings, runs, [goal], 3) | {"facts": facts}


def run_scoring(llm: LLM, pairs: Sequence[tuple[list[int], list[int]]]) -> Figures:
    """Returns how many choices were scored a second."""
    llm.cache.clear()
    start = time.perf_counter()
    llm.score(pairs)
    return {"choices_per_s": len(pairs) / (time.perf_counter() - start)}


SHARING = {"shared": measure_shared, "unshared": measure_unshared, "scoring": measure_scoring}

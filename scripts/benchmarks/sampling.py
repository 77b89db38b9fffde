# SPDX-License-Identifier: Apache-2.0
"""The suite sampling: what each field costs, as a share of a greedy step."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from engine import LLM, SamplingParams
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Figures, Run, median_ratio, medians, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.workload import decode_figures, middle_step_s, workload_prompts
from scripts.command_line import UsageError

PROMPT_TOKENS = 16
NEW_TOKENS = 24
GREEDY = "greedy"
# One field each, beside a temperature of 1 where that is what it acts on.
FIELDS: dict[str, dict[str, Any]] = {
    GREEDY: {"temperature": 0.0},
    "temperature": {},
    "top_k 20": {"top_k": 20},
    "top_k 500": {"top_k": 500},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "logit_bias": {"temperature": 0.0, "logit_bias": {7: 1.0, 11: -100.0}},
    "allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": list(range(1000))},
    "bad_words": {"temperature": 0.0, "bad_words": ["mill", "the water wheel"]},
    "min_tokens": {"temperature": 0.0, "min_tokens": NEW_TOKENS},
    "stop": {"temperature": 0.0, "stop": ["\N{SNOWMAN} never", "nor this"]},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}
MIXED = "mixed"  # each row another of the fields that change which token is drawn
MIXED_FIELDS = [fields for name, fields in FIELDS.items() if name != "logprobs 5"]


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the figures of each field at each number of requests."""
    names = [*FIELDS, MIXED]
    if unknown := [name for name in settings.fields if name not in names]:
        raise UsageError(f"--fields={unknown[0]} is unknown; the fields are {', '.join(names)}")
    llm = settings.load_rows(max(settings.counts))
    return {"sampling": [measure_fields(settings, llm, count) for count in settings.counts]}


def measure_fields(settings: Settings, llm: LLM, count: int) -> dict[str, Any]:
    """Returns the medians of `count` requests with each field, and with a mixture of all."""
    prompts = workload_prompts(count, llm.model_config.vocab_size, PROMPT_TOKENS)
    batches = {name: [fields] * count for name, fields in FIELDS.items()}
    batches[MIXED] = [MIXED_FIELDS[row % len(MIXED_FIELDS)] for row in range(count)]
    wanted = {GREEDY, *(settings.fields or batches)}
    runs: dict[str, Run] = {
        name: partial(run_fields, llm, prompts, batch)
        for name, batch in batches.items()
        if name in wanted
    }
    for run in runs.values():
        run()  # warms up
    rounds, void = quiet_rounds(runs, [os.getpid()], settings.repeats or 5, settings.most_void)
    return {
        "requests": count,
        "void": void,
        "fields": {name: medians([figures[name] for figures in rounds]) for name in runs},
        "ratios": {name: median_ratio(rounds, name, GREEDY, "step_s") for name in runs},
        "rounds": rounds,
    }


def run_fields(llm: LLM, prompts: Sequence[list[int]], batch: Sequence[dict[str, Any]]) -> Figures:
    """Returns the figures of NEW_TOKENS after each prompt, each with its own fields."""
    requests = []
    for seed, (prompt, fields) in enumerate(zip(prompts, batch, strict=True)):
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=seed, **fields)
        requests.append(llm.make_request(prompt, params)[0])
    for request in requests:
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
    times = [request.token_times for request in requests]
    figures = decode_figures(min(r.arrival_s for r in requests), times)
    return {**figures, "step_s": middle_step_s(times)}


def tables(figures: dict[str, Any]) -> list[Table]:
    rows = [
        [
            str(row["requests"]),
            name,
            shown(field["step_s"], ".2f", 1e3),
            shown(row["ratios"][name] - 1, "+.1%"),
            shown(field["foreign_cores"], ".2f"),
            str(row["void"]),
        ]
        for row in figures["sampling"]
        for name, field in row["fields"].items()
    ]
    return [Table("", ["requests", "field", "step ms", "cost", "foreign", "void"], rows)]


def charts(figures: dict[str, Any]) -> list[Chart]:
    rows = figures["sampling"]
    names = list(rows[0]["ratios"])
    series = {
        f"{row['requests']} requests": [100 * (row["ratios"][name] - 1) for name in names]
        for row in rows
    }
    return [Chart("sampling", "Cost of each field, of a greedy step", "%", names, series)]

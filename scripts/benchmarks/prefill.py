# SPDX-License-Identifier: Apache-2.0
"""The suite prefill: prompt tokens a second, by how many prompts come at once and their length."""

import os
from functools import partial
from typing import Any

from engine import LLM
from scripts.benchmarks.peer import Peer, started_peers
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Run, median_ratio, medians, quiet_rounds
from scripts.benchmarks.settings import Settings, Shape
from scripts.benchmarks.workload import OURS, batch_runners, run_prefill, workload_prompts
from scripts.command_line import UsageError


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the figures of each shape, of Headrace and of the peers there are."""
    llm = settings.load_rows(max(shape.requests for shape in settings.shapes))
    for shape in settings.shapes:
        if shape.prompt_tokens >= llm.max_model_len:
            raise UsageError(
                f"--shapes={shape} and a token do not fit max_model_len={llm.max_model_len}; "
                "leave it out"
            )
    with started_peers(settings.peer_python, settings.peers) as peers:
        about = {"peers": {name: peer.about for name, peer in peers.items()}}
        rows = [measure_prefill(settings, llm, peers, shape) for shape in settings.shapes]
    return about | {"prefill": rows}


def measure_prefill(
    settings: Settings, llm: LLM, peers: dict[str, Peer], shape: Shape
) -> dict[str, Any]:
    """Returns the medians of one shape: every prompt in, and one token out."""
    vocabulary = llm.model_config.vocab_size
    prompts = workload_prompts(shape.requests, vocabulary, shape.prompt_tokens)
    runs: dict[str, Run] = {
        name: partial(run_prefill, run, prompts) for name, run in batch_runners(llm, peers).items()
    }
    for run in runs.values():
        run()  # warms up
    pids = [os.getpid(), *(peer.pid for peer in peers.values())]
    rounds, void = quiet_rounds(runs, pids, settings.repeats or 5, settings.most_void)
    return {
        "shape": str(shape),
        "void": void,
        "engines": {name: medians([figures[name] for figures in rounds]) for name in runs},
        "ratios": {name: median_ratio(rounds, OURS, name, "prompt_tokens_per_s") for name in peers},
        "rounds": rounds,
    }


def tables(figures: dict[str, Any]) -> list[Table]:
    rows = [
        [
            row["shape"],
            name,
            shown(engine["prompt_tokens_per_s"], ".1f"),
            shown(engine["prefill_s"], ".1f", 1e3),
            shown(row["ratios"].get(name), ".2f"),
            shown(engine["foreign_cores"], ".2f"),
            str(row["void"]),
        ]
        for row in figures["prefill"]
        for name, engine in row["engines"].items()
    ]
    heads = ["requests x tokens", "engine", "prompt tok/s", "ms", "ratio", "foreign", "void"]
    return [Table("", heads, rows)]


def charts(figures: dict[str, Any]) -> list[Chart]:
    rows = figures["prefill"]
    series = {
        engine: [row["engines"][engine]["prompt_tokens_per_s"] for row in rows]
        for engine in rows[0]["engines"]
    }
    labels = [row["shape"] for row in rows]
    return [Chart("prefill", "Prefill, by requests x prompt tokens", "tokens/s", labels, series)]

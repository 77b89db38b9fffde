# SPDX-License-Identifier: Apache-2.0
"""The suite serving: users' requests, with continuous batching, static batches, and the peers."""

import os
from functools import partial
from typing import Any

from engine import LLM
from engine.config import BATCHING
from scripts.benchmarks.peer import Peer, started_peers
from scripts.benchmarks.replay import (
    SHARES,
    TIMES,
    Job,
    arrivals,
    cut_prompts,
    read_lengths,
    replay,
    replay_in_batches,
    serving_figures,
)
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Figures, Run, disturbance, one_round
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.workload import run_batch
from scripts.command_line import UsageError, usage_errors


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the figures of the least disturbed round, one run of every engine each.

    The engines are Headrace with both ways of batching, or the one that was asked for, and the
    peers in static batches of as many requests as Headrace has rows.
    """
    asked = settings.options.get("batching")
    llms: dict[str, LLM] = {}
    for mode in [asked] if asked else BATCHING:
        # All have the pool of the first: a pool takes memory that the next would count as free.
        pages = [one.built.factory.num_pages for one in llms.values()]
        llms[mode] = settings.load(batching=mode, num_pages=pages[0] if pages else None)
    llm = next(iter(llms.values()))
    jobs = make_jobs(settings, llm)
    with started_peers(settings.peer_python, settings.peers) as peers:
        runs: dict[str, Run] = {}
        for mode, one in llms.items():
            run_batch(one, [job.prompt for job in jobs[:2]], [2] * len(jobs[:2]))  # warms up
            runs[mode] = partial(run_ours, one, jobs)
        rows = llm.config.max_num_seqs
        for name, peer in peers.items():
            peer.run([jobs[0].prompt], [1])  # warms up
            runs[name] = partial(run_peer, peer, jobs, rows)
        pids = [os.getpid(), *(peer.pid for peer in peers.values())]
        rounds = [one_round(runs, pids, turn) for turn in range(settings.repeats or 1)]
        about = {name: peer.about for name, peer in peers.items()}
    kept = min(rounds, key=disturbance)
    return {
        "peers": about,
        "request_rate": settings.request_rate,
        "arrival_seed": settings.arrival_seed,
        "batch_size": rows,
        "serving": kept,
        "ratios": ratios(kept),
        "rounds": rounds,
    }


def make_jobs(settings: Settings, llm: LLM) -> list[Job]:
    """Returns the requests; raises UsageError for what the model or the files have no room for."""
    lengths = read_lengths(settings.lengths)
    count = settings.num_requests
    if count > len(lengths):
        raise UsageError(
            f"--num_requests={count} is over the {len(lengths)} of {settings.lengths}; use fewer"
        )
    lengths = lengths[:count]
    longest = max(map(sum, lengths))
    if longest > llm.max_model_len:
        raise UsageError(
            f"a request has {longest} tokens and max_model_len is {llm.max_model_len}; "
            "give other --lengths, or another model"
        )
    with usage_errors(f"--text={settings.text} cannot be read: "):
        text = settings.text.read_text(encoding="utf-8")
    prompts = cut_prompts(text, llm.tokenizer, [prompt for prompt, _ in lengths])
    times = arrivals(count, settings.request_rate, settings.arrival_seed)
    outputs = [output for _, output in lengths]
    return [Job(*job) for job in zip(prompts, outputs, times, strict=True)]


def run_ours(llm: LLM, jobs: list[Job]) -> Figures:
    return serving_figures(*replay(llm, jobs))


def run_peer(peer: Peer, jobs: list[Job], batch_size: int) -> Figures:
    return serving_figures(*replay_in_batches(peer, jobs, batch_size))


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Returns the requests a second of the first engine over those of each other."""
    first, *others = figures
    rate = figures[first]["requests_per_s"]
    return {name: rate / figures[name]["requests_per_s"] for name in others}


def tables(figures: dict[str, Any]) -> list[Table]:
    engines = figures["serving"]
    first = next(iter(engines))
    rates = [
        [
            name,
            str(run["requests"]),
            shown(run["requests_per_s"], ".3f"),
            shown(run["output_tokens_per_s"], ".1f"),
            shown(run["total_s"], ".1f"),
            shown(figures["ratios"].get(name), ".2f"),
            shown(run["foreign_cores"], ".2f"),
        ]
        for name, run in engines.items()
    ]
    heads = ["engine", "requests", "requests/s", "output tok/s", "seconds", "ratio", "foreign"]
    title = f"A ratio is {first}'s requests a second over the engine's."
    times = [
        [name, time.removesuffix("_s").upper(), *(shown(v, ".1f", 1e3) for v in run[time].values())]
        for time in TIMES
        for name, run in engines.items()
    ]
    shares = [f"p{share} ms" for share in SHARES]
    return [Table(title, heads, rates), Table("", ["engine", "time", *shares], times)]


def charts(figures: dict[str, Any]) -> list[Chart]:
    engines = figures["serving"]
    rates = [run["requests_per_s"] for run in engines.values()]
    series = {"requests/s": rates}
    found = [Chart("serving_rate", "Requests a second", "requests/s", list(engines), series)]
    labels = [f"p{share}" for share in SHARES]
    for time in TIMES:
        name = time.removesuffix("_s")
        values = {engine: list(run[time].values()) for engine, run in engines.items()}
        found.append(Chart(f"serving_{name}", name.upper(), "s", labels, values))
    return found

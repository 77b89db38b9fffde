# SPDX-License-Identifier: Apache-2.0
"""The suites decode and peers: many tokens after short prompts, alone and beside other engines."""

import os
import statistics
from functools import partial
from operator import truediv
from typing import Any

import jax

from engine import LLM
from scripts.benchmarks.machine import ReadBandwidth
from scripts.benchmarks.peer import Peer, started_peers
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Run, median_ratio, medians, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.benchmarks.workload import (
    NEW_TOKENS,
    OURS,
    PROMPT_TOKENS,
    batch_runners,
    run_decode,
    workload_prompts,
)


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the figures at each number of requests, of Headrace and of the peers there are."""
    bandwidth = ReadBandwidth()
    llm = settings.load_rows(max(settings.counts))
    with started_peers(settings.peer_python, settings.peers) as peers:
        about = {"peers": {name: peer.about for name, peer in peers.items()}}
        rows = [measure_decode(settings, llm, peers, bandwidth, count) for count in settings.counts]
    return about | {"decode": rows}


def measure_decode(
    settings: Settings, llm: LLM, peers: dict[str, Peer], bandwidth: ReadBandwidth, count: int
) -> dict[str, Any]:
    """Returns the medians of `count` requests, beside the limit that reading memory sets."""
    prompts = workload_prompts(count, llm.model_config.vocab_size)
    runs: dict[str, Run] = {
        name: partial(run_decode, run, prompts) for name, run in batch_runners(llm, peers).items()
    }
    for run in runs.values():
        run()  # warms up
    ours = runs[OURS]
    # Neighbours move the bandwidth from one minute to the next: each run has its own.
    runs[OURS] = lambda: {"read_bytes_per_s": bandwidth.measure()} | ours()
    pids = [os.getpid(), *(peer.pid for peer in peers.values())]
    rounds, void = quiet_rounds(runs, pids, settings.repeats or 5, settings.most_void)
    engines = {name: medians([figures[name] for figures in rounds]) for name in runs}
    step_bytes = bytes_a_step(llm, count)
    limits = [count * r[OURS]["read_bytes_per_s"] / step_bytes for r in rounds]
    rates = [r[OURS]["decode_tokens_per_s"] for r in rounds]
    return {
        "requests": count,
        "void": void,
        "engines": engines,
        "ratios": {
            figure: {name: median_ratio(rounds, OURS, name, figure) for name in peers}
            for figure in ("decode_tokens_per_s", "output_tokens_per_s")
        },
        "read_bytes_per_s": engines[OURS]["read_bytes_per_s"],
        "step_bytes": step_bytes,
        "limit_tokens_per_s": statistics.median(limits),
        "share_of_limit": statistics.median(map(truediv, rates, limits)),
        "rounds": rounds,
    }


def bytes_a_step(llm: LLM, count: int) -> float:
    """Returns the bytes that a decode step must read: the weights, and the KV of `count` rows.

    The KV is that of the workload's mean context. Of an untied embedding a step reads a few rows.
    """
    config, params = llm.model_config, llm.engine.worker.params
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tied_embeddings:
        weights -= params["embedding"].nbytes
    context = PROMPT_TOKENS + NEW_TOKENS / 2
    cells = sum(min(context, window or context) for window in config.windows)
    cell_bytes = config.cell_width * params["embedding"].dtype.itemsize
    return weights + count * cells * cell_bytes


def tables(figures: dict[str, Any]) -> list[Table]:
    heads = ["requests", "decode tok/s", "output tok/s", "step ms", "step MB", "read GB/s"]
    heads += ["of limit", "foreign", "void"]
    rows = []
    for row in figures["decode"]:
        ours = row["engines"][OURS]
        cells = [str(row["requests"])]
        cells += [shown(ours[f"{kind}_tokens_per_s"], ".1f") for kind in ("decode", "output")]
        cells += [shown(ours["step_s"], ".2f", 1e3), shown(row["step_bytes"], ".1f", 1e-6)]
        cells += [shown(row["read_bytes_per_s"], ".1f", 1e-9), shown(row["share_of_limit"], ".0%")]
        rows.append([*cells, shown(ours["foreign_cores"], ".2f"), str(row["void"])])
    compared = [
        [
            str(row["requests"]),
            name,
            *(shown(peer[f"{kind}_tokens_per_s"], ".1f") for kind in ("decode", "output")),
            *(
                shown(row["ratios"][f"{kind}_tokens_per_s"][name], ".2f")
                for kind in ("decode", "output")
            ),
            shown(peer["foreign_cores"], ".2f"),
        ]
        for row in figures["decode"]
        for name, peer in row["engines"].items()
        if name != OURS
    ]
    found = [Table("", heads, rows)]
    if compared:
        heads = ["requests", "peer", "decode tok/s", "output tok/s", "decode ratio"]
        title = "Peers; a ratio is the median over the rounds of Headrace's over the peer's."
        found.append(Table(title, [*heads, "output ratio", "foreign"], compared))
    return found


def charts(figures: dict[str, Any]) -> list[Chart]:
    rows = figures["decode"]
    labels = [f"{row['requests']} requests" for row in rows]
    name = "peers" if figures["peers"] else "decode"
    return [
        Chart(
            f"{name}_{kind}",
            f"{title}, {PROMPT_TOKENS} + {NEW_TOKENS} tokens a request",
            "tokens/s",
            labels,
            {
                engine: [row["engines"][engine][f"{kind}_tokens_per_s"] for row in rows]
                for engine in rows[0]["engines"]
            },
        )
        for kind, title in (("decode", "Decode"), ("output", "All output"))
    ]

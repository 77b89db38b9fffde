# SPDX-License-Identifier: Apache-2.0
"""Measures the engine on this machine.

    python -m scripts.benchmark --suite=decode [--output=F.json]
        [--peer_python=PYTHON --peer_model=FOLDER] [--num_pages_compare]

The decode suite: 64 prompt and 64 new tokens a request, greedy, all requests admitted at once.
Repetitions during which other processes used more than 0.1 core are void and done again. With a
peer each repetition is a pair, one run of each engine. --num_pages_compare instead compares the
step's time with a pool of 8,192 tokens to that with a pool of what the requests need.
"""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from absl import flags

from engine import LLM, SamplingParams
from scripts.benchmarks.machine import CpuWatch, ReadBandwidth
from scripts.benchmarks.peer import Peer
from scripts.benchmarks.workload import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    decode_figures,
    workload_prompts,
)
from scripts.command_line import (
    ENGINE_OPTIONS,
    UsageError,
    define_engine_flags,
    given,
    replaced_file,
    run_command,
    to_json,
    usage_errors,
)

MOST_FOREIGN_CORES = 0.1
MOST_VOID = 10  # repetitions done again, for each number of requests, before giving up on quiet
COMPARED_POOL_TOKENS = 8192

Run = Callable[[], dict[str, Any]]


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define_engine_flags(values)
    flags.DEFINE_enum("suite", "decode", ["decode"], "What to measure.", flag_values=values)
    flags.DEFINE_list("requests", ["1", "8", "32"], "Requests at once.", flag_values=values)
    flags.DEFINE_integer(
        "repeats", 5, "Repetitions of each measurement.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string("output", None, "Where to write the figures, as JSON.", flag_values=values)
    flags.DEFINE_string(
        "peer_python", None, "Python of an environment with transformers.", flag_values=values
    )
    flags.DEFINE_string(
        "peer_model", None, "Hugging Face folder that the peer loads.", flag_values=values
    )
    flags.DEFINE_bool(
        "num_pages_compare", False, "Compare two sizes of the pool.", flag_values=values
    )
    return values


FLAGS = define_flags()


def main() -> None:
    try:
        counts = [int(text) for text in FLAGS.requests]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError("--requests must be numbers from 1 with commas between, such as 1,8,32")
    peer_python, peer_model = FLAGS.peer_python, FLAGS.peer_model
    if (peer_python is None) != (peer_model is None):
        raise UsageError("--peer_python and --peer_model go together; give both or neither")
    if FLAGS.num_pages_compare and peer_python:
        raise UsageError("--num_pages_compare has no peer; leave out --peer_python")
    options = {"max_num_seqs": max(counts)} | given(FLAGS, ENGINE_OPTIONS)
    output = FLAGS.output
    if output is None:
        print_report(measure(counts, options, peer_python, peer_model))
    else:
        with replaced_file("output", output) as file:
            report = measure(counts, options, peer_python, peer_model)
            file.write(to_json(report) + "\n")
        print_report(report)


def measure(
    counts: Sequence[int], options: dict[str, Any], peer_python: str | None, peer_model: str | None
) -> dict[str, Any]:
    """Returns the report of the suite that the flags ask for."""
    model, repeats = FLAGS.model, FLAGS.repeats
    report = {"suite": "decode", "model": model, "options": options, "machine": machine()}
    if FLAGS.num_pages_compare:
        return report | {"pools": [compare_pools(n, options, repeats) for n in counts]}
    bandwidth = ReadBandwidth()
    with usage_errors():
        llm = LLM(model, **options)
    peer = None if peer_python is None or peer_model is None else Peer(peer_python, peer_model)
    try:
        rows = [measure_decode(llm, peer, bandwidth, count, repeats) for count in counts]
    finally:
        if peer is not None:
            peer.close()
    about = {} if peer is None else {"peer": peer.about}
    return report | about | {"decode": rows}


def machine() -> dict[str, Any]:
    return {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def run_decode(llm: LLM, count: int) -> dict[str, Any]:
    """Returns the figures of one run of the workload with `count` requests."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = workload_prompts(count, llm.model_config.vocab_size)
    requests = [llm.make_request(prompt, params)[0] for prompt in prompts]
    for request in requests:
        llm.engine.add_request(request)
    while llm.engine.has_work:
        llm.engine.step()
    start = min(request.arrival_s for request in requests)
    return decode_figures(start, [request.token_times for request in requests])


def quiet_runs(
    runs: dict[str, Run], pids: Sequence[int], repeats: int, between: Callable[[], None]
) -> tuple[list[dict[str, dict[str, Any]]], int]:
    """Returns `repeats` rounds of one run of each engine in turn, and how many were void.

    The order turns round from one round to the next, so that what a run leaves behind (a full
    cache, a hot core) weighs on each. A round is void while other processes than `pids` used more
    than 0.1 core in any of its runs; after MOST_VOID of them they are kept, and their
    `foreign_cores` tells. `between` is called ahead of each round.
    """
    rounds: list[dict[str, dict[str, Any]]] = []
    void = 0
    while len(rounds) < repeats:
        between()
        figures = {}
        order = list(runs) if (len(rounds) + void) % 2 == 0 else list(reversed(runs))
        for name in order:
            watch = CpuWatch(pids)
            figures[name] = runs[name]()
            figures[name]["foreign_cores"] = watch.foreign_cores()
        noisy = any((f["foreign_cores"] or 0.0) > MOST_FOREIGN_CORES for f in figures.values())
        if noisy and void < MOST_VOID:
            void += 1
            continue
        rounds.append(figures)
    return rounds, void


def measure_decode(
    llm: LLM, peer: Peer | None, bandwidth: ReadBandwidth, count: int, repeats: int
) -> dict[str, Any]:
    """Returns the medians of `count` requests, beside the limit that reading memory sets."""
    runs: dict[str, Run] = {"headrace": lambda: run_decode(llm, count)}
    pids = [os.getpid()]
    if peer is not None:
        runs["peer"] = lambda: peer.run(count)
        pids.append(peer.pid)
    for run in runs.values():
        run()  # warms up
    read = 0.0

    def measure_bandwidth() -> None:
        nonlocal read
        read = max(read, bandwidth.measure())

    rounds, void = quiet_runs(runs, pids, repeats, measure_bandwidth)
    ours = medians([figures["headrace"] for figures in rounds])
    step_bytes = bytes_a_step(llm, count)
    limit = count * read / step_bytes
    row = ours | {
        "requests": count,
        "void": void,
        "read_bytes_per_s": read,
        "step_bytes": step_bytes,
        "limit_tokens_per_s": limit,
        "share_of_limit": ours["decode_tokens_per_s"] / limit,
        "rounds": rounds,
    }
    if peer is not None:
        row["peer"] = medians([figures["peer"] for figures in rounds])
        row["ratio_to_peer"] = statistics.median(
            figures["headrace"]["decode_tokens_per_s"] / figures["peer"]["decode_tokens_per_s"]
            for figures in rounds
        )
    return row


def medians(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of each figure; one that some run lacks is None."""
    columns = {name: [run[name] for run in figures] for name in figures[0]}
    return {
        name: None if None in values else statistics.median(values)
        for name, values in columns.items()
    }


def bytes_a_step(llm: LLM, count: int) -> float:
    """Returns the bytes that a decode step must read: the weights, and the KV of `count` rows.

    The KV is that of the workload's mean context. Of an untied embedding a step reads a few rows.
    """
    config, params = llm.model_config, llm.engine.params
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tied_embeddings:
        weights -= params["embedding"].nbytes
    context = PROMPT_TOKENS + NEW_TOKENS / 2
    cells = sum(min(context, window or context) for window in config.windows)
    cell_bytes = 2 * config.kv_heads * config.head_width * params["embedding"].dtype.itemsize
    return weights + count * cells * cell_bytes


def compare_pools(count: int, options: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Returns the step's time with a pool of 8,192 tokens, and with one of what is needed.

    Both pools are for a model of one page group; page 0 is the reserved one.
    """
    page_size = options.get("page_size") or 16
    tokens = {"large": COMPARED_POOL_TOKENS, "needed": count * (PROMPT_TOKENS + NEW_TOKENS)}
    runs: dict[str, Run] = {}
    for name, pool in tokens.items():
        pages = -(-pool // page_size) + 1
        with usage_errors():
            llm = LLM(FLAGS.model, **options | dict(page_size=page_size, num_pages=pages))
        if len(llm.engine.stats()["pages"]) > 1:
            raise UsageError("--num_pages_compare is for models of one page group; try another")
        runs[name] = lambda llm=llm: run_decode(llm, count)  # type: ignore[misc]
        runs[name]()  # warms up
    rounds, void = quiet_runs(runs, [os.getpid()], repeats, lambda: None)
    steps = {name: statistics.median(f[name]["step_s"] for f in rounds) for name in runs}
    return {
        "requests": count,
        "pool_tokens": tokens,
        "step_s": steps,
        "ratio": statistics.median(f["large"]["step_s"] / f["needed"]["step_s"] for f in rounds),
        "void": void,
        "rounds": rounds,
    }


def print_report(report: dict[str, Any]) -> None:
    """Prints the report as a table."""
    about = report["machine"]
    print(f"{report['model']} on {about['device']}, {about['cores']} cores, jax {about['jax']}")
    if "pools" in report:
        print(table_line(["requests", "needed ms", "8192 ms", "ratio", "void"]))
        for row in report["pools"]:
            steps = [shown(row["step_s"][name] * 1e3, ".2f") for name in ("needed", "large")]
            print(
                table_line(
                    [str(row["requests"]), *steps, shown(row["ratio"], ".3f"), str(row["void"])]
                )
            )
        return
    heads = ("requests", "decode tok/s", "output tok/s", "step ms", "step MB", "read GB/s")
    print(table_line([*heads, "of limit", "foreign", "void", "peer tok/s", "ratio"]))
    for row in report["decode"]:
        peer = row.get("peer", {})
        cells = [
            str(row["requests"]),
            shown(row["decode_tokens_per_s"], ".1f"),
            shown(row["output_tokens_per_s"], ".1f"),
            shown(row["step_s"] * 1e3, ".2f"),
            shown(row["step_bytes"] / 1e6, ".1f"),
            shown(row["read_bytes_per_s"] / 1e9, ".1f"),
            shown(row["share_of_limit"], ".0%"),
            shown(row["foreign_cores"], ".2f"),
            str(row["void"]),
            shown(peer.get("decode_tokens_per_s"), ".1f"),
            shown(row.get("ratio_to_peer"), ".2f"),
        ]
        print(table_line(cells))


def table_line(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>12}" for cell in cells)


def shown(value: float | None, form: str) -> str:
    """Returns the value as `form` writes it; a dash for what there is none of."""
    return "-" if value is None else format(value, form)


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, or 2 with one line on stderr that names the fault and the remedy."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

# SPDX-License-Identifier: Apache-2.0
"""Measures the engine on this machine.

    python -m scripts.benchmark
        --suite=decode|prefill|startup|loading|peers|serving|sampling|scheduler|steps|scoring
                |prefix|processes|kernels
        [--output=F.json] [--charts=FOLDER] [--repeats=N]
        [--peer_python=PYTHON --peer_model=FOLDER --peer_gguf=FILE]

decode: 64 prompt and 64 new tokens a request, all requests at once. peers: the same, beside
transformers and llama.cpp. prefill: prompt tokens a second. startup: a cold start and warm ones.
loading: files to parameters, beside a copy of them, and GGUF types beside the gguf package.
serving: users' requests, with continuous batching, static batches and the peers. sampling: what
each field costs. scheduler: host time of a step, with no device work. steps: several decode steps
in one dispatch against one. scoring: choices in one call, and one by one. prefix: the cache of
prefixes beside none. processes: the leader's host time by the number of processes. kernels: each
operation at the shapes of models, beside the device's rates and jax's own kernels; --model plays no
part. Rounds during which other processes used more than 0.1 core are void and done again; serving
tells what they used.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from absl import flags

from engine.config import EngineConfig
from scripts.benchmarks import (
    decode,
    kernels,
    loading,
    multistep,
    pools,
    prefill,
    prefix,
    processes,
    sampling,
    scheduler,
    scoring,
    serving,
    startup,
)
from scripts.benchmarks.machine import about_machine
from scripts.benchmarks.report import Chart, Table, draw_charts, find_matplotlib, print_tables
from scripts.benchmarks.settings import Settings, define_flags, read_settings
from scripts.command_line import (
    UsageError,
    replaced_file,
    run_command,
    to_json,
    usage_errors,
)


class Suite(NamedTuple):
    """What a suite measures and how its figures are shown.

    peers: whether it has other engines. model: whether it has a model.
    """

    measure: Callable[[Settings], dict[str, Any]]
    tables: Callable[[dict[str, Any]], list[Table]]
    charts: Callable[[dict[str, Any]], list[Chart]]
    peers: Literal["never", "perhaps", "always"]
    model: bool = True


SUITES = {
    "decode": Suite(decode.measure, decode.tables, decode.charts, "never"),
    "prefill": Suite(prefill.measure, prefill.tables, prefill.charts, "perhaps"),
    "startup": Suite(startup.measure, startup.tables, startup.charts, "never"),
    "loading": Suite(loading.measure, loading.tables, loading.charts, "never"),
    "peers": Suite(decode.measure, decode.tables, decode.charts, "always"),
    "serving": Suite(serving.measure, serving.tables, serving.charts, "perhaps"),
    "sampling": Suite(sampling.measure, sampling.tables, sampling.charts, "never"),
    "scheduler": Suite(scheduler.measure, scheduler.tables, scheduler.charts, "never"),
    "steps": Suite(multistep.measure, multistep.tables, multistep.charts, "never"),
    "scoring": Suite(scoring.measure, scoring.tables, scoring.charts, "never"),
    "prefix": Suite(prefix.measure, prefix.tables, prefix.charts, "never"),
    "processes": Suite(processes.measure, processes.tables, processes.charts, "never"),
    "kernels": Suite(kernels.measure, kernels.tables, kernels.charts, "never", model=False),
}
POOLS = Suite(pools.measure, pools.tables, pools.charts, "never")

FLAGS = define_flags(list(SUITES))


def main() -> None:
    settings = read_settings(FLAGS)
    suite = chosen_suite(FLAGS, settings)
    with usage_errors():
        EngineConfig(model=settings.model, **settings.options)
    model = settings.model if suite.model else None
    about = {"suite": FLAGS.suite, "model": model, "options": settings.options}
    with contextlib.ExitStack() as files:
        # Opened before the work, so that a wrong path costs none.
        output = (
            files.enter_context(replaced_file("output", FLAGS.output)) if FLAGS.output else None
        )
        charts = chart_folder(FLAGS.charts) if FLAGS.charts else None
        figures = suite.measure(settings)
        machine = about_machine()
        if output is not None:
            output.write(to_json(about | {"machine": machine} | figures) + "\n")
    measured = model or FLAGS.suite
    print(f"{measured} on {machine['device']}, {machine['cores']} cores, jax {machine['jax']}")
    print_tables(suite.tables(figures))
    if charts is not None:
        with usage_errors(f"--charts={FLAGS.charts} cannot be written: "):
            draw_charts(suite.charts(figures), charts)


def chosen_suite(values: flags.FlagValues, settings: Settings) -> Suite:
    """Returns the suite that the flags ask for; raises UsageError where peers do not fit it."""
    suite = SUITES[values.suite]
    if values.num_pages_compare:
        if values.suite != "decode":
            raise UsageError("--num_pages_compare is of --suite=decode; leave out one of them")
        suite = POOLS
    if settings.peers and suite.peers == "never":
        raise UsageError(
            "--peer_python is for --suite=peers, prefill or serving; choose one of them or leave "
            "it out"
        )
    if not settings.peers and suite.peers == "always":
        raise UsageError("--suite=peers needs --peer_python with --peer_model, --peer_gguf or both")
    return suite


def chart_folder(path: str) -> Path:
    """Returns the folder for charts, made if missing; raises UsageError where it cannot be."""
    find_matplotlib()
    folder = Path(path)
    with usage_errors(f"--charts={path} cannot be a folder: "):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--charts={path} cannot be written; name a folder that can")
    return folder


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, or 2 with one line on stderr that names the fault and the remedy."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

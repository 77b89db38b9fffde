# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic, its void rounds, and what it reads from the machine."""

import os
import sys
import time
import types

import numpy as np
import pytest

from scripts import benchmark
from scripts.benchmarks.machine import CpuWatch, ReadBandwidth, process_ticks
from scripts.benchmarks.peer import Peer
from scripts.benchmarks.workload import decode_figures, workload_prompts
from scripts.command_line import UsageError


def test_decode_counts_what_comes_after_the_last_first_token():
    # The second request's first token comes at 4; since then, five tokens in two seconds.
    figures = decode_figures(1.0, [[2.0, 3.0, 4.0, 5.0, 6.0], [4.0, 4.5, 5.0, 6.0]])
    assert figures["decode_tokens_per_s"] == 5 / 2
    assert figures["output_tokens_per_s"] == 9 / 5
    assert figures["step_s"] == pytest.approx(2 / 3)
    assert figures["ttft_s"] == 3


def test_the_workload_is_the_same_each_time():
    assert workload_prompts(3, 300) == workload_prompts(3, 300)
    assert workload_prompts(3, 300)[:2] == workload_prompts(2, 300)
    assert all(len(prompt) == 64 and max(prompt) < 300 for prompt in workload_prompts(3, 300))


def test_void_rounds_are_done_again_but_not_for_ever(monkeypatch):
    noise = []
    monkeypatch.setattr(
        benchmark,
        "CpuWatch",
        lambda pids: types.SimpleNamespace(foreign_cores=lambda: noise.pop(0)),
    )
    noise[:] = [0.0, 0.5, 0.2, 0.0, 0.05, 0.1, None, None]
    runs = {"a": lambda: {"x": 1}, "b": lambda: {"x": 2}}
    rounds, void = benchmark.quiet_runs(runs, [], 2, lambda: None)
    assert void == 2
    assert [[f["foreign_cores"] for f in r.values()] for r in rounds] == [[0.05, 0.1], [None, None]]
    noise[:] = [0.9] * 100
    rounds, void = benchmark.quiet_runs({"a": lambda: {"x": 1}}, [], 2, lambda: None)
    assert (len(rounds), void) == (2, benchmark.MOST_VOID)


def test_medians_leave_out_what_is_not_known():
    runs = [{"x": 1.0, "y": None}, {"x": 3.0, "y": 1.0}, {"x": 9.0, "y": 2.0}]
    assert benchmark.medians(runs) == {"x": 3.0, "y": None}


def test_bytes_of_a_step_are_the_weights_and_the_cells():
    params = {"embedding": np.ones((10, 4), np.float32), "head": np.ones((10, 4), np.float32)}
    config = types.SimpleNamespace(
        tied_embeddings=False, kv_heads=2, head_width=3, windows=(None, 8)
    )
    llm = types.SimpleNamespace(model_config=config, engine=types.SimpleNamespace(params=params))
    # The head alone; two rows, 96 cells of the full layer and 8 of the windowed one.
    assert benchmark.bytes_a_step(llm, 2) == 160 + 2 * (96 + 8) * 2 * 2 * 3 * 4


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs Linux's /proc")
def test_our_own_work_is_not_foreign():
    mine, none = CpuWatch([os.getpid()]), CpuWatch([])
    before = process_ticks(os.getpid())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert process_ticks(os.getpid()) - before >= 10
    assert none.foreign_cores() - mine.foreign_cores() > 0.1


def test_bandwidth_is_measured(monkeypatch):
    monkeypatch.setattr("scripts.benchmarks.machine.BUFFER_BYTES", 4 * 10**6)
    assert ReadBandwidth().measure(repeats=1) > 1e6


@pytest.mark.parametrize(
    "python, message",
    [("no/such/python", "cannot be run"), (sys.executable, "the peer has ended")],
)
def test_a_peer_that_cannot_run_is_named(python, message):
    with pytest.raises(UsageError, match=message):
        Peer(python, "nowhere")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--requests=1,x"], "--requests must be numbers from 1"),
        (["--requests=0"], "--requests must be numbers from 1"),
        (["--peer_python=p"], "--peer_python and --peer_model go together"),
        (["--suite=none"], "--suite=none"),
        (["--repeats=0"], "--repeats=0"),
    ],
)
def test_a_wrong_use_gives_one_clear_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "FLAGS", benchmark.define_flags())
    with pytest.raises(SystemExit) as end:
        benchmark.run(["scripts/benchmark.py", *arguments])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert message in err.replace("flag ", "")
    assert err.count("\n") == 1

# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic, its rounds, its requests, and what it reads from the machine."""

import itertools
import json
import os
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from engine import SamplingParams
from engine.request import Request
from scripts.benchmarks import decode, kernel_timing, kernels, rounds, startup
from scripts.benchmarks.kernel_timing import Contender, compiled, difference, timed_twice
from scripts.benchmarks.machine import CpuWatch, ReadBandwidth, process_ticks
from scripts.benchmarks.peer import Peer, PeerPlan, started_peers
from scripts.benchmarks.replay import (
    arrivals,
    cut_prompts,
    read_lengths,
    serving_figures,
)
from scripts.benchmarks.report import Chart, Table, draw_charts, print_tables, shown
from scripts.benchmarks.settings import LENGTHS, PROSE
from scripts.benchmarks.workload import decode_figures, prefill_figures, workload_prompts
from scripts.command_line import UsageError
from tests.fixtures import byte_tokenizer

# --- figures ---


def numbers(*shape):
    """Returns what makes arrays of a shape, one a call."""
    return lambda: (jnp.ones(shape, jnp.float32), jnp.full(shape, 0.5, jnp.float32))


def test_a_program_does_its_calls_with_each_copy_in_turn(monkeypatch):
    monkeypatch.setattr(kernel_timing, "CACHE_BYTES", 3 * 2 * 4 * 4)
    seen = []

    def call(x, w):
        io_callback(lambda: seen.append(1), None, ordered=True)
        return x + w

    contender = Contender(call, numbers(2, 2))
    program = compiled(contender, 7)
    assert (program.copies, program.calls) == (3, 9)
    seconds, result = timed_twice(contender, program)
    assert len(seen) == 2 * 9 and seconds > 0 and np.asarray(result).tolist() == [[1.5, 1.5]] * 2


def test_a_program_in_place_goes_on_from_what_came_back():
    contender = Contender(lambda x, w: x + w, numbers(2, 2), in_place=True)
    program = compiled(contender, 10)
    assert (program.copies, program.calls) == (1, 10)
    assert float(timed_twice(contender, program)[1][0, 0]) == 1 + 2 * 10 * 0.5


def test_no_call_is_done_ahead_of_the_loop_or_left_out(monkeypatch):
    monkeypatch.setattr(kernel_timing, "CACHE_BYTES", 1 << 30)
    contender = Contender(jnp.dot, numbers(96, 96))
    text = compiled(contender, 8).run.as_text()
    entry = text[text.index("ENTRY ") :]
    assert text.count(" dot(") == contender.copies == 4 and " dot(" not in entry


def test_a_run_is_long_enough(monkeypatch):
    lengths = []

    def timed(contender, program):
        lengths.append(program.calls)
        return 1e-3 + program.calls * 1e-5, None  # dispatch, and the calls

    monkeypatch.setattr(kernel_timing, "timed_twice", timed)
    monkeypatch.setattr(kernel_timing, "CACHE_BYTES", 1)
    program, _ = kernel_timing.long_enough(Contender(jnp.add, numbers(2, 2)))
    assert lengths == [8, 370, program.calls] and 0.025 <= program.calls * 1e-5 <= 0.1


def test_results_differ_by_a_share_of_the_largest_number():
    ones = (jnp.array([1.0, -4.0]), jnp.array([2, 3]))
    assert difference(ones, ones) == 0
    assert difference((jnp.array([1.5, -4.0]), jnp.array([2, 3])), ones) == 0.125
    assert np.isnan(difference((jnp.array([jnp.nan, -4.0]), jnp.array([2, 3])), ones))


def test_the_limit_of_a_call_is_its_bytes_or_its_operations():
    rates = {"copy": 100.0, "matmul": 1000.0, "int8": 2000.0}
    row = {"engines": {"kernel": {"seconds": 4.0}}, "reasons": {}}
    work = {"bytes": 200, "flops": 3000, "numbers": "bfloat16"}
    found = kernels.with_shares(row | {"work": work}, rates)
    assert (found["limit_s"], found["bound"], found["share_of_limit"]) == (3, "matmul", 0.75)
    assert found["shares"] == {"copy": 0.5, "matmul": 0.75}
    found = kernels.with_shares(row | {"work": work | {"numbers": "int8"}}, rates)
    assert (found["limit_s"], found["bound"]) == (2, "copy")
    # A device without a rate for int8 is held to that of bfloat16.
    found = kernels.with_shares(row | {"work": work | {"numbers": "int8"}}, rates | {"int8": None})
    assert found["limit_s"] == 3
    failed = {"engines": {}, "reasons": {"kernel": "why"}, "work": work}
    assert kernels.with_shares(failed, rates)["share_of_limit"] is None


def test_goals_are_of_shapes_that_there_are():
    for goal in kernels.GOALS:
        assert (
            goal.shape
            in kernels.importlib.import_module(f"pallas_kernels.{goal.operation}.cases").SHAPES
        )
    row = {"operation": "flash_attention", "shape": "llama-3.1-8b"}
    [goal] = kernels.reached([row | {"shares": {"copy": 0.9, "matmul": 0.6}}])
    assert goal["share"] == 0.6 and kernels.is_reached(goal)
    [goal] = kernels.reached([row | {"shares": {}}])
    assert goal["share"] is None and not kernels.is_reached(goal)


def test_decode_counts_what_comes_after_the_last_first_token():
    # The second request's first token comes at 4; since then, five tokens in two seconds.
    figures = decode_figures(1.0, [[2.0, 3.0, 4.0, 5.0, 6.0], [4.0, 4.5, 5.0, 6.0]])
    assert figures["decode_tokens_per_s"] == 5 / 2
    assert figures["output_tokens_per_s"] == 9 / 5
    assert figures["step_s"] == pytest.approx(2 / 3)
    assert figures["ttft_s"] == 3


def test_prefill_lasts_to_the_last_first_token():
    figures = prefill_figures(1.0, [[2.0], [5.0]], 64)
    assert figures == {"prompt_tokens": 128, "prefill_s": 4.0, "prompt_tokens_per_s": 32.0}


def test_the_workload_is_the_same_each_time():
    assert workload_prompts(3, 300) == workload_prompts(3, 300)
    assert workload_prompts(3, 300)[:2] == workload_prompts(2, 300)
    assert all(len(prompt) == 64 and max(prompt) < 300 for prompt in workload_prompts(3, 300))


def test_bytes_of_a_step_are_the_weights_and_the_cells():
    params = {"embedding": np.ones((10, 4), np.float32), "head": np.ones((10, 4), np.float32)}
    config = types.SimpleNamespace(tied_embeddings=False, cell_width=12, windows=(None, 8))
    engine = types.SimpleNamespace(worker=types.SimpleNamespace(params=params))
    llm = types.SimpleNamespace(model_config=config, engine=engine)
    # The head alone; two rows, 96 cells of the full layer and 8 of the windowed one.
    assert decode.bytes_a_step(llm, 2) == 160 + 2 * (96 + 8) * 2 * 2 * 3 * 4


def test_serving_figures_are_of_all_requests():
    def request(arrival, times):
        return Request(
            prompt_token_ids=[1, 2],
            params=SamplingParams(),
            limit=9,
            seed=0,
            arrival_s=arrival,
            token_times=times,
        )

    # TTFT 2, 1 and 4; the one of a single token has no TPOT and no gap.
    requests = [request(1.0, [3.0, 4.0, 7.0]), request(2.0, [3.0, 3.5]), request(4.0, [8.0])]
    figures = serving_figures(0.0, requests)
    assert (figures["requests"], figures["prompt_tokens"], figures["output_tokens"]) == (3, 6, 6)
    assert figures["requests_per_s"] == 3 / 8 and figures["output_tokens_per_s"] == 6 / 8
    assert figures["ttft_s"] == {"p50": 2, "p95": pytest.approx(3.8), "p99": pytest.approx(3.96)}
    assert figures["tpot_s"]["p50"] == (2 + 0.5) / 2
    assert figures["itl_s"]["p50"] == 1  # of 0.5, 1 and 3
    assert figures["e2e_s"]["p50"] == 4  # of 6, 1.5 and 4


def test_the_median_start_and_what_dominates_it():
    def start(load):
        return {
            "ready_s": load + 1,
            "first_token_s": load + 2,
            "all_programs_s": load + 3,
            "foreign_cores": None,
            "phases": {"import jax": 1.0, "load": load},
            "programs": {"body": load / 2},
            "compiled": 0,
            "loaded": 1,
        }

    median = startup.median_start([start(3.0), start(9.0), start(4.0)])
    assert median["ready_s"] == 5 and median["programs"] == {"body": 2.0}
    assert median["foreign_cores"] is None
    assert startup.dominant(median["phases"]) == {"phase": "load", "share": 0.8}


# --- rounds ---


def test_the_order_of_a_round_turns():
    names = ["a", "b", "c"]
    orders = [rounds.rotated(names, turn) for turn in range(4)]
    assert ["".join(order) for order in orders] == ["abc", "bca", "cab", "abc"]


def test_void_rounds_are_done_again_but_not_for_ever(monkeypatch):
    noise, ran = [], []
    watch = types.SimpleNamespace(foreign_cores=lambda: noise.pop(0))
    monkeypatch.setattr(rounds, "CpuWatch", lambda pids: watch)
    noise[:] = [0.0, 0.5, 0.2, 0.0, 0.05, 0.1, None, None]
    runs = {name: lambda name=name: ran.append(name) or {"x": 1} for name in "ab"}
    kept, void = rounds.quiet_rounds(runs, [], 2, most_void=3)
    assert void == 2
    assert "".join(ran) == "abbaabba"
    # The first kept round ran a first, the second b.
    assert [[r[name]["foreign_cores"] for name in "ab"] for r in kept] == [[0.05, 0.1], [None] * 2]
    assert [rounds.disturbance(r) for r in kept] == [0.1, 0.0]
    noise[:] = [0.9] * 100
    kept, void = rounds.quiet_rounds({"a": lambda: {"x": 1}}, [], 2, most_void=3)
    assert (len(kept), void) == (2, 3)


def test_medians_leave_out_what_is_not_known_and_ratios_are_of_rounds():
    runs = [{"x": 1.0, "y": None}, {"x": 3.0, "y": 1.0}, {"x": 9.0, "y": 2.0}]
    assert rounds.medians(runs) == {"x": 3.0, "y": None}
    pairs = [{"a": {"x": a}, "b": {"x": b}} for a, b in [(2, 1), (3, 6), (10, 2.5)]]
    assert rounds.median_ratio(pairs, "a", "b", "x") == 2


# --- requests ---


def test_arrivals_are_poisson_and_the_same_each_time():
    times = arrivals(4000, 5.0, seed=1)
    assert times == arrivals(4000, 5.0, seed=1) and times != arrivals(4000, 5.0, seed=2)
    gaps = np.diff([0.0, *times])
    # Exponential gaps: mean and deviation are both 1/5; their error here is 1/5 / sqrt(4000).
    assert abs(gaps.mean() - 0.2) < 5 * 0.2 / 4000**0.5
    assert abs(gaps.std() - 0.2) < 10 * 0.2 / 4000**0.5
    assert gaps.min() > 0
    assert arrivals(3, float("inf"), seed=1) == [0.0] * 3


def test_the_committed_lengths_are_sharegpts():
    lengths = read_lengths(LENGTHS)
    assert len(lengths) == 200 and max(map(sum, lengths)) == 1986
    assert sum(prompt for prompt, _ in lengths) == 39642
    assert sum(output for _, output in lengths) == 46058


def test_prompts_have_their_lengths_and_differ():
    backend = byte_tokenizer()
    tokenizer = types.SimpleNamespace(
        encode=lambda text, add_special_tokens: backend.encode(text, add_special_tokens=False).ids,
        add_bos=False,
        bos_id=None,
    )
    text = PROSE.read_text()
    size = len(tokenizer.encode(text, False))
    lengths = [1, 7, 500, size + 3]
    prompts = cut_prompts(text, tokenizer, lengths)
    assert [len(prompt) for prompt in prompts] == lengths
    assert prompts[3][:3] == prompts[3][size:], "the text goes round"
    starts = cut_prompts(text, tokenizer, [40] * 200)
    assert len(set(map(tuple, starts))) == 200
    tokenizer.add_bos, tokenizer.bos_id = True, 1
    with_bos = cut_prompts(text, tokenizer, lengths)
    assert all(prompt[0] == 1 for prompt in with_bos)
    assert [len(prompt) for prompt in with_bos] == lengths
    with pytest.raises(UsageError, match="has no words"):
        cut_prompts("", tokenizer, [1])
    with pytest.raises(UsageError, match="no tokenizer"):
        cut_prompts(text, None, [1])


def test_a_wrong_line_of_lengths_is_named(tmp_path):
    path = tmp_path / "lengths.jsonl"
    good = {"prompt_len": 1, "output_len": 2}
    for bad in (
        "{",
        "[]",
        "7",
        '{"prompt_len": 1}',
        *(json.dumps(good | {"output_len": n}) for n in (0, 1.5, True)),
    ):
        path.write_text(json.dumps(good) + "\n" + bad)
        with pytest.raises(UsageError, match="lengths.jsonl line 2 is wrong; write {"):
            read_lengths(path)
    path.write_text("")
    with pytest.raises(UsageError, match="has no lines"):
        read_lengths(path)


# --- report ---


def test_tables_align_and_dashes_stand_for_what_is_not_known(capsys):
    print_tables(
        [Table("Title", ["a", "long head"], [["wide cell", "1"], [shown(None, ".1f"), "22"]])]
    )
    assert capsys.readouterr().out == (
        "Title\n        a  long head\nwide cell          1\n        -         22\n"
    )
    assert shown(0.0125, ".1f", 1e3) == "12.5"


def test_charts_are_pngs(tmp_path):
    series = {"ours": [1.0, None], "theirs": [2.0, 3.0]}
    draw_charts([Chart("name", "Title", "unit", ["x", "y"], series)], tmp_path)
    data = (tmp_path / "name.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000


def test_charts_without_matplotlib_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"needs matplotlib.*pip install 'headrace\[bench\]'"):
        draw_charts([], tmp_path)


# --- the machine and its processes ---


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
    "python, model, message",
    [
        ("no/such/python", ".", "cannot be run .* name the python of an environment"),
        (sys.executable, ".", "the peer none has ended"),
        (sys.executable, "nowhere", "--peer_model=nowhere does not exist"),
    ],
)
def test_a_peer_that_cannot_run_is_named(python, model, message):
    with pytest.raises(UsageError, match=message):
        Peer(python, PeerPlan("none", "scripts.no_such_peer", "--peer_model", model))


def test_a_peer_that_ends_midway_is_named(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "{}"; read line; echo broken >&2\n')
    python.chmod(0o700)
    plan = PeerPlan("short", "scripts.none", "--peer_gguf", str(python))
    with (
        pytest.raises(UsageError, match="the peer short has ended"),
        started_peers(str(python), [plan]) as peers,
    ):
        peers["short"].run([[1]], [1])


def test_each_pair_of_orders_comes_equally_often():
    """Over as many rounds as there are engines, each engine runs once in each place."""
    names = ["a", "b", "c"]
    orders = [rounds.rotated(names, turn) for turn in range(3)]
    for place, name in itertools.product(range(3), names):
        assert sum(order[place] == name for order in orders) == 1

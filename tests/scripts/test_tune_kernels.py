# SPDX-License-Identifier: Apache-2.0
"""The tuner, with interpreted kernels at tiny shapes in the place of a chip's."""

import inspect
import json
import os

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.backends import Backend, decline
from pallas_kernels.grouped_matmul import cases as grouped
from pallas_kernels.quantized_matmul import cases
from scripts import tune_kernels
from scripts.benchmarks import kernel_timing

BACKEND = Backend("tpu", "v5e", True)
NAME = "llama-3.1-8b qkv, 8 rows, int8"
SHAPE = cases.real(8, 256, 256, "int8", None)
RULE = {"a": 4, "b": 4, "c": 4}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Returns a function that runs the command: (exit code, stdout, stderr)."""
    monkeypatch.setattr(kernel_timing, "LEAST_S", 0.0)
    monkeypatch.setattr(kernel_timing, "CACHE_BYTES", 1)

    def run(*arguments):
        monkeypatch.setattr(tune_kernels, "FLAGS", tune_kernels.define_flags())
        with pytest.raises(SystemExit) as caught:
            tune_kernels.run(["tune_kernels", f"--folder={tmp_path}", *arguments])
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def tiny(monkeypatch):
    """Has the command find an interpreted chip, and one tiny shape of two operations."""
    monkeypatch.setattr(tune_kernels, "find_backend", lambda: BACKEND)
    monkeypatch.setattr(cases, "SHAPES", {NAME: SHAPE})
    monkeypatch.setattr(grouped, "SHAPES", {})


def clock(monkeypatch, seconds_of):
    """Has a candidate take what a function of its sizes says."""

    def median(search, contender, program):
        return seconds_of(sizes_of(contender))

    monkeypatch.setattr(tune_kernels.Search, "_median", median)
    monkeypatch.setattr(
        tune_kernels.Search, "compare", lambda search, best: (best.seconds, search.rule.seconds)
    )


def sizes_of(contender):
    """Returns the sizes that a candidate's call is traced with."""
    return inspect.getclosurevars(contender.call).nonlocals["blocks"]


def test_the_best_sizes_are_written_and_found_again(run, tiny, monkeypatch, tmp_path):
    seconds = {256: 2.0, 128: 1.0}
    clock(monkeypatch, lambda blocks: seconds.get(blocks["depth"], 3.0))
    kept = {"chip": "h100", "shape": {"T": 1}, "dtype": "x", "blocks": {"rows": 1}}
    path = tmp_path / "quantized_matmul" / tuning.FILE
    path.parent.mkdir()
    path.write_text(json.dumps([kept]))
    code, out, err = run("--operations=quantized_matmul,grouped_matmul", "--shapes=qkv")
    assert (code, err) == (0, "")
    assert f"quantized_matmul, {NAME}: " in out and "depth=128" in out
    lines = path.read_text().splitlines()
    entries = [json.loads(line.rstrip(",")) for line in lines[1:-1]]
    assert entries[0] == kept and len(entries) == 2
    entry = entries[1]
    assert entry["blocks"]["depth"] == 128 and entry["chip"] == "v5e"
    assert entry["seconds"] == 1.0 and entry["untuned_seconds"] == 2.0
    assert entry["jax"] == jax.__version__ and len(entry["date"]) == 10
    assert os.listdir(path.parent) == [tuning.FILE]
    # The kernel now takes them: what it asks for has the entry's key.
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    call, arguments = cases.abstract_call(SHAPE, BACKEND)
    with tuning.trial() as asked:
        jax.eval_shape(call, *arguments)
    operation, chip, shape, dtype, rule = asked[0]
    assert rule["depth"] == 256
    assert tuning.block_sizes(operation, chip, shape, dtype, rule) == entry["blocks"]
    # Again: the entry makes way for another of its key.
    clock(monkeypatch, lambda blocks: 3.0)
    assert run("--operations=quantized_matmul")[0] == 0
    again = json.loads(path.read_text())
    assert len(again) == 2 and again[0] == kept and again[1]["blocks"] == rule
    assert again[1]["seconds"] == again[1]["untuned_seconds"] == 3.0


def test_real_runs_are_timed(run, tiny):
    code, out, err = run("--operations=quantized_matmul", "--repeats=1")
    assert code == 0 and " us, " in out, err


def fake(monkeypatch, result_of):
    """Has a product's result be made of its sizes: what is asked for is RULE."""

    def abstract_call(shape, backend):
        def call(x_TD):
            sizes = tuning.block_sizes("product", "v5e", {"T": 8}, "float32", RULE)
            return result_of(sizes, x_TD)

        return call, (jax.ShapeDtypeStruct((8, 8), "float32"),)

    monkeypatch.setattr(cases, "abstract_call", abstract_call)
    monkeypatch.setattr(cases, "concrete", lambda *_: (jax.numpy.ones((8, 8), "float32"),))


def test_declined_failed_and_wrong_candidates_are_passed_over(run, monkeypatch):
    def result_of(sizes, x_TD):
        if sizes["a"] == 2:
            decline("product", "a=2")
        if sizes["a"] == 8:
            raise NotImplementedError("a=8")
        return x_TD * {(1, 4): 1.5, (2, 8): float("nan")}.get((sizes["b"], sizes["c"]), 1.001)

    fake(monkeypatch, result_of)
    clock(monkeypatch, lambda blocks: blocks["b"])
    monkeypatch.setattr(kernel_timing, "LEAST_S", 0.0)
    tuned = tune_kernels.tune("quantized_matmul", None, BACKEND, 1)
    assert tuned.blocks == RULE | {"b": 2}
    # a=2 and a=8 are looked at beside b=4, and again beside b=2.
    assert tuned.passed_over == {"declined": 2, "failed": 2, "wrong": 2}
    assert (tuned.seconds, tuned.untuned_seconds) == (2, 4)
    line = "2.00 x the rule's; 8 tried (2 declined, 2 failed, 2 wrong)"
    assert tune_kernels.told(tuned).endswith(line)


def test_a_step_has_to_gain_more_than_noise(run, monkeypatch):
    fake(monkeypatch, lambda sizes, x_TD: x_TD)
    clock(monkeypatch, lambda blocks: 1.0 - 0.001 * blocks["a"])
    monkeypatch.setattr(kernel_timing, "LEAST_S", 0.0)
    assert tune_kernels.tune("quantized_matmul", None, BACKEND, 1).blocks == RULE


def test_a_kernel_that_declines_the_shape_is_not_measured(run, tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "SHAPES", {NAME: cases.real(8, 60, 256, "int8", 12)})
    code, out, err = run("--operations=quantized_matmul")
    assert (code, err) == (0, "") and "declined: quantized_matmul: groups of 12" in out
    assert not list(tmp_path.iterdir())


def test_an_operation_without_sizes_says_so(run, tiny, tmp_path):
    code, out, _ = run("--operations=kv_write", "--shapes=smollm2")
    assert code == 0 and "there are no sizes to choose" in out and not list(tmp_path.iterdir())


def test_sizes_move_by_twos_and_odd_ones_are_not_halved():
    moved = tune_kernels.moved
    assert [moved("rows", 8, step) for step in (-1, 1)] == [4, 16]
    assert [moved("rows", 9, step) for step in (-1, 1)] == [None, 18]
    assert [moved("stages", 1, step) for step in (-1, 1)] == [None, 2]
    assert [moved("warps", 8, step) for step in (-1, 1)] == [4, None]


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "there is no TPU or GPU here, only cpu"),
        (["--operations=matmul"], "--operations=matmul is not known; name some of paged_attention"),
        (["--shapes=gpt-7"], "--shapes=gpt-7 names no shape of paged_attention"),
        (["--repeats=0"], "repeats"),
    ],
)
def test_wrong_uses_are_one_line(run, arguments, line):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and line in err and err.count("\n") == 1


def test_what_is_wrong_with_a_chip_or_a_folder_is_said_first(run, monkeypatch):
    monkeypatch.setattr(tune_kernels, "choose", lambda *_: Backend("gpu", ""))
    code, _, err = run()
    assert code == 2 and "is no chip that sizes are kept for; those are TPU v4, TPU v5 lite" in err
    monkeypatch.setattr(tune_kernels, "find_backend", lambda: BACKEND)
    code, _, err = run("--folder=/none/at/all")
    assert code == 2 and "--folder=/none/at/all is no folder that can be written" in err

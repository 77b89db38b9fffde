# SPDX-License-Identifier: Apache-2.0
"""Several processes: what one says, all of them say; one that is lost or differs ends all."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from engine import LLM
from scripts import launch
from scripts.launch import free_port
from tests.engine.conftest import GOLDEN
from tests.scripts.one_by_one import ENGINE, run

ROOT = pathlib.Path(__file__).parents[2]
MODEL = GOLDEN / "tiny" / "llama"
SMALL = (
    f"--model={MODEL}",
    "--max_num_seqs=2",
    "--max_num_batched_tokens=32",
    "--max_model_len=128",
    "--num_pages=40",
)
TIMES = ("--heartbeat_timeout_s=10", "--start_timeout_s=60")


def some_slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def slow(*case):
    return pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.long])


def environment():
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def rows():
    rng = np.random.default_rng(3)
    fields = [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 0, "n": 2}]
    return [
        {
            "prompt": rng.integers(3, 250, size=size).tolist(),
            "max_tokens": 12,
            "logprobs": 1,
            "seed": index,
            **fields[index % 3],
        }
        for index, size in enumerate((5, 40, 17, 60, 33, 8, 21))
    ]


def module(name, *arguments, **more):
    """Starts `python -m name`; its stdout and stderr are texts."""
    command = [sys.executable, "-m", name, *map(str, arguments)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes, **more)


def places(count, *arguments, own=lambda index: ()):
    """Starts so many processes of one command, as a cluster without a name would."""
    port = free_port()
    return [
        module(
            "tests.scripts.launched",
            f"--coordinator=127.0.0.1:{port}",
            f"--num_processes={count}",
            f"--process_id={index}",
            *TIMES,
            "generate",
            *arguments,
            *own(index),
        )
        for index in range(count)
    ]


def ends(processes, timeout):
    """Returns [(exit code, stderr)], within so many seconds for all of them."""
    deadline, found = time.monotonic() + timeout, []
    try:
        for process in processes:
            _, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            found.append((process.returncode, err))
    finally:
        for process in processes[len(found) :]:
            process.kill()
            print(process.communicate())  # what it said, where the test fails
    return found


@pytest.fixture(scope="session")
def alone(own_cache, tmp_path_factory):
    """Returns (input file, rows that one process writes for it)."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return folder / "in.jsonl", generated(folder, folder / "in.jsonl", 1)


def generated(folder, source, count, *options):
    """Returns the rows that so many processes write."""
    target, report = folder / "out.jsonl", folder / "report.json"
    files = f"--input={source}", f"--output={target}", f"--report={report}"
    for code, err in ends(places(count, *SMALL, *options, *files), 240):
        assert code == 0, err
    written = {path.name for path in folder.iterdir()} - {source.name}
    assert written == {"out.jsonl", "report.json"}
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.parametrize(
    "count, options",
    [
        (2, ["--mesh=tensor=2", "--host_cache_gb=0.01"]),
        (2, ["--replicas=2"]),
        some_slow(2, ["--mesh=data=4"]),
        slow(4, ["--mesh=data=2,tensor=2", "--decode_steps=4"]),
        slow(4, ["--mesh=pipe=2,sequence=2"]),
        slow(4, ["--replicas=2", "--mesh=tensor=4"]),
    ],
)
def test_processes_write_what_one_does(alone, tmp_path, count, options):
    source, expected = alone
    written = generated(tmp_path, source, count, *options)
    for row, one in zip(written, expected, strict=True):
        outputs, outputs_alone = (each.get("outputs", [each]) for each in (row, one))
        for own, own_alone in zip(outputs, outputs_alone, strict=True):
            assert own["token_ids"] == own_alone["token_ids"]
            assert (own["text"], own["finish_reason"]) == (
                own_alone["text"],
                own_alone["finish_reason"],
            )
            for entries, entries_alone in zip(own["logprobs"], own_alone["logprobs"], strict=True):
                for token, entry_alone in entries_alone.items():
                    assert abs(entries[token]["logprob"] - entry_alone["logprob"]) < 1e-4
        assert (row["index"], row["seed"]) == (one["index"], one["seed"])
    report = json.loads((tmp_path / "report.json").read_text())
    counts = [part["summary"]["requests"] for part in report.get("replicas", [report])]
    assert sum(counts) == len(rows()) and len(counts) == (2 if "--replicas=2" in options else 1)


@pytest.mark.parametrize("count, mesh", [slow(2, "data=2"), slow(4, "data=2,tensor=2")])
def test_requests_that_come_one_by_one_are_served_by_all(tmp_path, count, mesh):
    with LLM(MODEL, **ENGINE) as llm:
        tokens, vectors = run(llm)
        assert llm.engine.stats()["preemptions"] > 0
    results, port = tmp_path / "results.json", free_port()
    found = ends(
        [
            module(
                "tests.scripts.one_by_one",
                *(f"127.0.0.1:{port}", count, index, MODEL, results),
                json.dumps({"mesh": mesh}),
            )
            for index in range(count)
        ],
        240,
    )
    assert [code for code, _ in found] == [0] * count, found
    whole = json.loads(results.read_text())
    assert whole["tokens"] == tokens
    np.testing.assert_allclose(whole["vectors"], vectors, atol=1e-4, rtol=0)
    assert whole["stats"]["cache"]["hit_tokens"] > 0


@pytest.mark.parametrize("victim", [1, some_slow(0)])
def test_all_end_when_one_is_killed(victim, tmp_path):
    long = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
    (tmp_path / "in.jsonl").write_text(json.dumps(long) + "\n")
    processes = places(3, *SMALL, "--mesh=data=3", f"--input={tmp_path / 'in.jsonl'}")
    started = processes[0].stdout.read(1)  # the leader writes what comes
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    found = ends(processes, 60)
    assert started, found
    assert time.monotonic() - killed < 60
    for index, (code, err) in enumerate(found):
        assert code != 0, (index, err)
        if index != victim:
            assert re.search(r"(process \d|a step failed|coordination|task|heartbeat)", err), err


def test_other_flags_are_refused_with_the_difference():
    own = lambda index: (f"--decode_steps={index + 1}",)  # noqa: E731
    for code, err in ends(places(2, *SMALL, "--mesh=data=2", "--prompt=x", own=own), 60):
        assert code in (1, 2)
        assert "--decode_steps=2 where process 0 has --decode_steps=1" in err


def test_other_settings_in_python_are_refused_with_the_difference(tmp_path):
    port = free_port()
    found = ends(
        [
            module(
                "tests.scripts.one_by_one",
                *(f"127.0.0.1:{port}", 2, index, MODEL, tmp_path / "results.json"),
                json.dumps({"mesh": "data=2", "watermark": index / 10}),
            )
            for index in range(2)
        ],
        60,
    )
    for code, err in found:
        assert code == 1
        assert "process 1 has watermark=0.1 where process 0 has watermark=0.0" in err


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--mesh=tensor=3"], "there are 2 processes to share"),
        (["--mesh=tensor=2", "--disk_cache_dir=D", "--host_cache_gb=0.01"], "one process"),
        (["--mesh=tensor=2", "--prompt=x", "--temperature=-1"], "temperature"),
        (["--replicas=2", "--prompt=x"], "--output"),
    ],
)
def test_wrong_uses_end_all_processes_with_one_line_each(arguments, told, tmp_path):
    arguments = [one.replace("=D", f"={tmp_path}") for one in arguments]
    found = ends(places(2, *SMALL, "--prompt=x", *arguments), 60)
    assert {code for code, _ in found} <= {1, 2} and any(code == 2 for code, _ in found)
    assert any(told in err for _, err in found), found


@pytest.mark.parametrize(
    "arguments, told",
    [
        ([], "nothing is no entry; name one of generate"),
        (["dance"], "'dance' is no entry"),
        (["--local=2", "--process_id=1", "generate"], "--local and --process_id"),
        (["--num_processes=2", "generate"], "--coordinator"),
        (
            ["--coordinator=here", "--num_processes=2", "--process_id=0", "generate"],
            "'here' must be host:port",
        ),
        (
            [
                *("--coordinator=127.0.0.1:9", "--num_processes=2", "--process_id=1"),
                *("--start_timeout_s=1", "generate"),
            ],
            "process 0 is not at 127.0.0.1:9 after 1 s",
        ),
    ],
)
def test_wrong_uses_of_the_launcher(arguments, told):
    [(code, err)] = ends([module("scripts.launch", *arguments)], 60)
    assert code in (1, 2) and told in err
    assert len(err.splitlines()) == 1, err


def test_the_entry_is_what_follows_our_own_flags():
    own, entry = launch.split(["launch", "--local=2", "generate", "--model=m", "--prompt=x"])
    assert (own, entry) == (["launch", "--local=2"], ["generate", "--model=m", "--prompt=x"])

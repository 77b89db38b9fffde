# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed while they park pages leave nothing behind that gives a wrong token.

The next process checks all that it says against tokens computed without a cache, and its log has
a count of the files that its start dropped.
"""

import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.conftest import golden, greedy

ROOT = pathlib.Path(__file__).parents[2]
KILLS = [4, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.long])]
MOST_SECONDS = 60  # of a process, until it has said something


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A file of 24 prompts and their tokens, in 8 families that share 3 pages: 96 pages in all."""
    rng = random.Random(0)
    families = [rng.choices(range(3, 300), k=48) for _ in range(8)]
    prompts = [prefix + rng.choices(range(3, 300), k=40) for prefix in families for _ in range(3)]
    llm, pairs = golden("llama"), []
    for index, prompt in enumerate(prompts):
        [output] = llm.generate([prompt], greedy(8, cache_salt=f"job {index}"))
        assert output.metrics.cached_tokens == 0
        pairs.append([prompt, output.outputs[0].token_ids])
    path = tmp_path_factory.mktemp("jobs") / "jobs.json"
    path.write_text(json.dumps(pairs))
    return path


def files(folder):
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def run_and_kill(folder, jobs, seed, log):
    """Returns how many files the start dropped, and how many pages the process read from disk."""
    rng, before = random.Random(seed), files(folder)
    command = [sys.executable, "-m", "tests.engine.parking_process", folder, jobs, str(seed)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert process.stdout.readline() == "ready\n", log.read_text()
        kept = files(folder)
        assert kept <= before, "a start writes nothing"
        start, patience = files(folder), time.monotonic() + MOST_SECONDS
        while files(folder) <= start and time.monotonic() < patience:
            time.sleep(0.001)
        if seed % 3:  # of the others, a write of the first file is still going on
            time.sleep(rng.uniform(0, 0.5))
    finally:
        process.kill()
    said, _ = process.communicate()
    assert process.returncode == -9, said + log.read_text()
    assert "wrong" not in said, said
    lines = said.split("\n")[:-1]
    return len(before - kept), int(lines[-1]) if lines else 0


def dropped_by_log(text):
    """Returns how many files a start says that it has dropped."""
    found = re.findall(r"(\d+) files of|(\d+) dropped \(", text)
    return sum(int(number) for numbers in found for number in numbers if number)


def damage(folder, rng):
    """Damages two files, if there are: one is cut, whose name is returned, of one a page is other
    numbers."""
    whole = sorted(folder.glob("*.kv"))
    if len(whole) < 2:
        return None
    cut, changed = rng.sample(whole, 2)
    os.truncate(cut, cut.stat().st_size - 5)
    page = struct.pack("<3072f", *(rng.gauss(0, 3) for _ in range(3072)))
    changed.write_bytes(changed.read_bytes()[: -len(page)] + page)
    return cut.name


def chain(folder, jobs, seeds):
    """Kills processes one after another, which all have one folder; returns what was seen."""
    seen, log, cut = Counter(), folder.with_suffix(".log"), None
    for seed in seeds:
        seen["unfinished"] += any(name.endswith(".part") for name in files(folder))
        dropped, read = run_and_kill(folder, jobs, seed, log)
        text = log.read_text()
        assert dropped == dropped_by_log(text), text
        assert cut not in files(folder), "a start drops what is cut"
        # A page of other numbers is noticed when it is read, if it is.
        seen["refused"] += text.count("is damaged; it is dropped")
        seen["read"] += read
        cut = damage(folder, random.Random(seed)) if seed % 3 == 0 else None
        seen["planted"] += cut is not None
    return seen


@pytest.mark.parametrize("kills", KILLS)
def test_no_kill_leaves_a_page_that_is_wrong_and_a_start_says_what_it_drops(tmp_path, jobs, kills):
    """In two folders at a time."""
    chains = [range(first, kills, 2) for first in range(2)]
    with ThreadPoolExecutor(2) as pool:
        folders = [tmp_path / f"pages {index}" for index in range(2)]
        seen = sum(pool.map(chain, folders, [jobs, jobs], chains), Counter())
    print(dict(seen))
    if kills > 4:
        assert seen["read"] > 100 and seen["unfinished"] > 2
        assert seen["planted"] > 5 and seen["refused"] > 0

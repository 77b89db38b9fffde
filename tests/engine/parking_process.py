# SPDX-License-Identifier: Apache-2.0
"""A process that parks pages on disk until it is killed, and checks all that it says.

    python -m tests.engine.parking_process FOLDER JOBS SEED

JOBS is a JSON file of [prompt, the tokens that follow]. A line "ready" says that the engine is
there, then one line a job has what it has read from disk so far, in pages; a wrong token ends it.
Files are written a little at a time, so that a kill often falls into a write.
"""

import io
import json
import pathlib
import random
import sys
import time

import tests.conftest  # noqa: F401 - the settings of jax, with which programs are found
from tests.engine.conftest import GOLDEN, greedy, open_on_demand

HOST_PAGES = 8
PLAIN_OPEN = pathlib.Path.open


class SlowFile(io.FileIO):
    """A file that takes its time, and keeps nothing back."""

    def write(self, data):
        time.sleep(0.001)
        return super().write(data)


def open_slowly(path, mode="r", *args, **kwargs):
    if mode == "xb":
        return SlowFile(path, "xb")
    return PLAIN_OPEN(path, mode, *args, **kwargs)


def open_parking(folder):
    """Returns an engine with the pool of `golden("llama")`, a small host, and a large disk."""
    page_gb = 12288 / 1e9
    return open_on_demand(
        GOLDEN / "tiny" / "llama",
        max_num_seqs=1,
        max_num_batched_tokens=64,
        host_cache_gb=(HOST_PAGES + 0.5) * page_gb,
        disk_cache_dir=folder,
        disk_cache_gb=1.0,
    )


def main(folder, jobs, seed):
    pathlib.Path.open = open_slowly
    jobs = json.loads(pathlib.Path(jobs).read_text())
    rng = random.Random(seed)
    llm = open_parking(folder)
    print("ready", flush=True)
    while True:
        for prompt, expected in rng.sample(jobs, len(jobs)):
            [output] = llm.generate([prompt], greedy(len(expected)))
            if output.outputs[0].token_ids != expected:
                print(f"wrong: {prompt} gave {output.outputs[0].token_ids}", flush=True)
                return
            print(llm.cache.stats().get("disk_out_pages", 0), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""One of several processes, of which the leader is given requests while others run.

    python -m tests.scripts.one_by_one COORDINATOR PROCESSES PROCESS MODEL RESULTS [OPTIONS AS JSON]

The leader writes {"tokens": [...], "vectors": [...], "stats": {...}} to RESULTS. `run` is what a
test does with an engine of its own, too.
"""

import json
import pathlib
import sys

import jax
import numpy as np

from engine import LLM, SamplingParams, programs
from sharding import parse_mesh
from sharding.launch import join
from tests.engine.conftest import OnDemand

ENGINE = dict(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=128,
    num_pages=12,
    host_cache_gb=0.001,
    preemption="park",
)


def jobs():
    """Returns [(prompt ids, parameters)]: some share a beginning, and draw or are scored."""
    rng = np.random.default_rng(5)
    begin = rng.integers(3, 250, size=40).tolist()
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=7, max_tokens=24, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=24, prompt_logprobs=0, ignore_eos=True),
    ]
    tails = [rng.integers(3, 250, size=size).tolist() for size in (3, 30, 11, 60, 20, 5, 44)]
    return [(begin + tail, params[index % len(params)]) for index, tail in enumerate(tails)]


def run(llm):
    """Returns each job's tokens; it enters after two steps of those before, one is aborted."""
    running, tokens = {}, {}

    def take(deltas):
        for delta in deltas:
            if delta.output is not None:
                tokens[running[delta.request_id]] = delta.output.outputs[0].token_ids

    for index, (prompt, params) in enumerate(jobs()):
        request, _ = llm.make_request(prompt, params)
        running[llm.engine.add_request(request)] = index
        if index == 3:
            llm.engine.abort(request.id)
        take(llm.engine.step())
        take(llm.engine.step())
    while llm.engine.has_work:
        take(llm.engine.step())
    vectors = llm.embed([jobs()[0][0]])
    return [tokens[index] for index in range(len(running))], vectors.tolist()


def main(coordinator, processes, process, model, results, options):
    count, options = int(processes), json.loads(options)
    devices = int(np.prod(list(parse_mesh(options.get("mesh", "")).values())))
    jax.config.update("jax_num_cpu_devices", devices // count)
    programs.Executables = OnDemand  # what is not used is not compiled
    join(coordinator, count, int(process), start_timeout_s=60, heartbeat_timeout_s=10)
    llm = LLM(model, **ENGINE | options)
    if llm.follows:
        llm.follow()
        return
    tokens, vectors = run(llm)
    whole = {"tokens": tokens, "vectors": vectors, "stats": llm.engine.stats()}
    pathlib.Path(results).write_text(json.dumps(whole))
    # It is not closed: the others end with this process all the same.


if __name__ == "__main__":
    main(*sys.argv[1:])

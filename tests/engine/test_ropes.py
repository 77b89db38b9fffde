# SPDX-License-Identifier: Apache-2.0
"""Ropes that depend on a request's final length, through the engine (CASES K-03, LongRoPE)."""

import jax.numpy as jnp
import numpy as np
import pytest

from engine.models.oracle import forward_jit
from tests.engine.conftest import engine_on, greedy, make_prompts, open_on_demand, run
from tests.fixtures import write_tiny

ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "type": "longrope",
        "short_factor": [1.0 + pair / 20 for pair in range(8)],
        "long_factor": [2.0 + pair / 2 for pair in range(8)],
        "original_max_position_embeddings": 32,
    },
    "yarn, in part": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.5,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_each_request_has_the_rope_of_its_final_length(own_cache, tmp_path, name):
    """Requests whose ends lie on either side of the original length, together, in chunks."""
    folder = write_tiny(tmp_path, rope_parameters={"rope_theta": 1e4} | ROPES[name])
    llm = open_on_demand(folder, max_num_seqs=2, max_num_batched_tokens=8, num_pages=40)
    prompts = make_prompts(np.random.default_rng(0), 3, 12, 24)
    lengths = [32, 33, 70]
    jobs = [
        (prompt, greedy(length - len(prompt), logprobs=1, prompt_logprobs=1))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    outputs = run(llm, engine_on(llm), jobs)
    for output, length in zip(outputs, lengths, strict=True):
        prompt, said = output.prompt_token_ids, output.outputs[0].token_ids
        padded = np.zeros(128, np.int32)
        padded[: length - 1] = [*prompt, *said][:-1]
        logits, _ = forward_jit(
            llm.engine.worker.params, llm.model_config, jnp.asarray(padded), length=np.int32(length)
        )
        logits = np.asarray(logits, np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for place, (token, entry) in enumerate(zip([*prompt, *said][1:], entries, strict=True)):
            assert entry[token].logprob == pytest.approx(logprobs[place, token], abs=1e-4), place

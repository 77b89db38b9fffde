# SPDX-License-Identifier: Apache-2.0
"""Steps with interpreted kernels, layers and pool stacked as on a TPU, give what XLA's own do."""

import numpy as np
import pytest

from engine import build
from tests.engine.conftest import GOLDEN, greedy, open_on_demand

# Family, mesh. On a mesh of sequences long pieces go round a ring.
CASES = [("llama", ""), ("gpt_oss", ""), ("deepseek_v3", ""), ("llama", "sequence=2")]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family, mesh", CASES)
def test_pieces_of_a_prompt_meet_in_a_step(family, mesh, monkeypatch):
    """The second prompt begins behind the first's tokens in a budget of 100: at no whole strip, and
    several pieces of it stand in one step."""
    rng = np.random.default_rng(0)
    jobs = [rng.integers(3, 250, size=count).tolist() for count in (5, 170, 61)]
    sizes = dict(max_num_seqs=3, max_num_batched_tokens=100, max_model_len=256, num_pages=96)
    found = {}
    for backend in ("xla", "pallas"):
        monkeypatch.setattr(build, "is_stacked", lambda *_, way=backend: way == "pallas")
        options = dict(attention_backend=backend, matmul_backend=backend, page_size=16, mesh=mesh)
        llm = open_on_demand(GOLDEN / "tiny" / family, **sizes, **options)
        assert llm.built.factory.cfg.attention.kind == {"xla": "xla", "pallas": "tpu"}[backend]
        found[backend] = [output.outputs[0] for output in llm.generate(jobs, greedy(8, logprobs=0))]
    for plain, output in zip(*found.values(), strict=True):
        assert output.token_ids == plain.token_ids
        for entry, other, token in zip(
            output.logprobs, plain.logprobs, plain.token_ids, strict=True
        ):
            assert entry[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)

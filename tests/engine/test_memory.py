# SPDX-License-Identifier: Apache-2.0
"""What does not fit fails at the start, with bytes and the setting to change (CASES N-03)."""

import types

import jax
import pytest

from engine import LLM, memory
from tests.engine.conftest import greedy, make_prompts


def test_a_pool_that_is_too_large_is_refused_at_the_start(tiny):
    with pytest.raises(ValueError, match=r"num_pages=\d+ takes .* GB beside .* use at most \d+"):
        LLM(tiny.config.model, num_pages=10**9)


def accelerator(monkeypatch, limit):
    """Makes the first device look like one with `limit` bytes of its own."""
    device = types.SimpleNamespace(platform="tpu", memory_stats=lambda: {"bytes_limit": limit})
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [device])


def pages_of(tiny, monkeypatch, limit, temporaries):
    accelerator(monkeypatch, limit)
    monkeypatch.setattr(memory, "temporary_bytes", lambda program: temporaries[program.name])
    factory = tiny.built.factory
    return memory.default_pages(
        tiny.config,
        factory.cfg.layout,
        tiny.max_model_len,
        lambda pages: factory_with(factory, pages),
        tiny.built.ladder,
        types.SimpleNamespace(folder=None, key=lambda program: program.name),
    )


def factory_with(factory, pages):
    from engine.programs import ProgramFactory

    return ProgramFactory(factory.cfg, factory.params, pages, stacked=factory.stacked)


def test_sizing_leaves_room_for_the_largest_program_body_or_head(tiny, monkeypatch):
    layout, ladder = tiny.built.factory.cfg.layout, tiny.built.ladder
    names = [p.name for p in memory.largest_programs(tiny.built.factory, ladder)]
    assert names[0].startswith("body") and any(name.startswith("head sample") for name in names)
    fixed = memory.fixed_bytes(factory_with(tiny.built.factory, 2))
    limit = int((fixed + 40 * layout.page_bytes) / 0.9) + 1
    small = dict.fromkeys(names, 0)
    assert pages_of(tiny, monkeypatch, limit, small) == 32  # 40, on the grid
    for name in names:  # whichever is the largest takes its room
        large = small | {name: 30 * layout.page_bytes}
        assert pages_of(tiny, monkeypatch, limit, large) == 8
    with pytest.raises(ValueError, match="the KV pool has .* raise memory_fraction"):
        pages_of(tiny, monkeypatch, limit, small | {names[-1]: 40 * layout.page_bytes})


def test_scoring_a_long_prompt_takes_the_memory_of_its_chunks(tiny):
    """The score head has a few rows, whatever the prompt's length."""
    [head] = [head for head in tiny.built.ladder.heads() if head.kind == "score"]
    assert head.rows <= 64
    program = tiny.built.factory.head(head)
    logits = jax.tree.leaves(program.results)[0]
    assert logits.shape == (head.rows,)
    import numpy as np

    [prompt] = make_prompts(np.random.default_rng(0), 1, 120, 120)
    [output] = tiny.generate([prompt], greedy(1, prompt_logprobs=20))
    assert len(output.prompt_logprobs) == 120

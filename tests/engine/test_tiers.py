# SPDX-License-Identifier: Apache-2.0
"""Pages go to the host and to disk and come back, on the real engine."""

import functools
import random

import jax
import numpy as np
import pytest

from engine.buckets import Group
from engine.models.decoder import final_norm, head_logits
from engine.models.oracle import forward
from tests.engine.conftest import GOLDEN, greedy, open_on_demand


def small(folder, **options):
    """Returns an LLM of four rows with two bodies, and pages for few requests."""
    llm = open_on_demand(
        folder,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_pages=40,
        max_model_len=128,
        **options,
    )
    decodes = Group("decode", 4, 1)
    llm.built.ladder.bodies = (decodes,), (Group("chunk", 4, 32), decodes)
    return llm


def prompts(seed=2, count=24):
    rng = random.Random(seed)
    base = [rng.randrange(290) for _ in range(90)]
    return [
        base[: rng.randrange(5, 90)] + [rng.randrange(290) for _ in range(rng.randrange(1, 10))]
        for _ in range(count)
    ]


def page_gb(llm):
    """Returns the size of a page, all places together, in 10^9 bytes."""
    return llm.built.factory.cfg.layout.page_bytes / 1e9


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def plain(request, own_cache):
    """Returns (model folder, page size, tokens of the prompts without a cache)."""
    folder = str(GOLDEN / "tiny" / request.param)
    llm = small(folder, prefix_cache=False)
    return folder, page_gb(llm), tokens(llm)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), greedy(20))]


@pytest.mark.parametrize("preemption", ["recompute", "park"])
def test_outputs_are_those_without_tiers(plain, tmp_path, preemption):
    folder, gb, expected = plain
    tiers = {"host_cache_gb": 10.5 * gb, "disk_cache_dir": tmp_path, "disk_cache_gb": 400 * gb}
    with small(folder, **tiers, preemption=preemption) as llm:
        for _ in range(2):
            assert tokens(llm) == expected
            llm.engine.scheduler.cache.check()
        stats = llm.cache.stats()
        assert stats["host_in_pages"] > 0 and stats["disk_in_pages"] > 0
    with small(folder, **tiers) as llm:
        assert tokens(llm) == expected
        stats = llm.cache.stats()
        assert stats["disk_out_pages"] > 0 and stats["host_out_pages"] > 0
        llm.engine.scheduler.cache.check()
        llm.cache.export(tmp_path / "out")
    other = small(folder)
    assert other.cache.import_(tmp_path / "out") > 0
    other.engine.scheduler.cache.check()
    assert tokens(other) == expected


def test_a_step_that_fails_loses_nothing_of_the_disk(plain, tmp_path):
    folder, gb, expected = plain
    tiers = {"host_cache_gb": 10.5 * gb, "disk_cache_dir": tmp_path, "disk_cache_gb": 400 * gb}
    with small(folder, **tiers) as llm:
        tokens(llm)
        engine, body = llm.engine, llm.engine._dispatch
        llm.engine.add_request(llm.make_request(prompts()[0], greedy(4))[0])

        def fail(plan):
            engine._dispatch = body
            raise MemoryError("planted")

        engine._dispatch = fail
        with pytest.raises(MemoryError):
            while engine.has_work:
                engine.step()
        engine.scheduler.cache.check()
        assert tokens(llm) == expected


@functools.partial(jax.jit, static_argnames=("config", "count"))
def plain_logits(params, config, token_T, count):
    """Returns what the plain forward says of the last `count` tokens, [count, vocabulary]."""
    _, hidden_LTD = forward(params, config, token_T)
    return head_logits(params, config, final_norm(params, config, hidden_LTD[-1, -count:]))


@pytest.mark.slow
@pytest.mark.long
def test_windows_take_less_than_half_of_the_memory_of_full_pages(users_model):
    """Gemma 3 270M at 8,192 tokens: 15 of 18 layers see 512 tokens, and keep no more."""
    path = users_model("gemma3-270m")
    layers, length, page = 18, 8192, 16
    full = layers * length  # cells, if every layer kept all
    pages = int(0.45 * full / (3 * page))  # of three layers each
    options = {"max_model_len": length, "max_num_seqs": 1, "max_num_batched_tokens": 512}
    llm = open_on_demand(path, num_pages=pages, **options)
    layout = llm.built.factory.cfg.layout
    assert layout.places == 3 and layout.page_size == page
    ids = llm.tokenizer.encode("The river runs to the sea, and the mill stands by it. " * 900, True)
    ids = ids[: length - 16]
    assert len(ids) == length - 16
    request, text = llm.make_request(ids, greedy(16))
    llm.engine.add_request(request, text)
    most = 0
    while llm.engine.has_work:
        for delta in llm.engine.step():
            output = delta.output or None
        counts = llm.engine.stats()["pages"]
        most = max(most, sum(count["held"] for count in counts))
    assert most * 3 * page <= 0.45 * full
    print(f"held at most {most} pages, {most * 3 * page / full:.1%} of what full pages take")
    whole = np.array(ids + output.outputs[0].token_ids[:-1], np.int32)
    last = np.asarray(plain_logits(llm.engine.worker.params, llm.model_config, whole, 16))
    margins = np.diff(np.sort(last, axis=-1)[:, -2:], axis=-1)[:, 0]
    sure = int(np.argmax(margins < 0.02)) if (margins < 0.02).any() else 16
    assert sure > 0
    assert last.argmax(axis=-1)[:sure].tolist() == output.outputs[0].token_ids[:sure]

# SPDX-License-Identifier: Apache-2.0
"""What is done to an engine's cache from outside, at any time: nothing hangs, nothing is lost."""

import shutil
import time

import pytest

import engine.disk_cache as disk_cache
from engine.waiting import QueueFull
from tests.engine.conftest import greedy
from tests.engine.test_disk_resume import TIERS, opened, plain, said

PROMPT = list(range(3, 60))


def begun(llm, steps=1, prompt=PROMPT, count=30):
    """Returns a request that has run for so many steps."""
    request, text = llm.make_request(prompt, greedy(count))
    llm.engine.add_request(request, text)
    for _ in range(steps):
        llm.engine.step()
    return request


def interrupt_once(monkeypatch, engine, error=KeyboardInterrupt):
    """Has the next step of an engine end with an error before it is planned."""
    schedule = engine.partitions.schedule

    def interrupted():
        monkeypatch.setattr(engine.partitions, "schedule", schedule)
        raise error

    monkeypatch.setattr(engine.partitions, "schedule", interrupted)


def finish(engine):
    """Returns the outputs of all that an engine still has to do."""
    found = []
    while engine.has_work:
        found += [delta.output for delta in engine.step() if delta.output is not None]
    return found


def test_a_closed_engine_says_what_it_had_and_runs_nothing(tmp_path):
    llm = opened(disk_cache_dir=tmp_path, **TIERS)
    request = begun(llm, steps=8)
    steps, said_before = llm.engine.stats()["steps"], len(request.output_token_ids)
    llm.close()
    [output] = finish(llm.engine)
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == said_before > 0
    assert llm.engine.stats()["steps"] == steps
    llm.close()
    with pytest.raises(RuntimeError, match="the engine is closed; make another"):
        llm.generate([PROMPT], greedy(2))
    with opened(disk_cache_dir=tmp_path, **TIERS) as later:
        [output] = later.generate([PROMPT], greedy(30))
        assert output.metrics.cached_tokens == len(PROMPT) - 1
        assert said([output]) == [plain("llama", PROMPT, 30)]


def test_a_close_waits_for_a_slow_disk_and_loses_nothing(tmp_path, monkeypatch):
    """Of more pages on the device and the host than may wait to be written."""
    page_gb = opened().built.factory.cfg.layout.page_bytes / 1e9
    monkeypatch.setattr(disk_cache, "_MOST_QUEUED_BYTES", int(3 * page_gb * 1e9))
    write = disk_cache.write_segment

    def write_slowly(*args):
        time.sleep(0.05)
        return write(*args)

    monkeypatch.setattr(disk_cache, "write_segment", write_slowly)
    prompts = [[10 + i] * 110 for i in range(8)]
    with opened(disk_cache_dir=tmp_path, **TIERS) as llm:
        llm.generate(prompts, greedy(1))
        llm.engine.scheduler.cache.kept.make_room(llm.built.factory.num_pages // 2)
    with opened(disk_cache_dir=tmp_path, **TIERS) as llm:
        outputs = llm.generate(prompts, greedy(1))
        assert [output.metrics.cached_tokens for output in outputs] == [109] * 8


def test_an_interrupted_step_goes_on_without_its_folder(tmp_path, monkeypatch, caplog):
    llm = opened(disk_cache_dir=tmp_path / "gone", **TIERS)
    begun(llm, steps=6)
    llm.engine.set_policy("priority")
    before = llm.cache.stats()
    shutil.rmtree(tmp_path / "gone")
    interrupt_once(monkeypatch, llm.engine)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    assert said(finish(llm.engine)) == [plain("llama", PROMPT, 30)]
    assert llm.engine.scheduler._policy == "priority"
    assert llm.cache.stats()["prompt_tokens"] >= before["prompt_tokens"] > 0
    assert "is not to be had" in caplog.text
    llm.close()


def test_an_import_leaves_the_files_as_they_are(tmp_path, caplog):
    llm = opened()
    llm.generate([PROMPT, [7, *PROMPT]], greedy(3))
    assert llm.cache.export(tmp_path / "out") >= 2
    files = sorted((tmp_path / "out").glob("*.kv"))
    files[0].write_bytes(files[0].read_bytes()[:-1])
    before = {path: path.read_bytes() for path in files}
    other = opened()
    assert other.cache.import_(tmp_path / "out") >= 1
    assert "1 files of" in caplog.text and "were left out, the first because it is" in caplog.text
    other.engine.scheduler.cache.check()
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_an_engine_that_keeps_nothing_neither_imports_nor_exports(tmp_path):
    opened().cache.export(tmp_path / "out")
    llm = opened(prefix_cache=False)
    for call in (llm.cache.import_, llm.cache.export):
        with pytest.raises(ValueError, match="keeps nothing; start it with prefix_cache=True"):
            call(tmp_path / "out")


def test_counters_are_there_from_the_start():
    """All that `stats` documents, at nothing; then what a request has done."""
    llm = opened()
    assert not any(llm.cache.stats().values())
    names = ["prompt_tokens", "hits", "hit_tokens", "resumed_tokens", "copied_pages"]
    names += ["evicted_pages", "damaged_pages", "preemptions", "refused", "nodes"]
    for tier in ("host", "disk"):
        names += [f"{tier}_{way}_{what}" for way in ("in", "out") for what in ("pages", "bytes")]
        names += [f"{tier}_out_tokens"]
    assert llm.cache.stats().keys() == set(names)
    with pytest.raises(ValueError, match="a prompt of 5000 tokens"):
        too_long, _ = llm.make_request(PROMPT, greedy(2))
        too_long.prompt_token_ids = [5] * 5000
        llm.engine.add_request(too_long)
    llm.generate([PROMPT] * 2, greedy(3))
    stats = llm.cache.stats()
    assert (stats["hits"], stats["hit_tokens"], stats["prompt_tokens"]) == (1, 56, 114)
    assert stats["refused"] == 1 and stats["copied_pages"] >= 1


def test_clearing_gives_the_hosts_memory_back(tmp_path):
    with opened(disk_cache_dir=tmp_path, **TIERS) as llm:
        llm.generate([PROMPT], greedy(2))
        llm.engine.scheduler.cache.kept.make_room(llm.built.factory.num_pages - 1)
        llm.generate([[5]], greedy(2))
        assert llm.engine.worker.movers[0]._slots
        stats = llm.cache.stats()
        page_bytes = llm.built.factory.cfg.layout.page_bytes
        assert stats["host_in_bytes"] == stats["host_in_pages"] * page_bytes > 0
        llm.cache.clear()
        assert not llm.engine.worker.movers[0]._slots and llm.cache.stats()["nodes"] == 0
        assert said(llm.generate([PROMPT], greedy(2))) == [plain("llama", PROMPT, 2)]


def test_more_prompts_than_may_wait_are_refused_by_name():
    llm = opened(max_num_waiting=2)
    with pytest.raises(QueueFull, match="prompt 2: 2 requests wait already"):
        llm.generate([PROMPT] * 8, greedy(2))
    finish(llm.engine)
    assert len(llm.generate([PROMPT] * 2, greedy(2))) == 2

# SPDX-License-Identifier: Apache-2.0
"""What an engine leaves on disk serves the next one: chats go on, and tenants stay apart (C-04).

Each engine here is a new one that knows nothing but the folder. Tokens are compared with those of
an engine without a cache.
"""

import itertools

import pytest

from tests.engine.conftest import GOLDEN, golden, greedy, open_on_demand

PAGE = 16
TIERS = {"host_cache_gb": 0.01, "disk_cache_gb": 0.1}
SALT = itertools.count()


def opened(arch="llama", **options):
    """Returns an LLM on the programs of `golden(arch)`, with tiers as `options` have them."""
    rows = golden(arch).config.max_num_seqs
    options = {"max_num_batched_tokens": 64} | options
    llm = open_on_demand(GOLDEN / "tiny" / arch, max_num_seqs=rows, **options)
    if not llm.config.deterministic:
        llm.built.ladder.bodies = golden(arch).built.ladder.bodies
    return llm


def plain(arch, prompt, count):
    """Returns the tokens of an engine that has nothing of a prompt in its cache."""
    [output] = golden(arch).generate([prompt], greedy(count, cache_salt=f"alone {next(SALT)}"))
    assert output.metrics.cached_tokens == 0
    return said([output])[0]


def said(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("arch", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_each_turn_of_a_chat_goes_on_in_another_engine(tmp_path, caplog, arch):
    """All but one page at most of what was said before is found, by every later engine."""
    caplog.set_level("INFO", "headrace")
    prompt, before = list(range(3, 40)), 0
    for turn in range(4):
        with opened(arch, disk_cache_dir=tmp_path, **TIERS) as llm:
            [output] = llm.generate([prompt], greedy(20))
        cached = output.metrics.cached_tokens
        assert max(before - PAGE, 0) <= cached <= before, f"turn {turn}"
        assert said([output]) == [plain(arch, prompt, 20)], f"turn {turn}"
        before = len(prompt) + 20
        prompt = prompt + said([output])[0] + [50, 60, 70, 80 + turn]
    dropped = [record for record in caplog.records if "kept" in record.getMessage()]
    assert len(dropped) == 3 and all(" 0 dropped" in each.getMessage() for each in dropped)


def test_a_chat_that_was_pushed_to_disk_goes_on_in_the_same_engine(tmp_path):
    """By a host of 4 pages below a device that gives all away after each turn."""
    page_gb = golden("llama").built.factory.cfg.layout.page_bytes / 1e9
    tiers = {"host_cache_gb": 5.5 * page_gb, "disk_cache_gb": 0.01}
    prompt, before = list(range(3, 40)), 0
    with opened(disk_cache_dir=tmp_path, **tiers) as llm:
        for turn in range(4):
            [output] = llm.generate([prompt], greedy(20))
            assert said([output]) == [plain("llama", prompt, 20)]
            assert output.metrics.cached_tokens >= before - PAGE
            before = len(prompt) + 20
            prompt = prompt + said([output])[0] + [50, 60, 70, 80 + turn]
            llm.engine.scheduler.cache.kept.make_room(llm.built.factory.num_pages - 1)
            llm.engine.scheduler.cache.check()
        stats = llm.cache.stats()
    assert stats["disk_in_pages"] >= 6 and stats["disk_out_pages"] >= 4


PROMPT = list(range(10, 74))
SALTS = {"a": PROMPT, "b": PROMPT, None: PROMPT, "": PROMPT, "ab": PROMPT[1:], "A": PROMPT}


def served(llm):
    """Returns the tokens that the cache had for each salt, whose outputs are what they should."""
    found = {}
    for salt, prompt in SALTS.items():
        [output] = llm.generate([prompt], greedy(4, cache_salt=salt))
        assert said([output]) == [plain("llama", prompt, 4)]
        found[salt] = output.metrics.cached_tokens
    return found


@pytest.mark.parametrize("way", ["disk", "export", "export of what was on disk"])
def test_a_salt_holds_through_disk_and_export(tmp_path, way):
    """Only who has the salt finds what it left, and that in every tier and after every way."""
    only_a = {salt: 63 if salt == "a" else 0 for salt in SALTS}
    tiers = {"disk_cache_dir": tmp_path / "disk", **TIERS}
    with opened(**tiers) as llm:
        llm.generate([PROMPT], greedy(4, cache_salt="a"))
        if way == "export":
            assert llm.cache.export(tmp_path / "exported") >= 1
    if way == "export of what was on disk":
        with opened(**tiers) as llm:
            [output] = llm.generate([PROMPT], greedy(1, cache_salt="a"))  # brings it up
            assert output.metrics.cached_tokens == 63
            llm.cache.export(tmp_path / "exported")
    if way == "disk":
        with opened(**tiers) as llm:
            assert served(llm) == only_a
    else:
        llm = opened()
        assert llm.cache.import_(tmp_path / "exported") >= 1
        assert served(llm) == only_a


@pytest.mark.slow
def test_the_trial_of_a_deterministic_start_leaves_the_disk_as_it_was(tmp_path):
    """With its own pages the same to the last bit; those of other programs are not taken."""
    options = {"deterministic": True, "disk_cache_dir": tmp_path, **TIERS}
    with opened(**options) as llm:
        assert llm.cache.stats()["nodes"] == 0
    assert not list(tmp_path.iterdir())
    outputs = []
    for _ in range(3):
        with opened(**options) as llm:
            outputs += llm.generate([PROMPT], greedy(5, logprobs=1))
    assert [output.metrics.cached_tokens for output in outputs] == [0, 32, 32]
    assert outputs[0].outputs == outputs[1].outputs == outputs[2].outputs
    with opened(**options, max_num_batched_tokens=32) as llm:
        [output] = llm.generate([PROMPT], greedy(5))
        assert output.metrics.cached_tokens == 0

# SPDX-License-Identifier: Apache-2.0
"""--explain: the plan as it is, each program with its cost."""

import pytest

from engine import LLM
from scripts import generate
from scripts.explain import explain
from tests.engine.conftest import TINY_OPTIONS
from tests.fixtures import byte_tokenizer, write_tiny


def test_the_plan_is_that_of_the_engine(own_cache, tmp_path):
    folder = write_tiny(tmp_path / "tiny", tokenizer=byte_tokenizer())
    llm = LLM(str(folder), **TINY_OPTIONS)
    lines = explain(llm)
    text = "\n".join(lines)
    assert "llama, 2 layers" in text and "context    128 tokens, vocabulary 300" in text
    layout = llm.built.factory.cfg.layout
    assert f"600 pages of 16 tokens, 1 page groups, about {599 * 16} tokens" in text
    assert f"{layout.page_bytes} bytes a page" in text
    assert "64 rows; steps of up to 64 tokens, 4 pieces of prompts of up to 32 tokens" in text
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("program  ")) + 1 :]
    assert len(table) == len(llm.engine.worker.programs)
    names = {llm.engine.worker.programs.name(key) for key in llm.engine.worker.programs}
    assert {line[:32].strip() for line in table} == names
    assert all(line.split()[-4] != "-" for line in table), "each has the seconds it took"


def test_the_command_prints_the_plan_and_ends(own_cache, tmp_path, capsys, monkeypatch):
    folder = write_tiny(tmp_path / "tiny", tokenizer=byte_tokenizer())
    monkeypatch.setattr(generate, "FLAGS", generate.define_flags())
    flags = ["--max_num_seqs=1", "--max_num_batched_tokens=1", "--num_pages=9", "--strict"]
    with pytest.raises(SystemExit) as end:
        generate.run(["generate", "--explain", f"--model={folder}", *flags])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert "9 pages of 16 tokens" in out and "body decode1x1" in out and "head greedy1" in out

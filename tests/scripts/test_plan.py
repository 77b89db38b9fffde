# SPDX-License-Identifier: Apache-2.0
"""The plan as it is printed, from configs alone; wrong uses give one line."""

import json
import pathlib
import shutil

import pytest

from engine import capacity
from scripts import plan
from tests.engine.test_capacity import shape_of
from tests.engine.tiny_gguf import write_tiny_gguf

CONFIGS = pathlib.Path(__file__).parents[1] / "data/configs"
LLAMA = CONFIGS / "llama-3.1-8b.json"


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs the command: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(plan, "FLAGS", plan.define_flags())
        with pytest.raises(SystemExit) as caught:
            plan.run(["plan", *arguments])
        return caught.value.code, *capsys.readouterr()

    return run


def cells(out, start):
    """Returns the cells of the line that begins with `start`, but for that."""
    [line] = [line for line in out.splitlines() if line.strip().startswith(start)]
    return line.strip().removeprefix(start).split()


def test_a_plan_has_all_its_tables(run):
    code, out, err = run(f"--model={LLAMA}", "--chips=v5e:8", "--max_model_len=8192")
    assert (code, err) == (0, "")
    assert cells(out, "8.03 B") == ["7.50", "B", "16.06", "GB"]
    assert cells(out, "full") == ["32", "1", "131072", "8192"]
    assert "pages of 64 tokens and 8388608 bytes; a request of 8192 tokens has 128 pages" in out
    # (14.4 - 8.031) GB of a chip, in pages of 4 MiB on each of two
    assert cells(out, "4       1       2") == ["8.03", "6.37", "1518", "44", "advised"]
    assert "197 TFLOP/s and 819 GB/s (docs.cloud.google.com/tpu/docs/v5e)" in out
    assert cells(out, "prefill, tokens 0 to 512")[0] == "4"
    one, most = [line.split() for line in out.splitlines() if line.startswith("decode")]
    assert one[4] == "1" and one[-2:] == ["weights", "102"]
    assert most[4] == "44" and most[-2:] == ["weights", "2687"]


def test_flags_change_the_plan(run):
    common = [f"--model={LLAMA}", "--max_model_len=4096"]
    code, out, _ = run(
        *common,
        *("--chips=h100", "--max_num_seqs=7", "--max_num_batched_tokens=256", "--page_size=32"),
        *("--dtype=float16", "--memory_fraction=0.5", "--memory_gb=100"),
        *("--tflops=1", "--bandwidth_gb_s=2"),
    )
    assert code == 0 and "weights in float16" in out and "of which 50.00 GB a chip" in out
    assert "pages of 32 tokens" in out and "at 1 TFLOP/s and 2 GB/s" in out
    assert "prefill, tokens 0 to 256" in out and "prefill, to token 4096" in out
    assert [line.split()[4] for line in out.splitlines() if line.startswith("decode")] == ["1", "7"]
    code, out, _ = run(*common, "--chips=cpu", "--memory_gb=64")
    assert code == 0 and "pages of 16 tokens" in out and "of which 57.60 GB a chip" in out


def test_the_largest_batch_is_what_a_request_more_would_not_fit(run):
    _, out, _ = run(f"--model={CONFIGS / 'gemma-3-27b.json'}", "--chips=v6e:8")
    shape = shape_of("gemma-3-27b", max_model_len=131072)
    [row] = [line.split() for line in out.splitlines() if line.endswith("advised")]
    tensor, pages, batch = int(row[2]), int(row[5]), int(row[6])
    needed, replicas = capacity.request_pages(shape), 8 // tensor
    assert batch * needed <= replicas * (pages - 1) < (batch + replicas) * needed


def test_a_folder_without_weights_a_gguf_file_and_a_nested_config_will_do(run, tmp_path):
    shutil.copy(LLAMA, tmp_path / "config.json")
    shown = [run(f"--model={path}", "--chips=h100")[1] for path in (tmp_path, LLAMA)]
    assert shown[0].splitlines()[1:] == shown[1].splitlines()[1:]
    code, out, _ = run(f"--model={write_tiny_gguf(tmp_path / 'm.gguf')}", "--chips=cpu")
    assert code == 0 and "m.gguf: llama, 2 layers" in out
    assert "gemma3, 62 layers" in run(f"--model={CONFIGS}/gemma-3-27b.json", "--chips=h200")[1]


WRONG = {
    "no model": (["--chips=cpu"], "--model is missing"),
    "no chips": (["--model={llama}"], "--chips is missing"),
    "no such model": (["--model=nope", "--chips=cpu"], "nope: no such file or folder"),
    "no config": (["--model={tmp}", "--chips=cpu"], "config.json is missing"),
    "no family": (["--model={tmp}/odd.json", "--chips=cpu"], "model_type 'rwkv' is not supported"),
    "a key is missing": (["--model={tmp}/cut.json", "--chips=cpu"], "has no 'hidden_size'"),
    "unknown chip": (["--model={llama}", "--chips=tpu:8"], "use NAME:COUNT with one of v5e, v5p"),
    "no chip at all": (["--model={llama}", "--chips=v5e:0"], "a count of at least 1; use v5e:8"),
    "several machines": (["--model={llama}", "--chips=cpu:2"], "use cpu"),
    "weights too large": (
        ["--model={configs}/llama-3.1-70b.json", "--chips=v5e:8", "--max_model_len=8192"],
        "17.6 GB of weights and 0.3 GB of KV for one request of 8192 tokens, on each chip, do not "
        "fit in 14.4 GB; try --chips=v5p:2",
    ),
    "too few chips": (
        ["--model={configs}/deepseek-v3.json", "--chips=h200:8", "--max_model_len=4096"],
        "try --chips=h200:16",
    ),
    "request too long": (
        ["--model={llama}", "--chips=v5e:2"],
        "do not fit in 14.4 GB; try --chips=v5e:4 or a smaller --max_model_len",
    ),
    "context": (["--model={llama}", "--chips=cpu", "--max_model_len=999999"], "limit of 131072"),
    "page size": (["--model={llama}", "--chips=cpu", "--page_size=24"], "try 16 or 32"),
    "memory": (["--model={llama}", "--chips=cpu", "--memory_gb=0"], "memory_gb=0.0 must be"),
    "share": (["--model={llama}", "--chips=cpu", "--memory_fraction=90"], "write 90% as 0.9"),
    "dtype": (["--model={llama}", "--chips=cpu", "--dtype=int8"], "one of <float32|bfloat16|"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_one_line_and_exit_code_2(run, tmp_path, case):
    (tmp_path / "odd.json").write_text('{"model_type": "rwkv"}')
    cut = json.loads(LLAMA.read_text())
    del cut["hidden_size"]
    (tmp_path / "cut.json").write_text(json.dumps(cut))
    arguments, message = WRONG[case]
    names = dict(tmp=tmp_path, llama=LLAMA, configs=CONFIGS)
    code, out, err = run(*(text.format(**names) for text in arguments))
    assert (code, out) == (2, "")
    assert message in err and err.startswith("plan: ") and len(err.splitlines()) == 1

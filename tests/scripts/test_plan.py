# SPDX-License-Identifier: Apache-2.0
"""The plan as it is printed, from configs alone; wrong uses give one line."""

import json
import pathlib
import shutil

import pytest

from engine import aot, capacity
from engine.capacity import Parallel
from scripts import plan
from sharding import parse_mesh
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
    assert "the fastest of 6 that fit first" in out
    # (14.4 - 8.031) GB of a chip, in pages of 4 MiB on each of two
    row = cells(out, "4         1       1       2")
    assert row[:4] == ["8.03", "6.37", "1518", "44"] and row[-1] != "chosen"
    assert cells(out, "1         1       1       8")[-1] == "chosen"
    assert "197 TFLOP/s and 819 GB/s (docs.cloud.google.com/tpu/docs/v5e)" in out
    assert cells(out, "prefill, tokens 0 to 512")[0] == "1"
    one, most = [line.split() for line in out.splitlines() if line.startswith("decode")]
    assert one[4] == "1" and one[-2] == "weights"
    assert most[4] == "92" and most[-2] == "KV"
    assert out.splitlines()[-1] == "tensor=8"


def test_the_last_line_is_a_mesh_that_commands_take(run):
    common = [f"--model={CONFIGS / 'qwen3-30b-a3b.json'}", "--chips=v6e:8", "--max_model_len=4096"]
    chosen = run(*common)[1].splitlines()[-1]
    assert Parallel(**parse_mesh(chosen)).chips == 8
    code, out, _ = run(*common, "--mesh=expert=4,tensor=2")
    assert code == 0 and out.splitlines()[-1] == "expert=4,tensor=2"
    assert "expert=4,tensor=2: steps of a chip" in out
    [line] = [line for line in out.splitlines() if line.endswith("chosen")]
    assert line.split()[:4] == ["1", "1", "4", "2"]


@pytest.mark.slow
def test_a_plan_is_checked_by_the_compiler(run, monkeypatch):
    try:
        for name, value in aot.compiler_settings().items():
            monkeypatch.setenv(name, value)  # which puts back what was there, afterwards
    except FileNotFoundError as error:
        pytest.skip(str(error))
    code, out, err = run(f"--model={LLAMA}", "--chips=v5e:8", "--check=v5e:2x4")
    assert code == 0, err
    row = cells(out, "decode32x1")
    planned, arguments, temporaries = float(row[0]), float(row[1]), float(row[4])
    assert 0.98 * planned <= arguments <= 1.01 * planned  # a body does not read the head
    assert temporaries < 50
    assert row[5] == row[6] == "65" and row[7] == row[8]
    assert out.splitlines()[-1] == "tensor=8"


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
    assert out.splitlines()[-1] == "data=1"
    code, out, _ = run(*common, "--chips=cpu", "--memory_gb=64")
    assert code == 0 and "pages of 16 tokens" in out and "of which 57.60 GB a chip" in out


def test_the_largest_batch_is_what_a_request_more_would_not_fit(run):
    _, out, _ = run(f"--model={CONFIGS / 'gemma-3-27b.json'}", "--chips=v6e:8")
    shape = shape_of("gemma-3-27b", max_model_len=131072)
    [row] = [line.split() for line in out.splitlines() if line.endswith("chosen")]
    data, sequence, expert, _, _, _, pages, batch = (float(cell) for cell in row[:8])
    needed = capacity.request_pages(shape, int(sequence))
    assert batch * needed <= data * expert * (pages - 1) < (batch + data * expert) * needed


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
        "fit in 14.4 GB; try --chips=v5e:16",
    ),
    "too few chips": (
        ["--model={configs}/deepseek-v3.json", "--chips=h200:8", "--max_model_len=4096"],
        "try --chips=h200:16",
    ),
    "request too long": (
        ["--model={llama}", "--chips=v5e:2"],
        "do not fit in 14.4 GB; try --chips=v5e:4 or a smaller --max_model_len",
    ),
    "no such mesh": (
        ["--model={llama}", "--chips=v5e:8", "--mesh=expert=8"],
        "mesh='expert=8' is no layout of this model over 8 chips",
    ),
    "a mesh of stages": (
        ["--model={llama}", "--chips=v5e:8", "--mesh=pipe=8"],
        "plans have no stages yet",
    ),
    "a mesh without room": (
        ["--model={llama}", "--chips=v5e:8", "--mesh=data=8"],
        "16.1 GB of weights and 17.2 GB of KV for a request, on each chip, do not fit in 14.4 GB",
    ),
    "no such slice": (
        ["--model={llama}", "--chips=v5e:8", "--check=v5e:8"],
        "'v5e:8' is no slice of TPUs; write such as v6e:2x4",
    ),
    "a slice of other chips": (
        ["--model={llama}", "--chips=v5e:8", "--check=v6e:2x4"],
        "check='v6e:2x4' is no slice of --chips=v5e:8; plan and check for one kind of chip, of v5e",
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

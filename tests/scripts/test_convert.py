# SPDX-License-Identifier: Apache-2.0
"""The command writes a whole model, or one line that says what is wrong and no folder."""

import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints
from engine.export import Export
from scripts import convert
from tests.fixtures import byte_tokenizer, write_tiny

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m", tokenizer=byte_tokenizer())


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs the command: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(convert, "FLAGS", convert.define_flags())
        with pytest.raises(SystemExit) as caught:
            convert.run(["convert", *arguments])
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("to, kind", [("orbax", "orbax"), ("safetensors", "huggingface")])
def test_a_model_is_converted_and_told(tiny, tmp_path, run, to, kind):
    output = tmp_path / "out"
    arguments = [f"--model={tiny}", f"--to={to}", f"--output={output}", "--dtype=bfloat16"]
    code, out, err = run(*arguments)
    checkpoint = checkpoints.open_checkpoint(output)
    assert (code, err) == (0, "")
    assert out == f"{output}: {len(checkpoint.tensors)} tensors, 0.00 GB in bfloat16\n"
    assert checkpoint.kind == kind and checkpoint.config["dtype"] == "bfloat16"
    assert checkpoint.tokenizer().encode("the mill") == byte_tokenizer().encode("the mill").ids
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err == f"convert: {output}: is there already; name a new folder\n"


def test_the_type_is_the_models_own_by_default_and_shards_are_cut(tiny, tmp_path, run):
    output = tmp_path / "out"
    arguments = [f"--model={tiny}", "--to=safetensors", f"--output={output}"]
    assert run(*arguments, "--max_shard_gb=0.0001")[0] == 0
    assert len(list(output.glob("*.safetensors"))) > 2
    checkpoint = checkpoints.open_checkpoint(output)
    for name, values in load_file(tiny / "model.safetensors").items():
        np.testing.assert_array_equal(checkpoint.read(name), values)


WRONG = {
    "no model": (["--to=orbax", "--output=o"], "--model is missing"),
    "no format": (["--model=m", "--output=o"], "--to is missing"),
    "no output": (["--model=m", "--to=orbax"], "--output is missing"),
    "unknown format": (["--to=gguf"], "value should be one of <orbax|safetensors>"),
    "unknown type": (["--dtype=int8"], "value should be one of <float32|bfloat16|float16>"),
    "unknown flag": (["--form=orbax"], "Unknown command line flag 'form'"),
    "shards of no size": (
        ["--model={tiny}", "--to=safetensors", "--output=o", "--max_shard_gb=0"],
        "--max_shard_gb=0.0 must be a number above 0",
    ),
    "shards of Orbax": (
        ["--model={tiny}", "--to=orbax", "--output=o", "--max_shard_gb=1"],
        "--max_shard_gb is of safetensors files; leave it out with --to=orbax",
    ),
    "no such model": (
        ["--model=nope", "--to=orbax", "--output=o"],
        "nope: no such file or folder, and no model of that name",
    ),
    "no parent": (
        ["--model={tiny}", "--to=orbax", "--output=absent/o"],
        "absent/o: its parent is no folder; make it, or name another",
    ),
    "a file": (["--model={tiny}", "--to=orbax", "--output=file"], "file: is there already; name"),
    "onto itself": (["--model={tiny}", "--to=orbax", "--output={tiny}"], "is there already; name"),
    "no model in it": (["--model=.", "--to=orbax", "--output=o"], "config.json is missing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_one_line_and_exit_code_2(tiny, tmp_path, run, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    arguments, message = WRONG[case]
    code, out, err = run(*(text.format(tiny=tiny) for text in arguments))
    assert (code, out) == (2, "")
    assert message in err and err.startswith("convert: ") and len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_a_disk_without_room_is_one_line_before_work_starts(tiny, tmp_path, run, monkeypatch, to):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(Export, "read", None)  # nothing is read
    output = tmp_path / "out"
    code, out, err = run(f"--model={tiny}", f"--to={to}", f"--output={output}")
    assert (code, out) == (2, "") and list(tmp_path.iterdir()) == []
    assert err == (
        f"convert: {output}: needs 0.00 GB, but the disk has 0.00 GB free; "
        "make room, or name a folder on another disk\n"
    )


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_a_disk_that_fills_on_the_way_is_named_and_leaves_nothing(tiny, tmp_path, to):
    """Stood in for by a limit on the size of a file, which a write meets in the same way."""
    limited = ["bash", "-c", 'ulimit -f 40 && exec "$@"', "limited"]
    arguments = [f"--model={tiny}", f"--to={to}", f"--output={tmp_path / 'out'}"]
    done = subprocess.run(
        [*limited, sys.executable, "-m", "scripts.convert", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("convert: ") and "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []

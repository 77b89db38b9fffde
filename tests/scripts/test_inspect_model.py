# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's parameters are and where from, and what differs between two, as printed."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.huggingface import HuggingFaceCheckpoint
from scripts import inspect_model
from tests.engine.tiny_gguf import CONFIG, write_tiny_gguf
from tests.fixtures import write_tiny
from tests.scripts.test_wrong_uses import convert_to

TINY = pathlib.Path(__file__).parents[1] / "data/golden/tiny"
KINDS = sorted(path.name for path in TINY.iterdir())


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs the command: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(inspect_model, "FLAGS", inspect_model.define_flags())
        with pytest.raises(SystemExit) as caught:
            inspect_model.run(["inspect_model", *arguments])
        return caught.value.code, *capsys.readouterr()

    return run


def row(out, name):
    """Returns the cells of a parameter's line, which stand two spaces apart."""
    [line] = [line for line in out.splitlines() if line.split(" ")[0] == name]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_a_checkpoint_is_listed_once_and_none_is_read(run, monkeypatch, kind):
    monkeypatch.setattr(HuggingFaceCheckpoint, "read", None)
    tensors = load_file(TINY / kind / "model.safetensors")
    numbers = sum(tensor.size for tensor in tensors.values())
    code, out, err = run(f"--model={TINY / kind}")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert f"parameters of {numbers} numbers and {4 * numbers} bytes" in lines[-1]
    assert lines[-1].endswith(f"from {len(tensors)} of {len(tensors)} tensors")
    listed = "\n".join(lines[1:-1])
    named = [name for name in tensors if name in listed]
    if ".experts.1." not in " ".join(tensors):  # of those stacked, the first and the last stand
        assert len(named) == len(tensors)
    column = lines[0].index("bytes") + len("bytes")
    assert sum(int(line[:column].split()[-1]) for line in lines[1:-1]) == 4 * numbers


def test_rows_say_shape_type_axes_and_origin(run):
    model = "model.layers.1."
    _, out, _ = run(f"--model={TINY / 'phi3'}")
    name = f"{model}self_attn.qkv_proj.weight, rows 64 to 96"
    assert row(out, "layers.1.k")[1:] == [
        "32x64",
        "float32",
        "kv_heads, width",
        "8192",
        "F32",
        name,
    ]
    _, out, _ = run(f"--model={TINY / 'deepseek_v3'}")
    name = f"{model}self_attn.kv_b_proj.weight, its values, by deepseek.names"
    assert row(out, "layers.1.v_up")[3:] == ["query_heads, -, -", "8192", "F32", name]
    first, last = (f"{model}mlp.experts.{n}.up_proj.weight" for n in (0, 7))
    assert row(out, "layers.1.experts_up")[1:] == [
        *("8x64x32", "float32", "experts, width, expert_ffn", "65536", "F32"),
        f"{first} to {last} (8 tensors), by family.transposed",
    ]
    _, out, _ = run(f"--model={TINY / 'gemma3'}")
    assert row(out, "final_norm")[-1] == "model.norm.weight, by gemma3.plus_one"


def test_gguf_files_and_what_is_left_over_are_shown(run, tmp_path):
    _, out, _ = run(f"--model={write_tiny_gguf(tmp_path / 'm.gguf')}")
    heads = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    cells = row(out, "layers.0.q")
    assert cells[1:3] == [f"{heads}x{CONFIG['hidden_size']}", "bfloat16"]
    assert cells[-1] == "blk.0.attn_q.weight, by llama.unpermute"
    folder = shutil.copytree(TINY / "llama", tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"odd": np.zeros(2, np.float32)}, folder / "model.safetensors")
    total = len(tensors)
    code, out, _ = run(f"--model={folder}")
    assert code == 0 and out.endswith(f"from {total} of {total + 1} tensors; not used: odd\n")


@pytest.fixture
def changed(tmp_path):
    """A copy of the tiny llama: one number moved, another not finite, another rope."""
    folder = shutil.copytree(TINY / "llama", tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.1.mlp.down_proj.weight"] = np.array(
        tensors["model.layers.1.mlp.down_proj.weight"]
    )
    weight[3, 4] = 2.0
    weight[5, 6] = 0.0
    tensors["model.norm.weight"] = np.array(tensors["model.norm.weight"])
    tensors["model.norm.weight"][7] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    parameters = config.get("rope_parameters") or config
    parameters["rope_theta"] = 123.0
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    return folder


def test_two_checkpoints_are_compared(run, changed):
    before = load_file(TINY / "llama/model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    arguments = [f"--model={TINY / 'llama'}", f"--other={changed}"]
    _, out, _ = run(*arguments)
    assert "0 of 30 parameters differ in place or shape" in out
    code, out, err = run(*arguments, "--values")
    assert (code, err) == (0, "")
    assert out.startswith("2 fields of the config differ\n")
    assert row(out, "norm_eps")[2] == "0.5" and row(out, "ropes.0.theta")[2] == "123.0"
    assert "\n2 of 30 parameters differ in place, shape or values\n" in out
    moved = [abs(float(before[3, 4]) - 2), abs(float(before[5, 6]))]
    absolute, relative = map(float, row(out, "layers.1.down")[2:])
    assert absolute == pytest.approx(max(moved), rel=0.01)
    assert relative == pytest.approx(max(moved[0] / 2, 1), rel=0.01)  # all of what became 0
    assert row(out, "final_norm")[1:] == ["values", "nan", "nan"]


def test_the_same_model_in_another_format_does_not_differ(run, tmp_path):
    convert_to(TINY / "gemma3", tmp_path / "orbax")
    _, out, _ = run(f"--model={TINY / 'gemma3'}", f"--other={tmp_path / 'orbax'}", "--values")
    assert "0 fields of the config differ" in out.splitlines()
    assert "0 of 54 parameters differ in place, shape or values" in out.splitlines()


def test_parameters_of_one_model_only_and_of_other_shapes_are_named(run, tmp_path):
    llama, qwen = TINY / "llama", TINY / "qwen2"
    _, out, _ = run(f"--model={llama}", f"--other={qwen}")
    assert row(out, "head")[1] == f"only in {llama}"
    assert row(out, "layers.2.q_bias")[1] == f"only in {qwen}"
    other = write_tiny(tmp_path / "other")
    _, out, _ = run(f"--model={llama}", f"--other={other}", "--values")
    assert row(out, "embedding")[1].startswith("shape (320, 64) and (300, ")
    assert row(out, "layers.2.q")[1] == f"only in {llama}"


WRONG = {
    "no model": ([], "--model is missing"),
    "values of one": (["--model={tiny}/llama", "--values"], "name the second with --other"),
    "no such model": (["--model=nope"], "nope: no such file or folder"),
    "no such other": (["--model={tiny}/llama", "--other=nope"], "nope: no such file or folder"),
    "no weights": (["--model={tmp}"], "neither model.safetensors nor"),
    "another shape": (["--model={tmp}/shape"], "has shape (64, 128); parameter layers.0.down"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_one_line_and_exit_code_2(run, tmp_path, case):
    shutil.copy(TINY / "llama/config.json", tmp_path)
    shape = shutil.copytree(TINY / "llama", tmp_path / "shape")
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(config | {"intermediate_size": 130}))
    arguments, message = WRONG[case]
    code, out, err = run(*(text.format(tiny=TINY, tmp=tmp_path) for text in arguments))
    assert (code, out) == (2, "")
    assert message in err and err.startswith("inspect_model: ") and len(err.splitlines()) == 1

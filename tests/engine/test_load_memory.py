# SPDX-License-Identifier: Apache-2.0
"""Loading a model keeps the process below 1.15 x its parameters + 0.5 GB, by the OS's figure."""

import json
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.orbax_writer import write_orbax
from engine.export import Export
from engine.loading import open_model
from scripts.launch import free_port
from tests.fixtures import llama_config, llama_shapes

KINDS = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ROOT = pathlib.Path(__file__).parents[2]

# VmHWM and not ru_maxrss: the latter begins with the peak of the process that started this one.
LOAD = """
import pathlib, sys
import jax, numpy as np
from engine.loading import load_model, open_model
from engine.models.tree import fuse
from sharding import RULES, make_mesh

path, dtype = sys.argv[1:]
model = open_model(pathlib.Path(path))
mesh = make_mesh(jax.local_devices()[:1])
params = fuse(load_model(model, mesh, RULES, np.dtype(dtype), stacked=False))
status = pathlib.Path("/proc/self/status").read_text()
peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
print(int(peak) * 1024, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def peak_and_parameters(path, dtype):
    """Returns (peak resident bytes of a process that loads the model, bytes of its parameters)."""
    command = [sys.executable, "-c", LOAD, str(path), dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak, parameters = map(int, done.stdout.split())
    print(f"{path} as {dtype}: peak {peak / 1e9:.2f} GB, parameters {parameters / 1e9:.2f} GB")
    return peak, parameters


def write_half_billion(folder, dtype):
    """Writes a llama of Qwen2.5-0.5B's shape (494 million parameters, tied); returns the folder."""
    config = llama_config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    shapes = llama_shapes(config)
    del shapes["lm_head.weight"]
    some = np.random.default_rng(0).standard_normal(1 << 20).astype(dtype)
    save_file(
        {name: np.resize(some, shape) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "stored, dtype",
    [("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")],
)
def test_a_folder_of_half_a_billion(tmp_path, stored, dtype):
    folder = write_half_billion(tmp_path, KINDS[stored])
    peak, parameters = peak_and_parameters(folder, dtype)
    assert parameters > 494e6 * np.dtype(KINDS[dtype]).itemsize
    assert peak < 1.15 * parameters + 0.5e9


@pytest.mark.slow
def test_an_orbax_folder_of_half_a_billion(tmp_path):
    model = open_model(write_half_billion(tmp_path, KINDS["bfloat16"]))
    write_orbax(Export(model, np.dtype(KINDS["bfloat16"])), tmp_path / "orbax")
    peak, parameters = peak_and_parameters(tmp_path / "orbax", "float32")
    assert peak < 1.15 * parameters + 0.5e9


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_of_half_a_billion(users_model, dtype):
    """Q4_K and others; the head is not tied, so 630 million parameters."""
    peak, parameters = peak_and_parameters(users_model("qwen2.5-coder-0.5b"), dtype)
    assert peak < 1.15 * parameters + 0.5e9


PART = """
import json, pathlib, sys
import jax, numpy as np
from sharding.launch import join

coordinator, process, path = sys.argv[1:]
join(coordinator, 2, int(process), start_timeout_s=60)

from engine.loading import load_model, open_model
from sharding import RULES, make_mesh

mesh = make_mesh(jax.devices(), tensor=2)
model = open_model(pathlib.Path(path))
params = load_model(model, mesh, RULES, np.dtype(np.float32), stacked=False)
status = pathlib.Path("/proc/self/status").read_text()
peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
leaves = jax.tree.leaves(params)
own = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
print(json.dumps([int(peak) * 1024, own, sum(leaf.nbytes for leaf in leaves)]))
"""


@pytest.mark.slow
def test_each_of_two_processes_holds_its_own_half(tmp_path):
    """From Orbax: its peak goes by what it has, not by what there is."""
    model = open_model(write_half_billion(tmp_path, KINDS["bfloat16"]))
    write_orbax(Export(model, np.dtype(KINDS["bfloat16"])), tmp_path / "orbax")
    coordinator = f"127.0.0.1:{free_port()}"
    arguments = [[coordinator, str(process), str(tmp_path / "orbax")] for process in range(2)]
    started = [
        subprocess.Popen([sys.executable, "-c", PART, *each], cwd=ROOT, stdout=subprocess.PIPE)
        for each in arguments
    ]
    for process in started:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        peak, own, whole = json.loads(out)
        print(f"peak {peak / 1e9:.2f} GB, own {own / 1e9:.2f} GB of {whole / 1e9:.2f} GB")
        assert own < 0.51 * whole
        assert peak < 1.15 * own + 0.5e9

# SPDX-License-Identifier: Apache-2.0
"""A folder that is written is read back as it was, by us and by safetensors; or it is not there."""

import json
import pathlib
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints
from checkpoints.huggingface_writer import plan_shards, write_huggingface
from checkpoints.orbax_writer import write_orbax
from tests.checkpoints.written import CONFIG, TENSORS, Memory, same_tokenizer
from tests.fixtures import byte_tokenizer, fallback_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("max_shard_bytes", [1, 2000, 4000, 1 << 30])
def test_what_is_written_is_read_back(tmp_path, max_shard_bytes):
    memory = Memory(TENSORS, tokenizer=fallback_tokenizer())
    folder = tmp_path / "m"
    write_huggingface(memory, folder, max_shard_bytes=max_shard_bytes)
    checkpoint = checkpoints.open_checkpoint(folder)
    assert checkpoint.kind == "huggingface"
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == memory.generation_config
    assert checkpoint.tensors == memory.tensors
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(checkpoint.read(name), values)
    assert same_tokenizer(checkpoint.tokenizer(), memory.tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("max_shard_bytes, files", [(1 << 30, 1), (4000, 2), (1, 5)])
def test_shards_are_as_large_as_they_may_be(tmp_path, max_shard_bytes, files):
    folder = tmp_path / "m"
    write_huggingface(Memory(TENSORS), folder, max_shard_bytes=max_shard_bytes)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == files and (folder / INDEX).exists() == (files > 1)
    stored = {name: shard.name for shard in shards for name in load_file(shard)}
    assert stored.keys() == TENSORS.keys()
    if files > 1:
        index = json.loads((folder / INDEX).read_text())
        assert index["weight_map"] == stored
        assert index["metadata"]["total_size"] == sum(a.nbytes for a in TENSORS.values())
        assert shards[0].name == f"model-00001-of-{files:05}.safetensors"


def test_types_stand_side_by_side(tmp_path):
    """Narrow types behind wide ones: safetensors reads each from its own multiple."""
    tensors = {
        "a": np.array([True, False, True]),
        "b": np.arange(3, dtype=np.int64),
        "c": np.ones((2, 3), ml_dtypes.bfloat16),
        "d": np.float32(2.5).reshape(()),
        "e": np.zeros((0, 4), np.float16),
    }
    write_huggingface(Memory(tensors), tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    checkpoint = checkpoints.open_checkpoint(tmp_path / "m")
    for name, values in tensors.items():
        for array in (stored[name], checkpoint.read(name)):
            assert (array.shape, array.dtype) == (values.shape, values.dtype)
            np.testing.assert_array_equal(array, values)


def test_a_plan_keeps_order_and_gives_a_large_tensor_its_own_shard():
    shapes = {"a": 10, "b": 10, "huge": 100, "c": 10, "d": 20}
    tensors = {name: np.zeros(size, np.int8) for name, size in shapes.items()}
    shards = list(plan_shards(Memory(tensors), 30).values())
    assert shards == [["a", "b"], ["huge"], ["c", "d"]]


@pytest.mark.parametrize("source", [byte_tokenizer, fallback_tokenizer])
@pytest.mark.parametrize(
    "bos_id, eos_ids, add_bos", [(None, [], None), (1, [2], False), (1, [], True)]
)
@pytest.mark.parametrize("unused", [(), (5, 290)])
def test_every_rule_of_a_tokenizer_is_kept(tmp_path, source, bos_id, eos_ids, add_bos, unused):
    memory = Memory(TENSORS, tokenizer=source())
    memory.config, memory.generation_config = {"dtype": "bfloat16"}, {}
    settings = dict(bos_id=bos_id, eos_ids=eos_ids, add_bos=add_bos, unused_ids=unused)
    memory.settings = settings | {"chat_template": None}
    write_huggingface(memory, tmp_path / "m")
    written = checkpoints.open_checkpoint(tmp_path / "m").tokenizer()
    assert same_tokenizer(written, memory.tokenizer())


def test_a_target_that_is_there_is_refused_and_kept(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "folder", "link"):
        with pytest.raises(FileExistsError, match=f"{name}: is there already; name a new folder"):
            write_huggingface(Memory(TENSORS), tmp_path / name)
    with pytest.raises(FileNotFoundError, match="m: its parent is no folder; make it, or name"):
        write_huggingface(Memory(TENSORS), tmp_path / "absent" / "m")
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    write_huggingface(Memory(TENSORS), tmp_path / "empty")
    assert checkpoints.open_checkpoint(tmp_path / "empty").tensors


def test_a_read_that_fails_leaves_nothing(tmp_path):
    class Failing(Memory):
        def read(self, name):
            if name == "norm":
                raise OSError("No space left on device")
            return super().read(name)

    with pytest.raises(OSError, match="No space left"):
        write_huggingface(Failing(TENSORS), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


SLOW_WRITE = """
import importlib, pathlib, sys, time
from checkpoints.orbax_writer import write_orbax
from tests.checkpoints.written import TENSORS, Memory

class Slow(Memory):
    def read(self, name):
        print(name, flush=True)
        time.sleep(60 if name == "norm" else 0)
        return super().read(name)

module, function, target = sys.argv[1:]
getattr(importlib.import_module(module), function)(Slow(TENSORS), pathlib.Path(target))
"""


@pytest.mark.parametrize("write", [write_huggingface, write_orbax])
def test_a_killed_write_leaves_no_target(tmp_path, write):
    writer = [write.__module__, write.__name__, str(tmp_path / "m")]
    command = [sys.executable, "-c", SLOW_WRITE, *writer]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline().strip() != "norm":
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".m.") and left.name.endswith(".part")
    write(Memory(TENSORS), tmp_path / "m")
    assert checkpoints.open_checkpoint(tmp_path / "m").tensors.keys() == TENSORS.keys()

# SPDX-License-Identifier: Apache-2.0
"""What is damaged or hostile gives one cheap error that names it, and runs nothing (CASES Q-07)."""

import pickle
import shutil

import pytest

import checkpoints
from checkpoints.orbax_writer import write_orbax
from tests.checkpoints import damaged_folders, damaged_gguf, damaged_orbax
from tests.checkpoints.gguf_files import raw_gguf, record
from tests.checkpoints.written import TENSORS, Memory
from tests.cost import bounded
from tests.fixtures import fallback_tokenizer


def read_all(path):
    """Opens a checkpoint, its tokenizer and each of its tensors, as a load would."""
    checkpoint = checkpoints.open_checkpoint(path)
    checkpoint.tokenizer()
    for name in checkpoint.tensors:
        checkpoint.read(name)


def refused(path, said, traced=True):
    """Holds what is said of `path` to one line that names it, and to the cost of a small file."""
    with bounded(traced=traced), pytest.raises((ValueError, OSError)) as caught:
        read_all(path)
    message = str(caught.value)
    assert said in message and str(path) in message and "\n" not in message, message
    assert len(message.replace(str(path), "")) < 520 or "File name too long" in message


@pytest.mark.parametrize("case", damaged_folders.CASES)
def test_a_damaged_folder_gives_one_cheap_error(tmp_path, case):
    folder = damaged_folders.write_good(tmp_path / "m")
    read_all(folder)
    damage, said = damaged_folders.CASES[case]
    damage(folder)
    refused(folder, said)
    assert not (folder / damaged_folders.MARKER).exists(), "a pickle was opened"


def test_weights_cut_short_anywhere_are_an_error(tmp_path):
    folder = damaged_folders.write_good(tmp_path / "m")
    weights = folder / damaged_folders.WEIGHTS
    whole = weights.read_bytes()
    for length in range(len(whole)):
        weights.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="model.safetensors: truncated, damaged or not"):
            checkpoints.open_checkpoint(folder)


def test_pickles_and_code_beside_good_weights_are_left_alone(tmp_path):
    """CASES H-03: safe weights win, and nothing else in a folder is opened."""
    folder = damaged_folders.write_good(tmp_path / "m")
    for name in ("pytorch_model.bin", "optimizer.pt", "tokenizer.model", "state.npy", "scheduler"):
        (folder / name).write_bytes(damaged_folders.pickled(folder))
    (folder / "modeling.py").write_text(f"open({str(folder / damaged_folders.MARKER)!r}, 'w')")
    read_all(folder)
    for name in ("pytorch_model.bin", "optimizer.pt"):
        refused(folder / name, "convert them with save_pretrained(..., safe_serialization=True)")
    for name in ("tokenizer.model", "state.npy", "modeling.py"):
        refused(folder / name, "not a GGUF file (it starts with b")
    assert not (folder / damaged_folders.MARKER).exists()


def test_the_marker_of_a_pickle_would_be_seen(tmp_path):
    pickle.loads(damaged_folders.pickled(tmp_path))
    assert (tmp_path / damaged_folders.MARKER).exists()


@pytest.mark.parametrize("case", damaged_gguf.CASES)
def test_a_damaged_gguf_file_gives_one_cheap_error_and_the_next_file_loads(tmp_path, case):
    path, good = tmp_path / "bad.gguf", tmp_path / "good.gguf"
    data, said = damaged_gguf.CASES[case]
    path.write_bytes(data)
    good.write_bytes(raw_gguf([damaged_gguf.GOOD_PAIR], [record("w")]))
    refused(path, said)
    assert checkpoints.open_checkpoint(good).read("w").shape == (2, 32)


@pytest.fixture(scope="module")
def orbax(tmp_path_factory):
    """An Orbax folder of four tensors, written once."""
    folder = tmp_path_factory.mktemp("orbax") / "m"
    write_orbax(Memory(TENSORS, tokenizer=fallback_tokenizer()), folder)
    read_all(folder)
    return folder


@pytest.mark.parametrize("case", damaged_orbax.CASES)
def test_a_damaged_orbax_folder_gives_one_cheap_error(orbax, tmp_path, case):
    folder = shutil.copytree(orbax, tmp_path / "m")
    damage, said = damaged_orbax.CASES[case]
    damage(folder)
    refused(folder, said, traced=False)

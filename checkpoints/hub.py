# SPDX-License-Identifier: Apache-2.0
"""Models of the Hugging Face Hub, by name, kept in the hub's own cache."""

import pathlib
import re
from typing import NamedTuple

# What a model folder is read from; no pickles and no code.
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_CONFIG = "config.json"
# Other forms of the same weights, and folders of other libraries' files.
_UNWANTED = ["*/*", "consolidated*"]

_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"({_WORD}/{_WORD})(?:@({_WORD}(?:/{_WORD})*))?(?::((?:{_WORD}/)*{_WORD}\.gguf))?"
)


class HubName(NamedTuple):
    """A repository, at a revision or the newest, or one GGUF file of it."""

    repository: str
    revision: str | None
    file: str | None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f":{self.file}" if self.file else "")


def parse_name(name: str) -> HubName | None:
    """Returns what "owner/name", "owner/name@revision" or "owner/name:file.gguf" names.

    None for any other text. A relative path of two names looks the same.
    """
    match = _NAME.fullmatch(name)
    return None if match is None or ".." in name else HubName(*match.groups())


def fetch(
    name: HubName,
    *,
    config_only: bool = False,
    endpoint: str | None = None,
    cache_folder: pathlib.Path | None = None,
) -> pathlib.Path:
    """Returns the folder of the repository's model, or the path of its one file.

    Only what is read is downloaded: safetensors, JSON files and the chat template, or with
    `config_only` the config alone (of a GGUF file, which holds it, all). Without an
    `endpoint` and a `cache_folder` they are huggingface_hub's own. Where the hub cannot be reached,
    what its cache has is used. Raises FileNotFoundError where there is no such model, and OSError
    where the hub cannot be reached.
    """
    # Imported here: it takes a second, and most models come from a path.
    import huggingface_hub
    from huggingface_hub import errors

    wanted = [name.file] if name.file else [_CONFIG] if config_only else _WANTED
    try:
        folder = huggingface_hub.snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=wanted,
            ignore_patterns=None if name.file else _UNWANTED,
            endpoint=endpoint,
            cache_dir=cache_folder,
        )
    except errors.GatedRepoError:
        raise PermissionError(
            f"{name}: the Hugging Face Hub gives it only to those who accepted its terms; do so on "
            "its page and log in, or give a local folder"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        what = "revision" if isinstance(error, errors.RevisionNotFoundError) else "model"
        raise FileNotFoundError(
            f"{name}: no such file or folder, and the Hugging Face Hub has no such {what} (or it "
            "is private); check the name, or give a local folder"
        ) from None
    except (
        OSError,
        ValueError,
        errors.EntryNotFoundError,
        errors.HTTPError,  # type: ignore[attr-defined]  # that of the client it is built on
    ) as error:
        raise OSError(
            f"{name}: no such file or folder, and it cannot be fetched from the Hugging Face Hub "
            f"({_reason(error)}); give a local folder"
        ) from None
    found = pathlib.Path(folder)
    if name.file and not (found / name.file).is_file():
        raise FileNotFoundError(
            f"{name}: {name.repository} of the Hugging Face Hub has no such file; check the name, "
            "or give a local file"
        )
    if not name.file and not config_only and not any(found.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{name}: no safetensors files in {found}, which is what the Hugging Face Hub has or, "
            "when it cannot be reached, what was fetched before; connect and try again, or name a "
            f"GGUF file of it as {name.repository}:FILE.gguf"
        )
    return found / name.file if name.file else found


def _reason(error: BaseException) -> str:
    """Returns the first line of what lies at the root of an error."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

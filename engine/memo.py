# SPDX-License-Identifier: Apache-2.0
"""A few numbers kept beside the compiled programs, so that one start finds what another found."""

import json
import os
from pathlib import Path


class Memo:
    """Numbers by key in one JSON file; without a path, for this process only.

    A damaged file counts as empty. Of two processes that write at once, one may lose its number,
    which costs that start's work once more.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._numbers: dict[str, int] = {}

    def get(self, key: str) -> int | None:
        """Returns the number of `key`, or None."""
        self._read()
        return self._numbers.get(key)

    def set(self, key: str, number: int) -> None:
        """Keeps `number` for `key`."""
        self._read()
        self._numbers[key] = number
        if self._path is not None:
            partial_file = self._path.with_suffix(f".{os.getpid()}")
            partial_file.write_text(json.dumps(self._numbers))
            os.replace(partial_file, self._path)

    def _read(self) -> None:
        try:
            if self._path is not None:
                self._numbers |= json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return

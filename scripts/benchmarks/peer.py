# SPDX-License-Identifier: Apache-2.0
"""The peer engine as a process beside ours, asked for one run at a time."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from scripts.command_line import UsageError

ROOT = Path(__file__).resolve().parents[2]


class Peer:
    """`scripts/peer_transformers.py` under another environment's Python, loaded and waiting."""

    def __init__(self, python: str, model: str) -> None:
        """Returns when the peer is ready; raises UsageError when it cannot be."""
        command = [python, "-m", "scripts.peer_transformers", f"--model={model}"]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise UsageError(
                f"--peer_python={python} cannot be run ({error.strerror}); name the python of an "
                "environment that has torch and transformers"
            ) from error
        self.pid = self._process.pid
        self.about = self._answer()

    def run(self, count: int) -> dict[str, Any]:
        """Returns the figures of one run of `count` requests."""
        assert self._process.stdin is not None, "stdin is a pipe"
        try:
            self._process.stdin.write(f"run {count}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise UsageError("the peer has ended; what it said stands above") from error
        return self._answer()

    def close(self) -> None:
        """Ends the peer: it stops at the end of its input."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "stdout is a pipe"
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            self._process.communicate()
            raise UsageError("the peer has ended; what it said stands above")
        return json.loads(line)

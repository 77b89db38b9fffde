# SPDX-License-Identifier: Apache-2.0
"""A peer engine as a process beside ours, given one batch at a time."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.command_line import UsageError

ROOT = Path(__file__).resolve().parents[2]


class PeerPlan(NamedTuple):
    """How to start a peer: its name, its script, the flag of its model, and what its model is."""

    name: str
    module: str
    flag: str
    model: str


def planned_peers(model: str | None, gguf: str | None) -> list[PeerPlan]:
    """Returns the peers of --peer_model and --peer_gguf."""
    plans = []
    if model is not None:
        plans.append(PeerPlan("transformers", "scripts.peer_transformers", "--peer_model", model))
    if gguf is not None:
        plans.append(PeerPlan("llama.cpp", "scripts.peer_llama_cpp", "--peer_gguf", gguf))
    return plans


class Peer:
    """A peer's script under another environment's Python, loaded and waiting."""

    def __init__(self, python: str, plan: PeerPlan) -> None:
        """Returns when the peer is ready; raises UsageError when it cannot be."""
        self.name = plan.name
        if not Path(plan.model).exists():
            raise UsageError(f"{plan.flag}={plan.model} does not exist; name what the peer loads")
        # Threads that spin while another process has the core make llama.cpp ten times slower.
        quiet = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
        extra = quiet if plan.name == "llama.cpp" else {}
        try:
            self._process = subprocess.Popen(
                [python, "-m", plan.module, f"--model={Path(plan.model).resolve()}"],
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **extra},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise UsageError(
                f"--peer_python={python} cannot be run ({error.strerror}); name the python of an "
                f"environment that has {plan.name}"
            ) from error
        self.pid = self._process.pid
        self.about = self._answer()

    def run(
        self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]
    ) -> tuple[float, list[list[float]]]:
        """Returns when the batch started, and when the tokens of each request came."""
        assert self._process.stdin is not None, "stdin is a pipe"
        batch = json.dumps({"prompts": list(prompts), "new_tokens": list(new_tokens)})
        try:
            self._process.stdin.write(batch + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        answer = self._answer()
        return answer["start_s"], [answer["step_s"][:count] for count in new_tokens]

    def close(self) -> None:
        """Ends the peer: it stops at the end of its input."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _ended(self) -> UsageError:
        return UsageError(f"the peer {self.name} has ended; what it said stands above")

    def _answer(self) -> dict:
        assert self._process.stdout is not None, "stdout is a pipe"
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            self.close()
            raise self._ended()
        return json.loads(line)


@contextlib.contextmanager
def started_peers(python: str | None, plans: Sequence[PeerPlan]) -> Iterator[dict[str, Peer]]:
    """Yields the peers by name, one loaded after the other; ends them afterwards."""
    peers: dict[str, Peer] = {}
    try:
        for plan in plans:
            assert python is not None, "the flags were checked"
            peers[plan.name] = Peer(python, plan)
        yield peers
    finally:
        for peer in peers.values():
            peer.close()

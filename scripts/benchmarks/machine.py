# SPDX-License-Identifier: Apache-2.0
"""What the machine gives: its read bandwidth, and how much of its cores others took."""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

BUFFER_BYTES = 512 * 10**6
# /proc/stat's columns that are work: user, nice, system, irq, softirq, and what the host's other
# machines stole. Guests count as users.
BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


def about_machine() -> dict[str, Any]:
    """Returns what the figures were taken on."""
    return {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


class ReadBandwidth:
    """Bytes a second that XLA reads at best, summing 512 MB of float32."""

    def __init__(self) -> None:
        self._flat = jnp.ones(BUFFER_BYTES // 4, jnp.float32)
        # XLA splits one of these over the cores better than the other, by platform and version.
        self._sums = [
            jax.jit(jnp.sum),
            jax.jit(lambda flat: flat.reshape(1000, -1).sum(axis=1)),
        ]
        for sum_of in self._sums:
            sum_of(self._flat).block_until_ready()

    def measure(self, repeats: int = 3) -> float:
        """Returns the best of some sums now; neighbours move it, so measure between runs."""
        best = 0.0
        for sum_of in self._sums * repeats:
            start = time.perf_counter()
            sum_of(self._flat).block_until_ready()
            best = max(best, BUFFER_BYTES / (time.perf_counter() - start))
        return best


class CpuWatch:
    """Counts the CPU that processes other than `pids` use, from when it is made."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._start = time.monotonic()
        self._before = self._foreign_ticks()

    def foreign_cores(self) -> float | None:
        """Returns the cores that others kept busy on average; None where /proc is missing."""
        after = self._foreign_ticks()
        if after is None or self._before is None:
            return None
        seconds = (after - self._before) / os.sysconf("SC_CLK_TCK")
        return max(0.0, seconds / (time.monotonic() - self._start))

    def _foreign_ticks(self) -> int | None:
        if not Path("/proc/stat").exists():
            return None
        columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        busy = sum(int(columns[place]) for place in BUSY_COLUMNS)
        return busy - sum(process_ticks(pid) for pid in self._pids)


def process_ticks(pid: int) -> int:
    """Returns the clock ticks that a process, its threads and its ended children have used."""
    # The command's name may hold spaces and brackets; the fields follow its last bracket.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime

# SPDX-License-Identifier: Apache-2.0
"""Bounds what a call may take: seconds, memory of Python's allocators, and resident memory."""

import contextlib
import pathlib
import time
import tracemalloc

STATUS = pathlib.Path("/proc/self/status")
RESET = pathlib.Path("/proc/self/clear_refs")


def peak_resident():
    """Returns the most bytes that were resident since the last reset."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def reset_peak():
    """Begins the peak anew; returns whether the system lets us."""
    try:
        RESET.write_text("5")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def bounded(*, seconds=1.0, megabytes=50.0, traced=True):
    """Fails where the block takes longer, or more memory at any moment than was held before it.

    `tracemalloc` sees what Python and NumPy ask for, even if it is never touched; the resident peak
    also sees mapped files and what libraries allocate, where the system can reset it. Without
    `traced` that alone counts: Python 3.11 can crash where tracing ends while threads of a library
    allocate, as TensorStore's may.
    """
    resettable = reset_peak()
    before = peak_resident() if resettable else 0
    if traced:
        tracemalloc.start()
    began = time.perf_counter()
    try:
        yield
        taken = time.perf_counter() - began
        asked = tracemalloc.get_traced_memory()[1] if traced else 0
    finally:
        if traced:
            tracemalloc.stop()
    resident = peak_resident() - before if resettable else 0
    assert taken < seconds, f"took {taken:.2f} s"
    assert asked < megabytes * 1e6, f"asked for {asked / 1e6:.0f} MB"
    assert resident < megabytes * 1e6, f"{resident / 1e6:.0f} MB more became resident"

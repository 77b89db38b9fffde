# SPDX-License-Identifier: Apache-2.0
"""The bounds of `tests.cost` can fail, each for its own reason."""

import mmap
import time

import numpy as np
import pytest

from tests.cost import bounded, reset_peak


def test_what_is_small_passes():
    with bounded():
        np.ones(1 << 20)


def test_time_is_bounded():
    with pytest.raises(AssertionError, match="took"), bounded(seconds=0.01):
        time.sleep(0.02)


def test_what_is_asked_for_is_bounded_though_untouched_and_freed():
    with pytest.raises(AssertionError, match="asked for 60 MB"), bounded():
        np.empty(60_000_000, np.uint8)


def test_what_becomes_resident_outside_of_python_is_bounded():
    if not reset_peak():
        pytest.skip("the system does not let a process reset its peak")
    with pytest.raises(AssertionError, match="became resident"), bounded():
        with mmap.mmap(-1, 60_000_000) as pages:
            for start in range(0, len(pages), 4096):
                pages[start] = 1

# SPDX-License-Identifier: Apache-2.0
"""Host memory that tensors are read into: fresh, and aligned so that a device may take it over."""

import math
import pathlib
from typing import Any

import numpy as np

# XLA's CPU device keeps an array as it is from this alignment on, and copies it below.
ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an uninitialised array in memory of its own that `jax.device_put` need not copy."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def read_array(path: pathlib.Path, start: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns the array whose bytes begin at byte `start` of the file.

    It is read, not mapped: pages of a mapped file count as this process's memory for as long as
    the map lives. Raises ValueError where the file ends before the array does.
    """
    array = aligned_empty(shape, dtype)
    left = array.reshape(-1).view(np.uint8).data
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left:
            num_bytes = file.readinto(left)
            if not num_bytes:
                raise ValueError(f"{path}: became shorter while it was read; fetch it again")
            left = left[num_bytes:]
    return array

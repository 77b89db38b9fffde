# SPDX-License-Identifier: Apache-2.0
"""Where parameters come from in a checkpoint, and what they shall be."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

# Of the names of a stack: a place that no tensor fills, which is zeros.
NO_TENSOR = ""


class Source(NamedTuple):
    """Where a parameter comes from.

    `names` is one tensor, or the tensors that are stacked on `stack` new leading axes: of
    layers, of experts, or of both; NO_TENSOR among them is a place of zeros. With `rows` it is
    rows [start, stop) of each tensor, all of whose rows must belong to some parameter; with a
    `share`, others may read the whole tensor too. `transform` is applied to each tensor before
    stacking; it must be a function of the array alone, whose result's shape depends on the
    shape only. Share one function object among like sources: its shape is then worked out once.
    """

    names: tuple[str, ...]
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    stack: int = 0
    rows: tuple[int, int] | None = None
    share: str | None = None


class Target(NamedTuple):
    """What a parameter shall be; without a sharding it goes to the default device, and without a
    layout it lies there as XLA has it."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None = None
    layout: Layout | None = None

    @property
    def place(self) -> Any:
        """Where it goes, as jax takes it."""
        return self.sharding if self.layout is None else Format(self.layout, self.sharding)


def part_of(tensor: np.ndarray, source: Source) -> np.ndarray:
    """Returns what one source takes of a tensor, transformed."""
    if source.rows is not None:
        tensor = tensor[source.rows[0] : source.rows[1]]
    return tensor if source.transform is None else source.transform(tensor)

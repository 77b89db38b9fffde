# SPDX-License-Identifier: Apache-2.0
"""Parameters of which this process has some devices' parts only: those are all that it reads."""

from typing import Any

import jax
import numpy as np

from checkpoints.buffers import aligned_empty
from checkpoints.checkpoint import Checkpoint
from checkpoints.sources import NO_TENSOR, Source, Target, part_of

Index = tuple[slice, ...]


def load_parts(checkpoint: Checkpoint, source: Source, target: Target) -> jax.Array:
    """Returns a parameter, the parts of this process's devices read one by one.

    A tensor that has a transform is read whole: one layer's, or one expert's.
    """
    assert target.sharding is not None, "it says which parts"
    parts: dict[Any, np.ndarray] = {}
    last: dict[str, np.ndarray] = {}

    def part(given: Index | None) -> np.ndarray:
        assert given is not None, "it is asked for a part"
        index = tuple(
            slice(*cut.indices(length)) for cut, length in zip(given, target.shape, strict=True)
        )
        key = tuple((cut.start, cut.stop) for cut in index)
        if key not in parts:  # several devices may have the same
            parts[key] = read_part(checkpoint, source, target, index, last)
        return parts[key]

    return jax.make_array_from_callback(target.shape, target.place, part)


def read_part(
    checkpoint: Checkpoint,
    source: Source,
    target: Target,
    index: Index,
    last: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Returns target[index] of a parameter on the host, in memory of its own.

    `last`: the tensor that was last read whole, as its source has it, by name.
    """
    last = {} if last is None else last
    array = aligned_empty(tuple(cut.stop - cut.start for cut in index), target.dtype)
    stacked = np.array(source.names, object).reshape(target.shape[: source.stack])
    names = np.atleast_1d(stacked[index[: source.stack]]).reshape(-1)
    inner = index[source.stack :]
    places = array.reshape(len(names), *array.shape[source.stack :])
    for place, name in zip(places, names, strict=True):
        place[...] = 0 if name == NO_TENSOR else read_cut(checkpoint, source, name, inner, last)
    return array


def read_cut(
    checkpoint: Checkpoint, source: Source, name: str, index: Index, last: dict[str, np.ndarray]
) -> np.ndarray:
    """Returns what a source takes of a tensor, at `index` of that."""
    if source.transform is not None:
        if name not in last:
            last.clear()
            last[name] = part_of(checkpoint.read(name), source)
        return last[name][index]
    if source.rows is not None:
        first = source.rows[0]
        index = (slice(index[0].start + first, index[0].stop + first), *index[1:])
    return checkpoint.read_part(name, index)

# SPDX-License-Identifier: Apache-2.0
"""Fills parameters from a checkpoint by a name table: each exactly once, or the load fails.

All that can be known from the headers is checked before any device memory is taken; then tensors
stream through the host a few at a time.
"""

import collections
import concurrent.futures
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from checkpoints.buffers import aligned_empty
from checkpoints.checkpoint import Checkpoint
from checkpoints.parts import load_parts
from checkpoints.sources import NO_TENSOR, Source, Target, part_of

logger = logging.getLogger(__name__)

_MOST_NAMES_SHOWN = 4
# Parameters that are read side by side: fresh memory costs more time than the copy into it.
READERS = min(4, os.cpu_count() or 1)


def load_parameters(
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    targets: Mapping[str, Target],
) -> dict[str, jax.Array]:
    """Returns the parameters by path, each in its target's shape, dtype and sharding.

    Raises ValueError naming the tensors where sources and targets differ, a tensor is missing, is
    used twice, or has another shape than its target. The host holds `READERS` parameters at a time,
    and those that are cut from the same tensors; where other processes have devices too, `READERS`
    parts of them.
    """
    check_parameters(checkpoint, sources, targets)
    together: dict[tuple[str, ...], list[str]] = {}
    for path, source in sources.items():
        together.setdefault(source.names, []).append(path)

    def load(paths: list[str]) -> dict[str, jax.Array]:
        if not is_whole(targets[paths[0]]):
            each = {path: load_parts(checkpoint, sources[path], targets[path]) for path in paths}
            return {path: array.block_until_ready() for path, array in each.items()}
        read = read_parameters(checkpoint, {path: sources[path] for path in paths}, targets)
        # Waiting here keeps a device's transfer queue from holding many parameters on the host.
        return {
            path: jax.device_put(array, targets[path].place).block_until_ready()
            for path, array in read.items()
        }

    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        try:
            parts = list(pool.map(load, together.values()))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    loaded = collections.ChainMap(*parts)
    return {path: loaded[path] for path in sources}


def is_whole(target: Target) -> bool:
    """Returns whether all devices that have some of a parameter are this process's."""
    return target.sharding is None or target.sharding.is_fully_addressable


def check_parameters(
    checkpoint: Checkpoint, sources: Mapping[str, Source], targets: Mapping[str, Target]
) -> None:
    """Raises ValueError unless each target has a source whose tensors exist, once, and fit."""
    if without := sorted(targets.keys() - sources.keys()):
        raise ValueError(f"{checkpoint.path}: parameters without a source: {_list(without)}")
    if without := sorted(sources.keys() - targets.keys()):
        raise ValueError(f"{checkpoint.path}: sources without a parameter: {_list(without)}")
    used_by: dict[tuple[str, tuple[int, int] | None, str | None], str] = {}
    rows_of: dict[str, list[tuple[int, int]]] = {}
    missing = []
    for path, source in sources.items():
        if len(source.names) != 1 and not source.stack:
            raise ValueError(f"parameter {path}: {len(source.names)} tensors, but no stack")
        for name in dict.fromkeys(filter(None, source.names)):
            key = (name, source.rows, source.share)
            if key in used_by:
                raise ValueError(
                    f"{checkpoint.path}: tensor {name!r} is used twice, by parameters "
                    f"{used_by[key]} and {path}"
                )
            used_by[key] = path
            if source.rows is not None:
                rows_of.setdefault(name, []).append(source.rows)
            if name not in checkpoint.tensors:
                missing.append(name)
    if missing:
        raise ValueError(f"{checkpoint.path}: tensors are missing: {_list(missing)}")
    for name, rows in rows_of.items():
        _check_rows(checkpoint, name, sorted(rows))
    shapes: dict[Any, tuple[int, ...]] = {}
    for path, source in sources.items():
        _check_shape(checkpoint, path, source, targets[path], shapes)


def _check_rows(checkpoint: Checkpoint, name: str, rows: list[tuple[int, int]]) -> None:
    """Raises ValueError unless a tensor's rows each belong to one parameter."""
    ends = [0, *(stop for _, stop in rows)]
    shape = checkpoint.tensors[name].shape
    if [start for start, _ in rows] != ends[:-1] or shape[:1] != (ends[-1],):
        raise ValueError(
            f"{checkpoint.path}: tensor {name!r} has shape {shape}; its parts are rows "
            f"{', '.join(f'{start} to {stop}' for start, stop in rows)}"
        )


def warn_of_unused(
    checkpoint: Checkpoint, sources: Mapping[str, Source], ignored: Collection[str] = ()
) -> None:
    """Gives one warning that lists the tensors that no source names, except `ignored`."""
    used = {name for source in sources.values() for name in source.names}
    extra = sorted(set(checkpoint.tensors).difference(used, ignored))
    if extra:
        logger.warning("%s: tensors that no parameter needs: %s", checkpoint.path, _list(extra))


def _check_shape(
    checkpoint: Checkpoint,
    path: str,
    source: Source,
    target: Target,
    shapes: dict[Any, tuple[int, ...]],
) -> None:
    """Raises ValueError unless each tensor, transformed, fits its place in the target."""
    if source.stack and math.prod(target.shape[: source.stack]) != len(source.names):
        raise ValueError(
            f"parameter {path} of shape {target.shape} is stacked from {len(source.names)} tensors"
        )
    needed = tuple(target.shape[source.stack :])
    for name in filter(None, source.names):
        stored = checkpoint.tensors[name].shape
        if source.rows is not None:
            stored = (source.rows[1] - source.rows[0], *stored[1:])
        key = (source.transform, stored)
        if key not in shapes:
            shapes[key] = _transformed_shape(checkpoint, name, stored, source.transform)
        if shapes[key] != needed:
            after = "" if source.transform is None else f", after its transform {shapes[key]}"
            raise ValueError(
                f"{checkpoint.path}: tensor {name!r} has shape {stored}{after}; "
                f"parameter {path} needs {needed}"
            )
    if target.sharding is not None:
        try:
            target.sharding.shard_shape(tuple(target.shape))
        except ValueError as error:
            raise ValueError(f"parameter {path} cannot be sharded so: {error}") from None


def _transformed_shape(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    transform: Callable[[np.ndarray], np.ndarray] | None,
) -> tuple[int, ...]:
    if transform is None:
        return shape
    try:
        # One zero seen as the whole tensor: most transforms move no data on it.
        return transform(np.broadcast_to(np.float32(0), shape)).shape
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"{checkpoint.path}: tensor {name!r} of shape {shape} does not suit its transform: "
            f"{error}"
        ) from None


def read_parameters(
    checkpoint: Checkpoint, sources: Mapping[str, Source], targets: Mapping[str, Target]
) -> dict[str, np.ndarray]:
    """Returns parameters on the host, in memory that nothing else holds.

    They are all made of the same tensors, each of which is read once. What `check_parameters`
    checks is taken to be so.
    """
    [names] = {source.names for source in sources.values()}
    parameters: dict[str, np.ndarray] = {}
    for index, name in enumerate(names):
        if name == NO_TENSOR:
            continue
        tensor = checkpoint.read(name)
        for path, source in sources.items():
            array = part_of(tensor, source)
            target = targets[path]
            if not source.stack:
                # Where it is aligned, the CPU device takes this memory over.
                fits = array.dtype == target.dtype and array.flags.c_contiguous
                parameters[path] = array if fits else _copied(array, target)
                continue
            if path not in parameters:
                parameters[path] = aligned_empty(target.shape, target.dtype)
                if NO_TENSOR in names:
                    parameters[path][...] = 0
            places = parameters[path].reshape(len(names), *target.shape[source.stack :])
            if array.shape != places.shape[1:]:
                raise ValueError(f"tensor {name!r} came as {array.shape} for parameter {path}")
            places[index] = array
    return parameters


def _copied(array: np.ndarray, target: Target) -> np.ndarray:
    parameter = aligned_empty(target.shape, target.dtype)
    parameter[...] = array
    return parameter


def _list(names: list[str]) -> str:
    """Returns the first names, and how many there are more."""
    more = len(names) - _MOST_NAMES_SHOWN
    shown = ", ".join(names[:_MOST_NAMES_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown

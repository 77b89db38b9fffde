# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model as a list: what each is, and where its checkpoint has it.

And what differs between two models. Values alone are read, a parameter of each at a time.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from checkpoints.checkpoint import Checkpoint
from checkpoints.load import check_parameters, read_parameters
from checkpoints.sources import Source, Target
from engine.loading import Model, path_keys, source_of
from engine.models.config import ModelConfig
from engine.models.tree import parameter_specs
from sharding import Spec

BLOCK = 1 << 20  # numbers that are compared at once


class Parameter(NamedTuple):
    """A parameter of one layer, or of none, and the tensors that it is made of."""

    spec: Spec
    source: Source

    @property
    def num_bytes(self) -> int:
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize


class Difference(NamedTuple):
    """The largest differences of a parameter's numbers; the relative one is of the larger."""

    absolute: float
    relative: float


def parameters_of(model: Model, dtype: np.dtype) -> dict[str, Parameter]:
    """Returns the parameters by name, as the engine would have them in `dtype`.

    Raises ValueError naming every missing or mis-shaped tensor.
    """
    names = model.family.names(model.checkpoint.kind, model.config)
    specs = parameter_specs(model.config, dtype, stacked=False)
    leaves = jax.tree.leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, Spec))
    found = {
        name_of(path, model.config): Parameter(spec, source_of(path, names, model.config, False))
        for path, spec in leaves
    }
    check_parameters(
        model.checkpoint,
        {name: parameter.source for name, parameter in found.items()},
        {name: target_of(parameter, dtype) for name, parameter in found.items()},
    )
    return found


def name_of(path: tuple[Any, ...], config: ModelConfig) -> str:
    """Returns "layers.3.q" of a parameter by its tree path, or its name alone."""
    keys = path_keys(path)
    if keys[0] != "segments":
        return keys[0]
    return f"layers.{config.segments()[keys[1]][keys[2]]}.{keys[-1]}"


def target_of(parameter: Parameter, dtype: Any) -> Target:
    """Returns the parameter in `dtype` as the loader wants it."""
    return Target(parameter.spec.shape, np.dtype(dtype))


def unused_tensors(checkpoint: Checkpoint, parameters: Mapping[str, Parameter]) -> list[str]:
    """Returns the tensors that no parameter is made of, in order."""
    used = {name for parameter in parameters.values() for name in parameter.source.names}
    return sorted(set(checkpoint.tensors) - used)


def origin(source: Source) -> str:
    """Returns where a parameter comes from: tensors, rows or part, and the transform's home."""
    first, *others = source.names
    text = first if not others else f"{first} to {others[-1]} ({len(source.names)} tensors)"
    if source.rows is not None:
        text += f", rows {source.rows[0]} to {source.rows[1]}"
    if source.share is not None:
        text += f", its {source.share}"
    if source.transform is not None:
        module = source.transform.__module__.rpartition(".")[2]
        text += f", by {module}.{source.transform.__qualname__.partition('.')[0]}"
    return text


def differing_fields(ours: Any, theirs: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (field, value, value) where two records differ, those within them by their fields."""
    for field, one, two in pairs(ours, theirs):
        whole = f"{name}.{field}" if name else field
        if any(True for _ in pairs(one, two)):
            yield from differing_fields(one, two, whole)
        elif one != two:
            yield whole, one, two


def pairs(ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, value, value) of two like records, or of as many in tuples; else nothing."""
    if type(ours) is not type(theirs):
        return
    if dataclasses.is_dataclass(ours):
        for field in dataclasses.fields(ours):
            yield field.name, getattr(ours, field.name), getattr(theirs, field.name)
    elif isinstance(ours, tuple) and len(ours) == len(theirs):
        if all(map(dataclasses.is_dataclass, ours)):
            yield from ((str(n), *both) for n, both in enumerate(zip(ours, theirs, strict=True)))


def difference(
    name: str, ours: tuple[Model, Parameter], theirs: tuple[Model, Parameter]
) -> Difference:
    """Returns the `Difference` of one parameter of two models; their shapes must be equal.

    It is read from one checkpoint and then from the other, as float32, and compared in blocks.
    """
    one, two = (
        read_parameters(
            model.checkpoint, {name: parameter.source}, {name: target_of(parameter, np.float32)}
        )[name].reshape(-1)
        for model, parameter in (ours, theirs)
    )
    absolute = relative = 0.0
    for start in range(0, one.size, BLOCK):
        a, b = (flat[start : start + BLOCK].astype(np.float64) for flat in (one, two))
        with np.errstate(invalid="ignore"):  # of two infinities
            apart = np.where(a == b, 0.0, np.abs(a - b))
        scale = np.maximum(np.abs(a), np.abs(b))
        absolute = np.maximum(absolute, apart.max())
        shares = np.divide(apart, scale, out=np.zeros_like(apart), where=apart != 0)
        relative = np.maximum(relative, shares.max())
    return Difference(float(absolute), float(relative))

# SPDX-License-Identifier: Apache-2.0
"""A model whose heads, feed-forward and vocabulary can be shared out evenly over devices.

What does not divide is filled up: a query head of zeros adds nothing, since its output matrix is
zeros too, nor does a feed-forward unit; ids that fill the vocabulary up are never sampled. Where
there are fewer KV heads than ways each is copied, and its query heads are shared out among the
copies. Tensor parallelism is that of Megatron-LM, arXiv 1909.08053.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from engine.models.config import ModelConfig
from pallas_kernels.backends import Backend
from sharding import Spec

Transform = Callable[[np.ndarray], np.ndarray]


def split_config(config: ModelConfig, ways: int, expert_ffn_ways: int | None = None) -> ModelConfig:
    """Returns `config` with sizes that `ways` divides, all devices' parts together.

    `expert_ffn_ways`: those that an expert's units are split over, if not `ways`. Raises ValueError
    where KV heads neither divide nor are divided by the ways.
    """
    if ways == 1:
        return config
    copies, groups = kv_copies(config, ways), config.query_heads // config.kv_heads
    kv_heads = config.kv_heads * copies
    experts = config.experts
    if experts is not None:
        experts = dataclasses.replace(
            experts,
            width=filled(experts.width, expert_ffn_ways or ways),
            shared_width=filled(experts.shared_width, ways),
        )
    return dataclasses.replace(
        config,
        query_heads=kv_heads * -(-groups // copies),
        kv_heads=kv_heads,
        real_query_heads=config.query_heads,
        ffn_width=filled(config.ffn_width, ways),
        vocab_size=filled(config.vocab_size, ways),
        experts=experts,
    )


def kv_copies(config: ModelConfig, ways: int) -> int:
    """Returns how many devices have each KV head; ValueError if that is no whole number."""
    heads = config.kv_heads
    if config.latent is not None:  # the heads of one latent, as many as there are queries
        if heads % ways:
            raise ValueError(
                f"{heads} heads of latent attention cannot be shared out over tensor={ways}; use a "
                f"tensor size that divides {heads}"
            )
        return 1
    if heads % ways and ways % heads:
        raise ValueError(
            f"{heads} KV heads cannot be shared out over tensor={ways}: neither divides the other; "
            f"use a tensor size that divides {heads}, or a multiple of it"
        )
    return max(1, ways // heads)


def with_backend(config: ModelConfig, backend: Backend) -> ModelConfig:
    """Returns the config with who multiplies for its experts, if it has some."""
    if config.experts is None:
        return config
    experts = dataclasses.replace(config.experts, backend=backend)
    return dataclasses.replace(config, experts=experts)


def with_slots(config: ModelConfig, redundant: int, *, counts: bool) -> ModelConfig:
    """Returns `config` with places for experts and so many copies; ValueError without any."""
    if config.experts is None:
        raise ValueError(f"a {config.family} has no experts to copy or to place anew")
    slots = config.experts.count + redundant
    experts = dataclasses.replace(config.experts, slots=slots, counts=counts)
    return dataclasses.replace(config, experts=experts)


def filled(length: int, ways: int) -> int:
    """Returns `length`, or the next that `ways` divides."""
    return -(-length // ways) * ways


def device_config(
    config: ModelConfig,
    ways: int,
    expert_ways: int = 1,
    stages: int = 1,
    expert_axes: tuple[str, ...] = ("expert",),
) -> ModelConfig:
    """Returns one device's part of a config that `split_config` made.

    `expert_axes`: the mesh axes that experts are shared out over, of `expert_ways` together. Raises
    ValueError where they cannot be shared out evenly.
    """
    experts = config.experts
    if expert_ways > 1 and (experts is None or experts.places % expert_ways):
        what = "no experts"
        if experts is not None:
            what = f"{experts.places} {'slots of experts' if experts.slots else 'experts'}"
        raise ValueError(
            f"{' x '.join(expert_axes)}={expert_ways} does not divide {what}; use a size that does"
        )
    config = dataclasses.replace(
        config, expert_ways=expert_ways, expert_axes=expert_axes, stages=stages
    )
    if ways == 1:
        return config
    if experts is not None:
        width = experts.width if "tensor" in expert_axes else experts.width // ways
        shared = experts.shared_width // ways
        experts = dataclasses.replace(experts, width=width, shared_width=shared)
    return dataclasses.replace(
        config,
        query_heads=config.query_heads // ways,
        kv_heads=config.kv_heads // ways,
        ffn_width=config.ffn_width // ways,
        vocab_size=config.vocab_size // ways,
        experts=experts,
        tensor_ways=ways,
    )


@dataclasses.dataclass(frozen=True)
class Fill:
    """Fills up one axis of an array with zeros."""

    axis: int  # from the end
    length: int

    def __call__(self, array: np.ndarray) -> np.ndarray:
        missing = self.length - array.shape[self.axis]
        if not missing:
            return array
        pads = [(0, 0)] * array.ndim
        pads[self.axis] = (0, missing)
        return np.pad(array, pads)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Shares out the `per` heads of each KV head among its copies, `each` a copy, the last ones
    zeros; with `each` None a copy has them all. `width` numbers a head.
    """

    axis: int  # from the end
    width: int
    per: int
    copies: int
    each: int | None

    def __call__(self, array: np.ndarray) -> np.ndarray:
        axis = self.axis % array.ndim
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        heads = array.reshape(*before, -1, self.per, self.width, *after)
        if self.each is None:
            shared = np.repeat(heads, self.copies, axis=axis)
        else:
            pads = [(0, 0)] * heads.ndim
            pads[axis + 1] = (0, self.each * self.copies - self.per)
            shared = np.pad(heads, pads)
        return shared.reshape(*before, -1, *after)


@dataclasses.dataclass(frozen=True)
class Chain:
    """One transform after another."""

    first: Transform
    second: Transform

    def __call__(self, array: np.ndarray) -> np.ndarray:
        return self.second(self.first(array))


def after(first: Transform | None, second: Transform | None) -> Transform | None:
    """Returns one transform after the other, where there are both."""
    if first is None or second is None:
        return first or second
    return Chain(first, second)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Takes the entries of the first axis at some places, in this order."""

    places: tuple[int, ...]

    def __call__(self, array: np.ndarray) -> np.ndarray:
        return array[list(self.places)]


def arrangement(spec: Spec, stored: Spec, config: ModelConfig, ways: int) -> Transform | None:
    """Returns what brings a parameter of `config` to that of its split, None for nothing.

    `spec` and `stored` are the parameter's specs in the split config and in `config`. The
    transform is applied to each tensor before stacking, so it counts axes from the end.
    """
    steps: list[Transform] = []
    copies = kv_copies(config, ways)
    groups = config.query_heads // config.kv_heads
    for axis, (logical, long, short) in enumerate(
        zip(spec.axes, spec.shape, stored.shape, strict=True)
    ):
        place = axis - len(spec.shape)
        if long == short:
            continue
        if logical == "kv_heads":
            steps.append(Heads(place, short // config.kv_heads, 1, copies, None))
        elif logical == "query_heads":
            width, each = short // config.query_heads, -(-groups // copies)
            steps.append(Heads(place, width, groups, copies, each))
        else:
            steps.append(Fill(place, long))
    return functools.reduce(after, steps, None)

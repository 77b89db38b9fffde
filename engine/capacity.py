# SPDX-License-Identifier: Apache-2.0
"""What a model takes and what fits beside it: parameters, KV, pages, and a layout over chips.

All of it is counted from the specs of parameters and pages; no weights are needed. The temporaries
of programs and the state of rows are not counted: `memory_fraction` leaves them their room.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from engine.kv import KVLayout, kv_layout
from engine.models.config import ModelConfig
from engine.models.split import device_config, split_config
from engine.models.tree import parameter_specs
from engine.pages import PagePool
from engine.rows import Rows
from pallas_kernels.pages import page_bytes
from sharding import RULES, Axes, Spec


class Parallel(NamedTuple):
    """Chips along each mesh axis, but for the stages of a pipeline, which plans leave out."""

    data: int = 1
    sequence: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def chips(self) -> int:
        return math.prod(self)

    @property
    def replicas(self) -> int:
        """Shares of the requests, each with rows and a pool of its own."""
        return self.data * self.expert

    @property
    def mesh(self) -> str:
        """The layout as `EngineConfig.mesh` has it."""
        sizes = self._asdict().items()
        return ",".join(f"{name}={size}" for name, size in sizes if size > 1) or "data=1"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model as plans see it: its parameters by name (one entry a layer), its pages, its limit.

    lanes: what the cells of pages are filled up to a multiple of.
    """

    config: ModelConfig
    layout: KVLayout
    specs: tuple[tuple[str, Spec], ...]
    max_model_len: int
    step_tokens: int
    lanes: int = 1

    def split(self, ways: int) -> "Shape":
        """Returns the shape as it is shared out over a tensor axis, all chips' parts together:
        with what fills up, and KV heads as often as they are copied."""
        if ways == 1:
            return self
        config, layout = split_config(self.config, ways), self.layout
        return dataclasses.replace(
            self,
            config=config,
            layout=kv_layout(config, layout.page_size, layout.dtype, lanes=self.lanes),
            specs=named_specs(config, layout.dtype),
        )

    def heads_ways(self, parallel: Parallel) -> int:
        """Returns the chips that the KV heads of a cell are split over."""
        return shards((self.layout.heads_axis,), parallel)


class KVKind(NamedTuple):
    """Layers with one kind of attention; `cell_bytes` of a token in all of them."""

    window: int | None
    layers: int
    groups: int
    cell_bytes: int


class Room(NamedTuple):
    """What a layout leaves: bytes of a chip; pages of a chip, and those there that a request of
    full length takes; requests of full length."""

    parallel: Parallel
    weight_bytes: int
    pool_bytes: int
    page_bytes: int
    pages: int
    request_pages: int
    batch: int  # of all replicas together


def shape_of(
    config: ModelConfig,
    dtype: np.dtype,
    *,
    page_size: int,
    max_model_len: int,
    step_tokens: int,
    lanes: int = 1,
) -> Shape:
    """Returns the shape of a model whose weights and KV are in `dtype`."""
    layout = kv_layout(config, page_size, dtype, lanes=lanes)
    return Shape(config, layout, named_specs(config, dtype), max_model_len, step_tokens, lanes)


@functools.cache
def named_specs(config: ModelConfig, dtype: np.dtype) -> tuple[tuple[str, Spec], ...]:
    """Returns the name and spec of every parameter, one entry a layer."""
    tree = parameter_specs(config, dtype, stacked=False)
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, Spec))
    return tuple((last_key(path), spec) for path, spec in leaves)


def last_key(path: tuple[Any, ...]) -> str:
    """Returns the name of a parameter, by its tree path."""
    return path[-1].key


def size(spec: Spec) -> int:
    """Returns the numbers of a parameter."""
    return math.prod(spec.shape)


def num_parameters(shape: Shape) -> int:
    """Returns the parameters of the model; a tied head counts once."""
    return sum(size(spec) for _, spec in shape.specs)


def used_share(name: str, spec: Spec, config: ModelConfig) -> float:
    """Returns the share of a parameter that one token is multiplied with: some experts, no row of
    an embedding that is not the head too."""
    if name == "embedding" and not config.tied_embeddings:
        return 0.0
    if config.experts is not None and "experts" in spec.axes:
        return config.experts.chosen / config.experts.count
    return 1.0


def active_parameters(shape: Shape) -> int:
    """Returns the parameters that work for one token, without the embedding it is looked up in."""
    shares = (size(spec) * used_share(name, spec, shape.config) for name, spec in shape.specs)
    return round(sum(shares))


def shards(axes: Axes, parallel: Parallel) -> int:
    """Returns the chips that an array of such axes is split over; on all others it is repeated."""
    sizes = parallel._asdict()
    return math.prod(sizes.get(name, 1) for axis in axes for name in RULES.mesh_axes(axis))


def weight_bytes(shape: Shape, parallel: Parallel | None = None) -> int:
    """Returns the bytes of the weights on one chip."""
    parallel = parallel or Parallel()
    return sum(
        -(-size(spec) // shards(spec.axes, parallel)) * spec.dtype.itemsize
        for _, spec in shape.split(parallel.tensor).specs
    )


def cell_bytes(layout: KVLayout) -> int:
    """Returns the bytes of one token in one layer."""
    return page_bytes(layout.kv_heads, 1, layout.cell_width, layout.dtype)


def kv_kinds(shape: Shape) -> Iterator[KVKind]:
    """Yields the kinds of attention with their layers, page groups and bytes a token."""
    windows = shape.config.windows
    for window in dict.fromkeys(windows):
        layers = windows.count(window)
        groups = sum(group.window == window for group in shape.layout.groups)
        yield KVKind(window, layers, groups, layers * cell_bytes(shape.layout))


def request_pages(shape: Shape, stripes: int = 1) -> int:
    """Returns the pages that a request of full length holds while it decodes, of all groups; those
    behind a window are free again. With `stripes`, those on each of the chips they are dealt out
    to."""
    groups = shape.layout.groups
    rows = Rows(
        num_rows=1,
        max_num_seqs=1,
        page_size=shape.layout.page_size * stripes,
        max_model_len=shape.max_model_len,
        step_tokens=shape.step_tokens,
        groups=groups,
        pool=PagePool(2, 1, len(groups)),
    )
    return rows.least_pages(shape.max_model_len)


def room(shape: Shape, usable_bytes: int, parallel: Parallel) -> Room:
    """Returns what a layout leaves on chips with `usable_bytes` each; nothing may be left."""
    weights, split = weight_bytes(shape, parallel), shape.split(parallel.tensor)
    page = split.layout.page_bytes // split.heads_ways(parallel)
    pages = max(0, usable_bytes - weights) // page
    needed = request_pages(shape, parallel.sequence)
    batch = max(0, pages - 1) // needed * parallel.replicas  # page 0 is reserved
    return Room(parallel, weights, pages * page, page, pages, needed, batch)


def layouts(shape: Shape, chips: int) -> Iterator[Parallel]:
    """Yields the layouts over `chips` that the engine has, by their tensor size."""
    page_size, longest = shape.layout.page_size, shape.max_model_len
    for tensor in divisors(chips):
        for expert in divisors(chips // tensor):
            if not is_built(shape.config, expert, tensor):
                continue
            for sequence in divisors(chips // tensor // expert):
                if sequence == 1 or sequence * page_size <= longest:  # a page for each, at least
                    yield Parallel(chips // tensor // expert // sequence, sequence, expert, tensor)


def is_built(config: ModelConfig, expert: int, tensor: int) -> bool:
    """Whether the engine can share a model out so, with a query head or more on each chip."""
    try:
        device_config(split_config(config, tensor), tensor, expert)
    except ValueError:
        return False
    return tensor <= config.query_heads


def roomy(shape: Shape, usable_bytes: int, chips: int) -> list[Room]:
    """Returns what the layouts leave that hold a request of full length, at least."""
    rooms = [room(shape, usable_bytes, parallel) for parallel in layouts(shape, chips)]
    return [found for found in rooms if found.batch]


def least_chips(shape: Shape, usable_bytes: int, most: int = 1024) -> int | None:
    """Returns the fewest chips, of powers of two up to `most`, that have a layout with room."""
    counts = [2**power for power in range(most.bit_length())]
    return next((n for n in counts if roomy(shape, usable_bytes, n)), None)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, least first."""
    return [n for n in range(1, number + 1) if number % n == 0]

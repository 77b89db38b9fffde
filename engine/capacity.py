# SPDX-License-Identifier: Apache-2.0
"""What a model takes and what fits beside it: parameters, KV, pages, and a layout over chips.

All of it is counted from the specs of parameters and pages; no weights are needed. The temporaries
of programs and the state of rows are not counted: `memory_fraction` leaves them their room.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from engine.kv import KVLayout, kv_layout
from engine.models.config import ModelConfig
from engine.models.tree import parameter_specs
from engine.pages import PagePool
from engine.rows import Rows
from pallas_kernels.pages import page_bytes
from sharding import RULES, Axes, Spec

# Of the usable memory: a pool of this share is useful, whatever the requests.
USEFUL_SHARE = 0.25


class Parallel(NamedTuple):
    """Chips along each mesh axis. Attention has a replica on every `tensor` chips."""

    data: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def chips(self) -> int:
        return self.data * self.expert * self.tensor

    @property
    def replicas(self) -> int:
        """Shards of the requests, each with a pool of its own."""
        return self.data * self.expert


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model as plans see it: its parameters by name (one entry a layer), its pages, its limit."""

    config: ModelConfig
    layout: KVLayout
    specs: tuple[tuple[str, Spec], ...]
    max_model_len: int
    step_tokens: int


class KVKind(NamedTuple):
    """Layers with one kind of attention; `cell_bytes` of a token in all of them."""

    window: int | None
    layers: int
    groups: int
    cell_bytes: int


class Room(NamedTuple):
    """What a layout leaves: bytes of a chip; pages of one replica; requests of full length."""

    parallel: Parallel
    weight_bytes: int
    pool_bytes: int
    page_bytes: int
    pages: int
    request_pages: int
    batch: int  # of all replicas together


def shape_of(
    config: ModelConfig, dtype: np.dtype, *, page_size: int, max_model_len: int, step_tokens: int
) -> Shape:
    """Returns the shape of a model whose weights and KV are in `dtype`."""
    tree = parameter_specs(config, dtype, stacked=False)
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, Spec))
    specs = tuple((last_key(path), spec) for path, spec in leaves)
    layout = kv_layout(config, page_size, dtype)
    return Shape(config, layout, specs, max_model_len, step_tokens)


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
        for _, spec in shape.specs
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


def request_pages(shape: Shape) -> int:
    """Returns the pages that a request of full length holds while it decodes, of all groups; those
    behind a window are free again."""
    groups = shape.layout.groups
    rows = Rows(
        num_rows=1,
        max_num_seqs=1,
        page_size=shape.layout.page_size,
        max_model_len=shape.max_model_len,
        step_tokens=shape.step_tokens,
        groups=groups,
        pool=PagePool(2, 1, len(groups)),
    )
    return rows.least_pages(shape.max_model_len)


def room(shape: Shape, usable_bytes: int, parallel: Parallel) -> Room:
    """Returns what a layout leaves on chips with `usable_bytes` each; nothing may be left."""
    weights = weight_bytes(shape, parallel)
    page = shape.layout.page_bytes // shards((shape.layout.heads_axis,), parallel)
    pages = max(0, usable_bytes - weights) // page
    needed = request_pages(shape)
    batch = max(0, pages - 1) // needed * parallel.replicas  # page 0 is reserved
    return Room(parallel, weights, pages * page, page, pages, needed, batch)


def layouts(config: ModelConfig, chips: int) -> Iterator[Parallel]:
    """Yields the layouts over `chips`, by their tensor size.

    The tensor size divides all that the rules split over it, the KV heads too unless they are one
    latent. Experts are split over as many of the other chips as divide their number.
    """
    experts = config.experts.count if config.experts else 1
    heads = [config.query_heads] + ([config.kv_heads] if config.latent is None else [])
    split = [*heads, config.ffn_width, config.vocab_size]
    if config.experts is not None:
        split += [config.experts.width, config.experts.shared_width]
    for tensor in divisors(chips):
        if all(length % tensor == 0 for length in split):
            expert = max(n for n in divisors(chips // tensor) if experts % n == 0)
            yield Parallel(chips // tensor // expert, expert, tensor)


def least_chips(shape: Shape, usable_bytes: int, max_num_seqs: int, most: int = 1024) -> int | None:
    """Returns the fewest chips, of powers of two up to `most`, that `advise` has a layout for."""
    counts = [2**power for power in range(most.bit_length())]
    return next((n for n in counts if advise(shape, usable_bytes, n, max_num_seqs)), None)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, least first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def is_useful(usable_bytes: int, found: Room, max_num_seqs: int) -> bool:
    """Whether the pool holds all rows at full length, or one and a quarter of the memory."""
    if found.batch >= max_num_seqs:
        return True
    return found.batch > 0 and found.pool_bytes >= USEFUL_SHARE * usable_bytes


def advise(shape: Shape, usable_bytes: int, chips: int, max_num_seqs: int) -> Room | None:
    """Returns the layout with the least tensor size that leaves a useful pool, else the one that
    holds most requests of full length; None where none holds one.

    Every product over tensor shards waits for an exchange, so the chips that are not needed to
    hold the model are given to other requests.
    """
    rooms = [room(shape, usable_bytes, parallel) for parallel in layouts(shape.config, chips)]
    for found in rooms:
        if is_useful(usable_bytes, found, max_num_seqs):
            return found
    best = max(rooms, key=lambda found: found.batch)
    return best if best.batch else None

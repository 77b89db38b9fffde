# SPDX-License-Identifier: Apache-2.0
"""What the chips of a mesh tell each other in a step, as it follows from a model's sizes.

The tensor axis has a sum after the embedding and two a layer (Megatron-LM, arXiv 1909.08053); the
expert axis two exchanges of rows a layer, and the counts that they need; the sequence axis merges
parts of softmaxes, or passes the cells of a ring around. The data axis has nothing to tell.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from engine.capacity import Parallel, Shape
from engine.experts import sent_at_once
from engine.models.config import Experts

FLOAT_BYTES = COUNT_BYTES = 4  # of float32, and of int32


class Collective(NamedTuple):
    """Something asked for `times` in a step, in each of so many layers or once outside of them, and
    the bytes that it makes on a chip each time."""

    kind: str
    times: int
    bytes: int


class Traffic(NamedTuple):
    """A collective, with the bytes that a chip sends for it, in `hops` one after the other."""

    collective: Collective
    sent_bytes: float
    hops: int


def hops_around(ways: int) -> int:
    """Returns how far it is to all other chips: around a ring, or around those of a torus."""
    return min(ways - 1, 2 * math.isqrt(ways - 1))


def summed(ways: int, times: int, size: int) -> Traffic:
    """Returns a sum of `size` bytes as rings do it: each part goes around twice."""
    sent = 2 * (ways - 1) / ways * size
    return Traffic(Collective("all-reduce", times, size), sent, 2 * hops_around(ways))


def gathered(ways: int, times: int, size: int) -> Traffic:
    """Returns a gathering to `size` bytes."""
    return Traffic(
        Collective("all-gather", times, size), (ways - 1) / ways * size, hops_around(ways)
    )


def step_traffic(shape: Shape, parallel: Parallel, tokens: int) -> list[Traffic]:
    """Returns what a step has of so many tokens on a chip, but for rings.

    `shape` is split over the tensor axis. Sums of several row groups are one: XLA joins them.
    """
    config, found = shape.config, []
    state = tokens * config.width * shape.layout.dtype.itemsize
    if parallel.tensor > 1:
        found.append(summed(parallel.tensor, 1, state))
    for run in config.segments():
        layers = len(run)
        if parallel.tensor > 1:
            found += [summed(parallel.tensor, layers, state)] * 2
            if config.qk_norm == "whole" and config.latent is None:
                found += [summed(parallel.tensor, layers, tokens * FLOAT_BYTES)] * 2
        if parallel.sequence > 1:
            found += merging(shape, parallel, layers, tokens)
        if parallel.expert > 1 and config.experts is not None and config.has_experts(run.start):
            found += dispatch(shape, config.experts, parallel.expert, layers, tokens)
    return found


def merging(shape: Shape, parallel: Parallel, layers: int, tokens: int) -> Iterator[Traffic]:
    """Yields what merges the softmaxes over the parts of a context: highest logits, then sums."""
    heads = tokens * shape.config.query_heads // parallel.tensor
    first, end = shape.layout.values
    yield summed(parallel.sequence, layers, heads * FLOAT_BYTES)
    yield summed(parallel.sequence, layers, heads * (end - first + 1) * FLOAT_BYTES)


def dispatch(
    shape: Shape, experts: Experts, ways: int, layers: int, tokens: int
) -> Iterator[Traffic]:
    """Yields what brings tokens to their experts and back, experts being chosen evenly.

    Buffers are of one round, and larger than what is sent.
    """
    row = shape.config.width * shape.layout.dtype.itemsize
    rows = tokens * experts.chosen
    sent = (ways - 1) / ways * rows * row
    yield gathered(ways, layers, ways * experts.count * COUNT_BYTES)
    yield gathered(ways, layers, ways * ways * COUNT_BYTES)
    for made in (ways * sent_at_once(rows, ways, shape.config.width), rows):
        yield Traffic(Collective("ragged-all-to-all", layers, made * row), sent, hops_around(ways))


def ring_traffic(shape: Shape, parallel: Parallel, tokens: int, before: int) -> Iterator[Traffic]:
    """Yields what a ring adds whose devices have so many tokens each, and has no merging for.

    The cells pass by all devices; queries meet the `before` cells in all devices' pages, and their
    parts are merged.
    """
    config, ways, all_tokens = shape.config, parallel.sequence, tokens * parallel.sequence
    itemsize = shape.layout.dtype.itemsize
    cells = tokens * config.cell_width * itemsize // shape.heads_ways(parallel)
    hop = Collective("collective-permute", config.num_layers, cells)
    yield Traffic(hop, (ways - 1) * cells, ways - 1)
    yield gathered(ways, 1, all_tokens * config.width * itemsize)
    if before:
        key = config.head_width if config.latent is None else config.latent.cell_width
        queries = all_tokens * config.query_heads // parallel.tensor * key
        yield gathered(ways, config.num_layers, queries * itemsize)
        yield from merging(shape, parallel, config.num_layers, all_tokens)

# SPDX-License-Identifier: Apache-2.0
"""The least time that a step can take on given chips: operations, bytes of weights and KV, links.

Williams, Waterman and Patterson, "Roofline" (CACM 2009): a step takes at least its operations over
the chip's rate, and at least its bytes over the memory's. Attention counts the cells that queries
see; latent attention has absorbed weights, as the engine runs it.
"""

from typing import NamedTuple

from engine.capacity import Parallel, Shape, cell_bytes, shards, size, used_share
from engine.chips import Chip
from engine.kv import KVLayout
from engine.models.config import ModelConfig
from sharding import Spec


class Work(NamedTuple):
    """`requests` rows of `width` tokens each, shared out over the replicas; `before` cells are in
    the cache of each."""

    requests: int
    width: int
    before: int


class Step(NamedTuple):
    """A step on one chip: its operations and bytes, and the seconds that each take.

    Experts are taken to be chosen evenly, so that each chip's have the same load.
    """

    tokens: int  # of all chips together
    flops: float
    weight_bytes: float
    kv_bytes: float
    link_bytes: float
    compute_s: float
    weights_s: float
    kv_s: float
    links_s: float

    @property
    def seconds(self) -> float:
        """The bound: reads wait for each other; computing, reading and sending may overlap."""
        return max(self.compute_s, self.weights_s + self.kv_s, self.links_s)

    @property
    def bound(self) -> str:
        """What takes that long."""
        if self.seconds == self.compute_s:
            return "compute"
        if self.seconds == self.links_s:
            return "links"
        return "weights" if self.weights_s >= self.kv_s else "KV"

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def step(shape: Shape, parallel: Parallel, chip: Chip, work: Work) -> Step:
    """Returns the roofline of a step."""
    rows = -(-work.requests // parallel.replicas)
    tokens = rows * work.width
    # Experts see the tokens of all replicas that they are split over.
    shared = -(-work.requests // parallel.data) * work.width
    flops = attention_flops(shape, rows, work) / parallel.tensor
    weights = 0.0
    for name, spec in shape.specs:
        seen = shared if "experts" in spec.axes else tokens
        part = size(spec) / shards(spec.axes, parallel)
        if is_matrix(name, spec):
            # Only a row's last token meets the head.
            used = rows if name in ("head", "embedding") else seen
            flops += 2 * part * used * used_share(name, spec, shape.config)
        weights += part * spec.dtype.itemsize * read_share(name, spec, shape.config, seen)
    kv = rows * kv_bytes(shape, work) / shards((shape.layout.heads_axis,), parallel)
    links = link_bytes(shape, parallel, tokens)
    return Step(
        work.requests * work.width,
        flops,
        weights,
        kv,
        links,
        flops / chip.flops,
        weights / chip.bandwidth,
        kv / chip.bandwidth,
        links / chip.link_bandwidth,
    )


def is_matrix(name: str, spec: Spec) -> bool:
    """Whether tokens are multiplied with a parameter; norms and biases cost next to nothing."""
    return len(spec.shape) > 1 and not name.endswith("bias")


def read_share(name: str, spec: Spec, config: ModelConfig, tokens: int) -> float:
    """Returns the share of a parameter that a step of so many tokens reads.

    Of experts, those that are chosen at least once when each token chooses evenly; of an embedding
    that is not the head, the tokens' rows.
    """
    if name == "embedding" and not config.tied_embeddings:
        return min(1.0, tokens / config.vocab_size)
    if config.experts is not None and "experts" in spec.axes:
        return 1 - (1 - config.experts.chosen / config.experts.count) ** tokens
    return 1.0


def attention_flops(shape: Shape, rows: int, work: Work) -> float:
    """Returns the operations of queries with keys, and of weights with values, in all layers."""
    key, value = cell_parts(shape.layout)
    pairs = sum(visible_pairs(window, work) for window in shape.config.windows)
    return 2.0 * rows * shape.config.query_heads * (key + value) * pairs


def cell_parts(layout: KVLayout) -> tuple[int, int]:
    """Returns (key, value): the numbers of a cell that make each; of a latent, they overlap."""
    first, end = layout.values
    return first or layout.cell_width, end - first


def visible_pairs(window: int | None, work: Work) -> int:
    """Returns the (query, cell) pairs of one row in one layer; a query sees its own cell."""
    seen = range(work.before + 1, work.before + work.width + 1)
    return sum(seen) if window is None else sum(min(cells, window) for cells in seen)


def kv_bytes(shape: Shape, work: Work) -> float:
    """Returns the bytes of KV that a row reads, each cell once, and writes."""
    total = 0
    for window in shape.config.windows:
        before = work.before if window is None else min(work.before, window - 1)
        total += before + 2 * work.width
    return total * cell_bytes(shape.layout)


def link_bytes(shape: Shape, parallel: Parallel, tokens: int) -> float:
    """Returns the bytes that a chip sends in a step of so many tokens a replica.

    Two sums over the tensor shards a layer, as rings (2 (n - 1) / n of the sum's bytes each); a
    token goes to each of its experts and back, wherever it is.
    """
    config, (tensor, expert) = shape.config, (parallel.tensor, parallel.expert)
    state = tokens * config.width * shape.layout.dtype.itemsize
    sums = 2 * config.num_layers * state * 2 * (tensor - 1) / tensor
    if config.experts is None:
        return sums
    layers = sum(map(config.has_experts, range(config.num_layers)))
    away = config.experts.chosen * (expert - 1) / expert
    return sums + 2 * layers * state * away / tensor

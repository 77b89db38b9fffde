# SPDX-License-Identifier: Apache-2.0
"""What a step takes on given chips: operations, bytes of weights and KV, what goes over links.

Williams, Waterman and Patterson, "Roofline" (CACM 2009): a step takes at least its operations over
the chip's rate, and at least its bytes over the memory's. Attention counts the cells that queries
see; latent attention has absorbed weights, as the engine runs it. What chips tell each other is
waited for: nothing else of a layer can go on.
"""

from typing import NamedTuple

from engine.capacity import Parallel, Room, Shape, cell_bytes, roomy, shards, size, used_share
from engine.chips import Chip
from engine.models.config import ModelConfig
from engine.traffic import Traffic, ring_traffic, step_traffic
from sharding import Spec

HOP_S = 1e-6  # to a neighbour, however little it is told; jax-ml.github.io/scaling-book


class Work(NamedTuple):
    """`requests` rows of `width` tokens each, shared out over the replicas; `before` cells are in
    the cache of each."""

    requests: int
    width: int
    before: int


class Step(NamedTuple):
    """A step on one chip: its operations and bytes, and the seconds that each take, those of the
    links with a microsecond for every hop.

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
        """Reads wait for each other; computing and reading overlap; links are waited for."""
        return max(self.compute_s, self.weights_s + self.kv_s) + self.links_s

    @property
    def bound(self) -> str:
        """What takes most of that."""
        reads_s = self.weights_s + self.kv_s
        if self.links_s >= max(self.compute_s, reads_s):
            return "links"
        if self.compute_s >= reads_s:
            return "compute"
        return "weights" if self.weights_s >= self.kv_s else "KV"

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def step(shape: Shape, parallel: Parallel, chip: Chip, work: Work) -> Step:
    """Returns what a step takes."""
    shape = shape.split(parallel.tensor)
    rows = -(-work.requests // parallel.replicas)
    ring = ring_ways(shape, parallel, work)
    tokens = rows * work.width // ring
    # Experts see the tokens of all replicas that they are split over.
    shared = -(-work.requests // parallel.data) * work.width // ring
    flops = attention_flops(shape, rows, work) / (parallel.tensor * parallel.sequence)
    weights = 0.0
    for name, spec in shape.specs:
        seen = shared if "experts" in spec.axes else tokens
        part = size(spec) / shards(spec.axes, parallel)
        if is_matrix(name, spec):
            # Only a row's last token meets the head.
            used = rows if name in ("head", "embedding") else seen
            flops += 2 * part * used * used_share(name, spec, shape.config)
        weights += part * spec.dtype.itemsize * read_share(name, spec, shape.config, seen)
    kv = rows * kv_bytes(shape, work) / (shape.heads_ways(parallel) * parallel.sequence)
    told = work_traffic(shape, parallel, work)
    links = sum(one.collective.times * one.sent_bytes for one in told)
    hops = sum(one.collective.times * one.hops for one in told)
    return Step(
        work.requests * work.width,
        flops,
        weights,
        kv,
        links,
        flops / chip.flops,
        weights / chip.bandwidth,
        kv / chip.bandwidth,
        links / chip.link_bandwidth + hops * HOP_S,
    )


def ring_ways(shape: Shape, parallel: Parallel, work: Work) -> int:
    """Returns over how many chips the tokens of each row are shared out: pieces that have a page
    for each chip of a sequence axis are."""
    ways = parallel.sequence
    return ways if work.width >= ways * shape.layout.page_size else 1


def work_traffic(shape: Shape, parallel: Parallel, work: Work) -> list[Traffic]:
    """Returns what chips tell each other, of a model that is split over the tensor axis."""
    rows = -(-work.requests // parallel.replicas)
    if (ring := ring_ways(shape, parallel, work)) == 1:
        return step_traffic(shape, parallel, rows * work.width)
    tokens = rows * work.width // ring
    found = step_traffic(shape, parallel._replace(sequence=1), tokens)
    return found + list(ring_traffic(shape, parallel, tokens, work.before))


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
    key, value = attended_widths(shape.config)
    pairs = sum(visible_pairs(window, work) for window in shape.config.windows)
    return 2.0 * rows * shape.config.query_heads * (key + value) * pairs


def attended_widths(config: ModelConfig) -> tuple[int, int]:
    """Returns (key, value): the numbers of a cell that make each; of a latent, they overlap."""
    if config.latent is not None:
        return config.latent.cell_width, config.latent.rank
    return config.head_width, config.head_width


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


class Choice(NamedTuple):
    """A layout with what it leaves, a prefill chunk in each replica, and a decode of the largest
    batch; both end at the longest context."""

    room: Room
    prefill: Step
    decode: Step

    @property
    def token_s(self) -> float:
        """Seconds for a token of a prompt and one of an output, when all rows are busy."""
        return 1 / self.prefill.tokens_per_s + 1 / self.decode.tokens_per_s


def choose(shape: Shape, chip: Chip, found: Room, max_num_seqs: int | None) -> Choice:
    """Returns what a layout comes to; `max_num_seqs` of each replica, None for as many as fit."""
    parallel, longest = found.parallel, shape.max_model_len
    most = found.batch if max_num_seqs is None else max_num_seqs * parallel.replicas
    chunk = min(shape.step_tokens, longest)
    prefill = Work(parallel.replicas, chunk, longest - chunk)
    decode = Work(min(found.batch, most), 1, longest - 1)
    return Choice(found, *(step(shape, parallel, chip, work) for work in (prefill, decode)))


def choices(
    shape: Shape, chip: Chip, usable_bytes: int, chips: int, max_num_seqs: int | None
) -> list[Choice]:
    """Returns the layouts that hold a request of full length, the fastest first.

    Where two are as fast, that of the lesser tensor size is first.
    """
    rooms = roomy(shape, usable_bytes, chips)
    found = [choose(shape, chip, room, max_num_seqs) for room in rooms]
    return sorted(found, key=lambda choice: choice.token_s)

# SPDX-License-Identifier: Apache-2.0
"""What a model is made of, as data; and the parameters that follow from it."""

import dataclasses

from engine.models.rope import Rope
from pallas_kernels.backends import XLA, Backend
from sharding import ALONE, Axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A feed-forward of many MLPs, of which a router chooses some for each token.

    scoring: "softmax" or "sigmoid" of the router's logits.   normalize: weights of the chosen sum
    to 1.   scale: multiplies them.   groups, chosen_groups: the best groups are chosen first, each
    by the sum of its `group_best` best experts.   correction: a bias of the choice alone.
    shared_width: of an MLP that sees every token, 0 if there is none, weighed by a sigmoid of its
    own if `shared_gate`.   clamp: of the gpt-oss activation, whose slope is `swish_slope`.   slots:
    places for copies of experts, of all devices together; 0: each expert has one place, in order.
    counts: whether the tokens that choose each expert are counted. backend: who multiplies.
    """

    count: int
    chosen: int
    width: int
    activation: str = "silu"
    scoring: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    correction: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    biases: bool = False
    clamp: float | None = None
    swish_slope: float = 1.0
    slots: int = 0
    counts: bool = False
    backend: Backend = XLA

    @property
    def places(self) -> int:
        """How many places for experts there are."""
        return self.slots or self.count

    @property
    def most_copies(self) -> int:
        """How many copies an expert can have."""
        return self.places - self.count + 1

    def __post_init__(self) -> None:
        if not 0 < self.chosen <= self.count:
            raise ValueError(f"{self.chosen} experts of {self.count} cannot be chosen for a token")
        if self.count % self.groups or not 0 < self.chosen_groups <= self.groups:
            raise ValueError(
                f"{self.count} experts in {self.groups} groups, of which {self.chosen_groups} are "
                "chosen: groups must be of one size, and enough"
            )
        size = self.count // self.groups
        if self.group_best > size or self.chosen > self.chosen_groups * size:
            raise ValueError(
                f"{self.chosen_groups} groups of {size} experts are too few to choose "
                f"{self.chosen} of them, groups by their {self.group_best} best"
            )
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring {self.scoring!r} is neither softmax nor sigmoid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434): what is cached of a token is `rank` numbers
    that the keys and values of all heads are made of, and `rope_width` of a key that they share.
    """

    rank: int
    rope_width: int
    plain_width: int  # of a head's query and key that is not rotated
    value_width: int
    query_rank: int | None = None  # queries go through so many numbers; None: straight from x
    norm_eps: float = 1e-6  # of the norms of latents, whatever that of other norms is

    @property
    def cell_width(self) -> int:
        """Numbers that are cached of a token, in one layer."""
        return self.rank + self.rope_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Everything that differs between families is a field here.

    Sizes are those of the whole model, or, in the program of one device of several, of that
    device's part. `windows[l]` is layer l's attention window counting the current token, None for
    full attention; `rope_of_layer[l]` indexes `ropes`. Norm weights are stored as what multiplies
    (a family whose checkpoints keep w - 1 adds the 1 at load).
    """

    family: str
    vocab_size: int
    width: int
    ffn_width: int
    num_layers: int
    query_heads: int
    kv_heads: int
    head_width: int
    max_position: int
    norm_eps: float
    activation: str  # "silu" or "gelu_tanh"
    tied_embeddings: bool
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]
    windows: tuple[int | None, ...]
    attention_scale: float
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None  # "head": of each head; "whole": of all heads together
    pre_norms: bool = True  # norms ahead of attention and MLP
    post_norms: bool = False  # norms of their outputs
    rotary_width: int | None = None  # rotated coordinates of a head, its first; None: all
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False  # a learned logit a head that takes weight and has no value
    latent: Latent | None = None
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = ()  # which layers have experts; empty: none
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    tensor_ways: int = 1  # devices that heads, feed-forward and vocabulary are split over
    expert_ways: int = 1  # devices that experts are split over; config.experts counts all
    expert_axes: tuple[str, ...] = ("expert",)  # of the mesh, over which they are
    stages: int = 1  # of a pipeline, each with some of the layers
    real_query_heads: int | None = None  # of all devices, without those that fill up; None: all

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads evenly"
            )
        if self.qk_norm not in (None, "head", "whole"):
            raise ValueError(f"qk_norm {self.qk_norm!r} is neither head nor whole")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation {self.activation!r} is neither silu nor gelu_tanh")
        if self.rope_width > self.head_width:
            raise ValueError(
                f"{self.rope_width} of a head's {self.head_width} coordinates cannot be rotated"
            )
        for rope in self.ropes:
            rope.check_width(self.rope_width)
        if self.experts is None and any(self.expert_layers):
            raise ValueError("layers with experts need to know which")
        for name in ("rope_of_layer", "windows", *(["expert_layers"] if self.experts else [])):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"{name} must have one entry for each of {self.num_layers} layers")

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer's feed-forward is of experts."""
        return bool(self.expert_layers) and self.expert_layers[layer]

    @property
    def tensor(self) -> Axis:
        """The mesh axis of the devices that have the other parts."""
        return Axis(("tensor",), self.tensor_ways) if self.tensor_ways > 1 else ALONE

    @property
    def pipe(self) -> Axis:
        """The mesh axis of the devices that have the other layers."""
        return Axis(("pipe",), self.stages) if self.stages > 1 else ALONE

    @property
    def expert(self) -> Axis:
        """The mesh axes of the devices that have the other experts."""
        return Axis(self.expert_axes, self.expert_ways) if self.expert_ways > 1 else ALONE

    @property
    def rope_width(self) -> int:
        """Rotated coordinates of a head."""
        return self.rotary_width or self.head_width

    @property
    def cell_width(self) -> int:
        """Numbers that are cached of a token in one layer, of all heads together."""
        if self.latent is not None:
            return self.latent.cell_width
        return 2 * self.kv_heads * self.head_width

    def segments(self) -> tuple[range, ...]:
        """Returns the runs of like layers: dense ones, and those with experts."""
        kinds = [self.has_experts(layer) for layer in range(self.num_layers)]
        starts = [n for n, kind in enumerate(kinds) if n == 0 or kind != kinds[n - 1]]
        ends = [*starts[1:], self.num_layers]
        return tuple(range(start, end) for start, end in zip(starts, ends, strict=True))

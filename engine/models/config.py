# SPDX-License-Identifier: Apache-2.0
"""What a model is made of, as data; and the parameters that follow from it."""

import dataclasses

import numpy as np

from engine.models.rope import Rope
from sharding import Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Everything that differs between families is a field here.

    `windows[l]` is layer l's attention window counting the current token, None for full
    attention; `rope_of_layer[l]` indexes `ropes`. Norm weights are stored as what multiplies
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
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads evenly"
            )
        if self.qk_norm not in (None, "head", "whole"):
            raise ValueError(f"qk_norm {self.qk_norm!r} is neither head nor whole")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation {self.activation!r} is neither silu nor gelu_tanh")
        for name in ("rope_of_layer", "windows"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"{name} must have one entry for each of {self.num_layers} layers")

    def layer_specs(self, dtype: np.dtype) -> dict[str, Spec]:
        """Returns one layer's parameters.

        Matrices are [out, in], as checkpoints have them, heads folded into one axis: XLA's CPU
        backend would transpose a matrix of three axes at every step.
        """
        D, F, N, K, H = (
            self.width,
            self.ffn_width,
            self.query_heads,
            self.kv_heads,
            self.head_width,
        )
        norm = Spec((D,), ("width",), np.dtype(np.float32))
        specs = {
            "q": Spec((N * H, D), ("query_heads", "width"), dtype),
            "k": Spec((K * H, D), ("kv_heads", "width"), dtype),
            "v": Spec((K * H, D), ("kv_heads", "width"), dtype),
            "o": Spec((D, N * H), ("width", "query_heads"), dtype),
            "gate": Spec((F, D), ("ffn", "width"), dtype),
            "up": Spec((F, D), ("ffn", "width"), dtype),
            "down": Spec((D, F), ("width", "ffn"), dtype),
        }
        if self.qkv_bias:
            specs["q_bias"] = Spec((N * H,), ("query_heads",), dtype)
            specs["k_bias"] = Spec((K * H,), ("kv_heads",), dtype)
            specs["v_bias"] = Spec((K * H,), ("kv_heads",), dtype)
        if self.output_bias:
            specs["o_bias"] = Spec((D,), ("width",), dtype)
        if self.mlp_bias:
            specs["gate_bias"] = Spec((F,), ("ffn",), dtype)
            specs["up_bias"] = Spec((F,), ("ffn",), dtype)
            specs["down_bias"] = Spec((D,), ("width",), dtype)
        if self.qk_norm == "head":
            head_norm = Spec((H,), (None,), np.dtype(np.float32))
            specs |= {"q_norm": head_norm, "k_norm": head_norm}
        if self.qk_norm == "whole":
            specs["q_norm"] = Spec((N * H,), ("query_heads",), np.dtype(np.float32))
            specs["k_norm"] = Spec((K * H,), ("kv_heads",), np.dtype(np.float32))
        if self.pre_norms:
            specs |= {"attention_norm": norm, "mlp_norm": norm}
        if self.post_norms:
            specs |= {"post_attention_norm": norm, "post_mlp_norm": norm}
        return specs

    def outer_specs(self, dtype: np.dtype) -> dict[str, Spec]:
        """Returns the parameters outside the layers."""
        V, D = self.vocab_size, self.width
        specs = {
            "embedding": Spec((V, D), ("vocab", "width"), dtype),
            "final_norm": Spec((D,), ("width",), np.dtype(np.float32)),
        }
        if not self.tied_embeddings:
            specs["head"] = Spec((V, D), ("vocab", "width"), dtype)
        return specs

    @property
    def rope_width(self) -> int:
        """Rotated coordinates of a head."""
        return self.rotary_width or self.head_width

    def segments(self) -> tuple[range, ...]:
        """Returns the runs of like layers; a dense decoder is one run."""
        return (range(self.num_layers),)

# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings (arXiv 2104.09864) and their scalings for long contexts.

Letters: T tokens, X pairs of rotated coordinates, R ropes.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rope:
    """One rotary embedding. Only what its kind reads is set, so that equal ropes compare equal.

    kind:
    - default: base `theta` alone.   linear: positions divided by `factor`.
    - llama3: low frequencies divided by `factor`, high ones kept, blended between in turns over
      `original_max_position` (Llama 3.1).
    - dynamic: the base grows with the sequence's final length beyond `original_max_position`
      (NTK-aware, as transformers has it).
    - yarn: interpolated or kept by turns over the original context, between `beta_fast` and
      `beta_slow`; the ramp's ends are whole numbers if `truncate` (arXiv 2309.00071).
    - longrope: frequencies divided by one of two lists, chosen by the sequence's final length
      (arXiv 2402.13753).

    `attention_factor` multiplies cosines and sines.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"rope type {self.kind!r} is not supported; use a checkpoint with one of "
                f"{', '.join(KINDS)}"
            )
        if not self.theta > 1:
            raise ValueError(f"rope_theta is {self.theta}; a base above 1 is needed")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} of the rope must be below its "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.kind == "yarn" and not self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow {self.beta_slow} of the rope must be below its beta_fast "
                f"{self.beta_fast}"
            )

    def check_width(self, width: int) -> None:
        """Raises ValueError unless so many coordinates of a head can be rotated."""
        if width < 2 or width % 2:
            raise ValueError(f"{width} coordinates of a head are rotated; an even number is needed")
        if self.kind == "dynamic" and width == 2:
            raise ValueError("a rope of type dynamic needs more than 2 rotated coordinates")
        for factors in (self.short_factors, self.long_factors):
            if self.kind == "longrope" and len(factors) != width // 2:
                raise ValueError(
                    f"a rope list has {len(factors)} factors; {width // 2} pairs are rotated"
                )

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles depend on the final length of the sequence."""
        return self.kind in ("dynamic", "longrope")

    def variant(self, length: int) -> int:
        """Returns a number that is equal for final lengths with equal angles."""
        if not self.depends_on_length or length <= self.original_max_position:
            return 0
        return length if self.kind == "dynamic" else 1

    def inverse_frequencies(self, width: int, length: int = 1) -> np.ndarray:
        """Returns the angle per position of each pair, float64 [width / 2].

        `width` is of the rotated coordinates, `length` the final length of the sequence.
        """
        inverse = self.theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
        return KINDS[self.kind](self, inverse, width, length)

    def angles(self, width: int, position_T: jax.Array, length_T: jax.Array | None) -> jax.Array:
        """Returns the angles [T, width / 2], float32, of tokens at positions of sequences."""
        position_T1 = position_T.astype(jnp.float32)[:, None]
        if not self.depends_on_length or length_T is None:
            return position_T1 * jnp.asarray(self.inverse_frequencies(width), jnp.float32)[None]
        beyond_T1 = (length_T > self.original_max_position)[:, None]
        short = jnp.asarray(self.inverse_frequencies(width), jnp.float32)[None]
        if self.kind == "longrope":
            after = self.original_max_position + 1
            long = jnp.asarray(self.inverse_frequencies(width, after), jnp.float32)[None]
            return position_T1 * jnp.where(beyond_T1, long, short)
        share_T1 = length_T[:, None].astype(jnp.float32) / self.original_max_position
        grown_T1 = self.factor * share_T1 - (self.factor - 1)
        power = jnp.asarray(-np.arange(0, width, 2) / (width - 2), jnp.float32)[None]
        long = short * jnp.maximum(grown_T1, 1.0) ** power
        return position_T1 * jnp.where(beyond_T1, long, short)


def _linear(rope: Rope, inverse: np.ndarray, width: int, length: int) -> np.ndarray:
    return inverse / rope.factor


def _llama3(rope: Rope, inverse: np.ndarray, width: int, length: int) -> np.ndarray:
    turns = rope.original_max_position * inverse / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return inverse * (blend + (1 - blend) / rope.factor)


def _dynamic(rope: Rope, inverse: np.ndarray, width: int, length: int) -> np.ndarray:
    length = max(length, rope.original_max_position)
    grown = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    theta = rope.theta * grown ** (width / (width - 2))
    return theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)


def _yarn(rope: Rope, inverse: np.ndarray, width: int, length: int) -> np.ndarray:
    def pair_of(turns: float) -> float:
        """Returns the pair, as a real number, that makes so many turns over the original."""
        turned = math.log(rope.original_max_position / (turns * 2 * math.pi))
        return width * turned / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (np.arange(width // 2) - low) / ((high - low) or 0.001)
    kept = 1 - np.clip(ramp, 0, 1)
    return inverse * (kept + (1 - kept) / rope.factor)


def _longrope(rope: Rope, inverse: np.ndarray, width: int, length: int) -> np.ndarray:
    factors = rope.long_factors if length > rope.original_max_position else rope.short_factors
    return inverse / np.array(factors, np.float64)


KINDS: dict[str, Any] = {
    "default": lambda rope, inverse, width, length: inverse,
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
}


def rope_tables(
    ropes: tuple[Rope, ...], width: int, position_T: jax.Array, length_T: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), each float32 [R, T, width / 2], for tokens at positions.

    `length_T` has the final length of each token's sequence; without it all are short.
    """
    angles_RTX = jnp.stack([rope.angles(width, position_T, length_T) for rope in ropes])
    scale_R11 = jnp.array([rope.attention_factor for rope in ropes], jnp.float32)[:, None, None]
    cos, sin = jnp.cos(angles_RTX) * scale_R11, jnp.sin(angles_RTX) * scale_R11
    # Made once: XLA would compute them anew in every layer that they are fused into.
    return jax.lax.optimization_barrier((cos, sin))

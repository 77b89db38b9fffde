# SPDX-License-Identifier: Apache-2.0
"""What attention needs to know of a group of rows."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

# A window that no context reaches: full attention, with the window still a plain integer.
NO_WINDOW = 1 << 30


class Rows(NamedTuple):
    """Where the keys of each row lie, and which of them each query sees.

    Query t of row b stands at cell `start_B[b] + depth_BT[b, t]`, where depth is t itself unless
    `depth_BT` is given, and its own key lies in cell `start_B[b] + t`. It sees

    - the earlier cells c < start_B[b] with depth distance below the window, and
    - of this step's own cells those up to t (a chunk), or those whose bit is set in
      `ancestors_BT[b, t]` (a tree: bit j says that token j is t or one of its ancestors).

    The window counts the query's own cell. Rows with count 0 are idle: their output is zero. Cells
    from `end_B[b]` on nobody sees, where it is given: those of a run that is met elsewhere.
    """

    table_BJ: jax.Array  # int32 [B, J]: page numbers, 0 where there is no page
    start_B: jax.Array  # int32 [B]: cells in use before this step
    count_B: jax.Array  # int32 [B]: tokens of this step, at most T
    depth_BT: jax.Array | None = None  # int32 [B, T], trees only
    ancestors_BT: jax.Array | None = None  # int32 [B, T] bit sets, trees only; T <= 32
    end_B: jax.Array | None = None  # int32 [B], at most start_B + count_B, which None is

    def ends(self) -> jax.Array:
        """Returns end_B, int32: the first cell of each row that nobody sees."""
        return self.start_B + self.count_B if self.end_B is None else self.end_B


class Call(NamedTuple):
    """What is static of a call beside shapes.

    values: which numbers of a cell are its value. ways: devices that a row's pages are dealt out
    to. operation: what tuned block sizes are kept by. blocks: sizes in their place. mass: what is
    asked for is the mass of cells.
    """

    scale: float
    values: tuple[int, int]
    softcap: float | None = None
    ways: int = 1
    operation: str = "paged_attention"
    blocks: Mapping[str, int] | None = None
    mass: bool = False

    @property
    def latent(self) -> int | None:
        """The numbers of a latent, which is the value and within the key; None: K beside V."""
        return None if self.values[0] else self.values[1]

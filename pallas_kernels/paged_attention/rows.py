# SPDX-License-Identifier: Apache-2.0
"""What attention needs to know of a group of rows."""

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

    The window counts the query's own cell. Rows with count 0 are idle: their output is zero.
    """

    table_BJ: jax.Array  # int32 [B, J]: page numbers, 0 where there is no page
    start_B: jax.Array  # int32 [B]: cells in use before this step
    count_B: jax.Array  # int32 [B]: tokens of this step, at most T
    depth_BT: jax.Array | None = None  # int32 [B, T], trees only
    ancestors_BT: jax.Array | None = None  # int32 [B, T] bit sets, trees only; T <= 32

# SPDX-License-Identifier: Apache-2.0
"""Which experts get other slots while the engine runs, by how much they were asked for.

Every so many steps the loads since the last look are taken into a moving average; then one layer a
step is balanced anew, and moved only where that makes the most loaded device's share less.
"""

import dataclasses
from typing import Any

import numpy as np

from engine.expert_balance import balance, imbalance
from engine.expert_places import Placement, first_slots, routes, tables_of
from engine.models.config import Experts

_KEPT = 0.5  # of the average, at each look
_LEAST_GAIN = 0.02  # of the most loaded device's share, below which nothing is moved


@dataclasses.dataclass
class Balancer:
    """The experts' placement, layer by layer, and what is to become of it.

    `layers`: of each with experts, its number in the model, segment and index in that. `interval`:
    steps between looks at the loads. `moved`: how many placements were done.
    """

    experts: Experts
    layers: list[tuple[int, int, int]]
    ways: int
    nodes: int
    interval: int
    moved: int = 0

    def __post_init__(self) -> None:
        first = first_slots(self.experts, self.ways)
        self.expert_LS = np.array([first] * len(self.layers))
        self._load_LE: np.ndarray | None = None
        self._left: list[int] = []  # layers to balance anew

    def looks(self, step: int) -> bool:
        """Returns whether the loads are to be looked at after this step."""
        return step % self.interval == 0

    def add(self, load_LE: np.ndarray) -> None:
        """Takes the loads of all layers of the model since the last look."""
        load_LE = load_LE[[number for number, _, _ in self.layers]].astype(np.float64)
        before = load_LE if self._load_LE is None else self._load_LE
        self._load_LE = _KEPT * before + (1 - _KEPT) * load_LE
        self._left = list(range(len(self.layers)))

    def next(self) -> Placement | None:
        """Returns what to move before the next step, if the next layer gains by it."""
        if not self._left:
            return None
        assert self._load_LE is not None, "layers are left of some look"
        layer = self._left.pop(0)
        load_1E, before_1S = self._load_LE[layer : layer + 1], self.expert_LS[layer : layer + 1]
        groups = self.experts.groups if self.nodes > 1 else 1
        after_1S, _, _ = balance(load_1E, self.experts.slots, groups, self.nodes, self.ways)
        now = imbalance(load_1E, before_1S, self.ways)[0]
        if imbalance(load_1E, after_1S, self.ways)[0] > (1 - _LEAST_GAIN) * now:
            return None
        before, after = before_1S[0].tolist(), after_1S[0].tolist()
        self._next = layer, after
        _, segment, index = self.layers[layer]
        moves = routes(before, after, self.ways)
        return Placement(segment, index, *moves, *tables_of(after, self.experts))

    def commit(self) -> None:
        """Notes that what `next` returned was done."""
        layer, after = self._next
        self.expert_LS[layer] = after
        self.moved += 1

    def stats(self) -> dict[str, Any]:
        """Returns `moved`, the placements that were changed, and `imbalance`, by layer the most
        loaded device's load over the mean, as experts are placed; empty before the first look."""
        ratios: list[float] = []
        if self._load_LE is not None:
            ratios = imbalance(self._load_LE, self.expert_LS, self.ways).tolist()
        return {"moved": self.moved, "imbalance": ratios}

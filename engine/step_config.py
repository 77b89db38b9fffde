# SPDX-License-Identifier: Apache-2.0
"""What all programs of an engine are built from."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from engine.batch import BatchShape
from engine.kv import KVLayout
from engine.models.config import ModelConfig
from pallas_kernels.backends import XLA, Backend
from sharding import ALONE, Axis, Rules


class StepConfig(NamedTuple):
    """What all programs of an engine are built from; all of it static. Sizes are one device's."""

    model: ModelConfig
    layout: KVLayout
    shape: BatchShape
    mesh: Mesh
    rules: Rules
    score_tokens: int  # tokens of the hidden rows that the score head reads
    forbidden: np.ndarray | None  # bool [ids of all devices]: those never sampled, or None
    ring_layout: str = "striped"  # of sharding/layouts.py
    told: Axis = ALONE  # the rows' partitions, where each process is to have what all of them made
    attention: Backend = XLA

    def axis(self, name: str) -> Axis:
        """Returns a mesh axis as the programs ask for it."""
        ways = self.mesh.shape[name]
        return Axis((name,), ways) if ways > 1 else ALONE

    @property
    def counted(self) -> Axis:
        """The devices whose tokens may differ; what is in no ring all of `sequence` have."""
        names = self.rules.mesh_axes("pages")
        ways = self.rules.ways(self.mesh, "pages")
        return Axis(names, ways) if ways > 1 else ALONE

    def tell(self, results: Any, axis: int = 0) -> Any:
        """Returns a tree of results by row along `axis` as the host is to have them."""
        return jax.tree.map(lambda leaf: self.told.gather(leaf, axis), results)

# SPDX-License-Identifier: Apache-2.0
"""Meshes and logical axis rules: where arrays live, told apart from what they mean."""

from sharding.collectives import ALONE, Axis
from sharding.mesh import AXES, devices_along, make_mesh, parse_mesh, part_of
from sharding.rules import EXPERT_PARALLEL, REPLICATED, RULES, Axes, Rules, Spec

__all__ = [
    "ALONE",
    "AXES",
    "EXPERT_PARALLEL",
    "REPLICATED",
    "RULES",
    "Axes",
    "Axis",
    "Rules",
    "Spec",
    "devices_along",
    "make_mesh",
    "parse_mesh",
    "part_of",
]

# SPDX-License-Identifier: Apache-2.0
"""Meshes and logical axis rules: where arrays live, told apart from what they mean."""

from sharding.mesh import AXES, make_mesh
from sharding.rules import REPLICATED, TENSOR_PARALLEL, Rules, Spec

__all__ = ["AXES", "REPLICATED", "TENSOR_PARALLEL", "Rules", "Spec", "make_mesh"]

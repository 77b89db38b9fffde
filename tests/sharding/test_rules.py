# SPDX-License-Identifier: Apache-2.0
"""Logical axes become mesh axes by one table, and what does not fit is refused by name."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Layout
from jax.sharding import PartitionSpec

from sharding import REPLICATED, RULES, Rules, Spec, make_mesh

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize(
    "axes, expected",
    [
        (("query_heads", "width"), ("tensor", None)),
        (("width", "query_heads"), (None, "tensor")),
        ((None, "kv_heads", None, None), (None, "tensor", None, None)),
        (("ffn", "width"), ("tensor", None)),
        (("vocab", "width"), ("tensor", None)),
        (("width",), (None,)),
        ((), ()),
    ],
)
def test_tensor_parallel_splits_heads_ffn_and_vocabulary(axes, expected):
    assert RULES.partition(axes) == PartitionSpec(*expected)
    assert REPLICATED.partition(axes) == PartitionSpec(*(None for _ in axes))


def test_a_mesh_axis_used_twice_is_named():
    with pytest.raises(ValueError, match="which uses mesh axis 'tensor' twice; replicate one"):
        RULES.partition(("query_heads", None, "ffn"))
    rules = Rules({"query_heads": ("tensor",), "ffn": ("data", "expert")})
    assert rules.partition(("query_heads", None, "ffn")) == PartitionSpec(
        "tensor", None, ("data", "expert")
    )


def test_an_axis_that_is_not_divisible_is_named():
    mesh = make_mesh(tensor=4)
    message = (
        "axis 'kv_heads' has length 6, which mesh axis 'tensor' of size 4 does not divide; "
        "use a size that divides 6"
    )
    with pytest.raises(ValueError, match=message):
        RULES.sharding(mesh, Spec((5, 6), (None, "kv_heads"), FLOAT))
    # What is not split may have any length.
    RULES.sharding(mesh, Spec((6, 8), ("width", "kv_heads"), FLOAT))


def test_shards_are_what_the_rules_say():
    mesh = make_mesh(data=2, tensor=4)
    spec = Spec((8, 3), ("ffn", "width"), FLOAT)
    array = jax.device_put(np.arange(24, dtype=FLOAT).reshape(8, 3), RULES.sharding(mesh, spec))
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 3)}
    np.testing.assert_array_equal(array, np.arange(24).reshape(8, 3))
    abstract = RULES.abstract(mesh, spec)
    assert (abstract.shape, abstract.dtype, abstract.sharding) == ((8, 3), FLOAT, array.sharding)


def test_a_spec_names_every_axis_and_stacks_on_a_new_one():
    with pytest.raises(ValueError, match=r"shape \(4, 2\) has 2 axes, names \('ffn',\)"):
        Spec((4, 2), ("ffn",), FLOAT)
    spec = Spec((4, 2), ("ffn", "width"), jnp.bfloat16)
    assert spec.stacked(3) == Spec((3, 4, 2), ("layers", "ffn", "width"), jnp.bfloat16)


def test_what_is_looked_up_by_rows_lies_by_rows_on_a_tpu(monkeypatch):
    mesh = make_mesh(tensor=4)
    spec, other = (Spec((8, 3), ("vocab", None), FLOAT, by_rows) for by_rows in (True, False))
    assert RULES.layout(mesh, spec) is None and RULES.abstract(mesh, spec).format.layout is None
    tpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]))
    assert RULES.layout(tpu, spec).major_to_minor == (0, 1)
    assert RULES.layout(tpu, other) is None
    monkeypatch.setattr(Rules, "layout", lambda *_: Layout((0, 1)))
    abstract = RULES.abstract(mesh, spec)
    assert abstract.format.layout.major_to_minor == (0, 1)
    assert abstract.sharding == RULES.sharding(mesh, spec)

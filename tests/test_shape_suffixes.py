# SPDX-License-Identifier: Apache-2.0
"""The shape-suffix hook finds planted faults, eagerly and under tracing, and nothing else."""

import jax
import jax.numpy as jnp
import pytest

from tests.shape_suffixes import checked_shapes


def project(x_TD, w_DF):
    y_TF = x_TD @ w_DF
    return y_TF


def transposed(x_TD):
    y_TD = x_TD.T
    return y_TD


def wrong_axes(x_TD):
    sum_TD = x_TD.sum(axis=0)
    return sum_TD


def strange(x_TD):
    x_TQ = x_TD
    return x_TQ


def test_right_names_pass(shape_suffixes):
    assert project(jnp.ones((3, 24)), jnp.ones((24, 40))).shape == (3, 40)


@pytest.mark.parametrize("run", [lambda f, x: f(x), lambda f, x: jax.jit(f)(x), jax.eval_shape])
@pytest.mark.parametrize(
    "function, message",
    [
        (transposed, "transposed: y_TD has T=24, but T=3 in x_TD"),
        (wrong_axes, r"wrong_axes: sum_TD has 1 axes, \(24,\)"),
        (strange, "strange: x_TQ uses Q, which the glossary lacks"),
    ],
)
def test_a_planted_fault_is_caught(run, function, message):
    x_TD = jnp.ones((3, 24))
    # A fresh function, or a cached trace would have nothing left to run.
    with pytest.raises(AssertionError, match=message):
        with checked_shapes():
            run(lambda x: function(x), x_TD)

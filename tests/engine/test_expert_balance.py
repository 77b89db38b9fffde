# SPDX-License-Identifier: Apache-2.0
"""Copies of experts and their places: the published example, and what holds for any loads."""

import numpy as np
import pytest

from engine.expert_balance import balance, imbalance

PUBLISHED = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)


def zipf(experts, seed):
    """Returns loads [1, E] of which the r-th highest is 1 / r, in some order."""
    return np.random.default_rng(seed).permutation(1 / np.arange(1, experts + 1))[None]


def unbalanced(load_LE, devices):
    L, E = load_LE.shape
    return imbalance(load_LE, np.broadcast_to(np.arange(E), (L, E)), devices)


def check(load_LE, placed, replicas, devices):
    """Holds a placement to what it says of itself: each slot has one copy, and each copy a slot."""
    expert_LS, slots_LEX, count_LE = placed
    L, E = load_LE.shape
    assert all(array.dtype == np.int32 for array in placed)
    assert expert_LS.shape == (L, replicas) and replicas % devices == 0
    assert count_LE.shape == (L, E) and slots_LEX.shape == (L, E, count_LE.max())
    for layer in range(L):
        assert sorted(slots_LEX[layer][slots_LEX[layer] >= 0]) == list(range(replicas))
        for expert in range(E):
            slots, count = slots_LEX[layer, expert], count_LE[layer, expert]
            assert count >= 1 and (slots[:count] >= 0).all() and (slots[count:] == -1).all()
            assert (expert_LS[layer, slots[:count]] == expert).all()


def test_the_published_example():
    """The one of EPLB's README: groups over two nodes, four devices each."""
    expert_LS, slots_LEX, count_LE = placed = balance(PUBLISHED, 16, groups=4, nodes=2, devices=8)
    assert expert_LS.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    check(PUBLISHED, placed, 16, 8)
    assert count_LE[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert slots_LEX[0, 1].tolist() == [15, 13]  # the copy that was made second is packed first


@pytest.mark.parametrize("seed", range(10))
def test_sixteen_copies_more_even_out_zipf_loads(seed):
    """64 experts in 80 slots of 8 devices: of 1.88 at best without copies, 1.0003 is left."""
    load_LE = zipf(64, seed)
    placed = balance(load_LE, 80, groups=1, nodes=1, devices=8)
    check(load_LE, placed, 80, 8)
    [left], [before] = imbalance(load_LE, placed[0], 8), unbalanced(load_LE, 8)
    assert left < 1.001 < 1.88 < before


@pytest.mark.parametrize("seed", range(10))
def test_nodes_that_groups_bind_cost_balance(seed):
    """Eight groups on two nodes: a node's share is what its groups are asked for."""
    load_LE = zipf(64, seed)
    placed = balance(load_LE, 80, groups=8, nodes=2, devices=8)
    check(load_LE, placed, 80, 8)
    group_of_slot = placed[0][0] // 8
    assert not set(group_of_slot[:40]) & set(group_of_slot[40:])
    of_groups = load_LE.reshape(8, 8).sum(axis=1)
    of_nodes = [
        of_groups[sorted(set(group_of_slot[run]))].sum() for run in (slice(40), slice(40, 80))
    ]
    least = max(of_nodes) / np.mean(of_nodes)
    [left] = imbalance(load_LE, placed[0], 8)
    assert least - 1e-9 < left < 1.15


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_any_loads_are_placed_whole(seed, extra):
    rng = np.random.default_rng(seed)
    nodes, devices, groups = [(1, 4, 3), (2, 4, 4), (2, 8, 3), (4, 8, 8)][seed % 4]
    load_LE = [rng.random((3, 24)), rng.integers(0, 4, (3, 24)), np.zeros((3, 24))][seed % 3]
    replicas = 24 + extra * devices
    placed = balance(load_LE, replicas, groups, nodes, devices)
    check(load_LE, placed, replicas, devices)
    if groups % nodes:  # as if there were one node
        for array, alone in zip(placed, balance(load_LE, replicas, 1, 1, devices), strict=True):
            np.testing.assert_array_equal(array, alone)


@pytest.mark.parametrize("seed", range(10))
def test_skewed_loads_get_no_less_even(seed):
    load_LE = np.random.default_rng(seed).lognormal(0, 1.5, (4, 64))
    for replicas in (64, 72, 96):
        placed = balance(load_LE, replicas, 1, 1, 8)
        assert (imbalance(load_LE, placed[0], 8) <= unbalanced(load_LE, 8)).all()


def test_greedy_packing_can_lose_to_an_order_that_was_even():
    """Why who replaces a placement compares the two: this one is the published algorithm's."""
    load_LE = np.array([[3, 3, 0, 2, 2, 2]])
    placed = balance(load_LE, 6, 1, 1, 2)
    assert imbalance(load_LE, placed[0], 2).tolist() == pytest.approx([7 / 6])
    assert unbalanced(load_LE, 2).tolist() == [1.0]


def test_one_expert_takes_all_copies_where_it_has_all_load():
    load_LE = np.array([[0, 0, 5, 0]])
    expert_LS, slots_LEX, count_LE = balance(load_LE, 8, 1, 1, 4)
    assert count_LE.tolist() == [[1, 1, 5, 1]] and slots_LEX.shape == (1, 4, 5)
    assert imbalance(load_LE, expert_LS, 4).max() < unbalanced(load_LE, 4).max() == 4.0


@pytest.mark.parametrize(
    "load, numbers, message",
    [
        ([1, 2, 3], (3, 1, 1, 1), r"loads have shape \(3,\); they must be \[layers, experts\]"),
        (np.zeros((0, 4)), (4, 1, 1, 1), r"loads have shape \(0, 4\)"),
        ([[1, 2], [3, -1]], (2, 1, 1, 1), "load of expert 1 in layer 1 is -1.0; loads must be"),
        ([[np.nan, 2]], (2, 1, 1, 1), "load of expert 0 in layer 0 is nan"),
        ([[1, 2, 3, 4]], (3, 1, 1, 3), "replicas=3 must be at least the number of experts, 4"),
        ([[1, 2, 3, 4]], (6, 1, 1, 4), "replicas=6 cannot be shared out evenly over devices=4"),
        ([[1, 2, 3, 4]], (6, 4, 2, 3), "devices=3 cannot be shared out evenly over nodes=2"),
        ([[1, 2, 3, 4]], (4, 3, 1, 2), "experts=4 cannot be shared out evenly over groups=3"),
        ([[1, 2, 3, 4]], (4, 1, 1, 0), "devices=0 must be at least 1"),
        ([[1, 2, 3, 4]], (4, 0, 1, 1), "groups=0 must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(load, numbers, message):
    with pytest.raises(ValueError, match=message):
        balance(np.array(load), *numbers)

# SPDX-License-Identifier: Apache-2.0
"""Experts change their slots while an engine runs, and nobody notices but the loads."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from engine import expert_places
from engine.expert_balance import balance, imbalance
from engine.expert_places import first_slots, routes, run_place, tables_of
from engine.models.config import Experts
from engine.rebalance import Balancer
from sharding import ALONE, Axis, make_mesh
from tests.engine.conftest import greedy
from tests.engine.test_meshes import alone, open_mesh, outputs, prompts

EXPERTS = Experts(count=10, chosen=2, width=4, slots=16)


def placements(seed, count=4):
    rng = np.random.default_rng(seed)
    loads = rng.pareto(1.0, (count, EXPERTS.count)) + 0.1
    return [balance(load[None], EXPERTS.slots, 1, 1, 4)[0][0].tolist() for load in loads]


def test_first_slots_have_every_expert_and_copies_of_the_first():
    placed = first_slots(EXPERTS, 4)
    assert np.bincount(placed).tolist() == [2] * 6 + [1] * 4
    tables = tables_of(placed, EXPERTS)
    assert expert_places.placed(*tables) == list(placed)
    assert tables.copies_E.tolist() == [2] * 6 + [1] * 4
    for expert, slots in enumerate(tables.slots_EX.tolist()):
        assert len(slots) == 7 and {placed[slot] for slot in slots} == {expert}
        assert len(set(slots[: tables.copies_E[expert]])) == tables.copies_E[expert]


@pytest.mark.parametrize("ways, stacked", [(1, False), (4, False), (4, True)])
def test_experts_come_where_they_are_wanted(ways, stacked):
    """Through many placements, one program; each slot has the numbers of the expert it is for."""
    rng = np.random.default_rng(0)
    values = {
        "experts_gate": rng.random((EXPERTS.count, 3, 2), np.float32),
        "experts_gate_bias": rng.random((EXPERTS.count, 2), np.float32),
    }
    before = list(first_slots(EXPERTS, ways))
    layer = {name: array[before] for name, array in values.items()}
    tables = tables_of(before, EXPERTS)
    layer |= {"expert_slots": tables.slots_EX, "expert_copies": tables.copies_E}
    if stacked:
        layer = {name: np.stack([array * 0, array]) for name, array in layer.items()}
    lead = (None,) if stacked else ()
    specs = {
        name: PartitionSpec(*lead, "expert") if name in values else PartitionSpec()
        for name in layer
    }
    axis = Axis(("expert",), ways) if ways > 1 else ALONE
    none, sharded = PartitionSpec(), PartitionSpec("expert")
    program = jax.jit(
        jax.shard_map(
            lambda *arguments: run_place(*arguments, expert=axis, stacked=stacked),
            mesh=make_mesh(expert=ways),
            in_specs=(specs, none, sharded, sharded, sharded, none, none, none),
            out_specs=specs,
            check_vma=False,
        )
    )
    index = np.array([int(stacked)], np.int32)
    for after in placements(1):
        *moves, rounds = routes(before, after, ways)
        assert rounds == int((moves[1] < EXPERTS.slots // ways).sum(axis=2).max())
        rounds = np.array([rounds], np.int32)
        layer = program(layer, index, *moves, rounds, *tables_of(after, EXPERTS))
        for name, array in values.items():
            moved = np.asarray(layer[name])
            np.testing.assert_array_equal(moved[1] if stacked else moved, array[after])
            assert not stacked or not moved[0].any()
        slots = np.asarray(layer["expert_slots"])
        np.testing.assert_array_equal(slots[1] if stacked else slots, tables_of(after, EXPERTS)[0])
        before = after
    assert program._cache_size() == 2  # of arrays of the host, and of its own


def test_slots_are_filled_from_their_own_device_where_it_has_the_expert():
    before, after = [0, 1, 2, 3, 0, 1, 2, 3], [3, 0, 1, 2, 0, 2, 3, 1]
    stay, send, take, rounds = routes(before, after, 2)
    assert rounds == 0 and (send == 4).all() and (take == 4).all()
    assert stay.tolist() == [[3, 0, 1, 2], [0, 2, 3, 1]]
    stay, send, take, rounds = routes([0, 1, 2, 3], [1, 2, 3, 0], 2)
    assert rounds == 1 and stay.tolist() == [[1, 2], [1, 2]]
    assert send[0, 1].tolist() == [0, 2] and take[1, 0].tolist() == [1, 2]
    assert send[1, 0].tolist() == [0, 2] and take[0, 1].tolist() == [1, 2]


def test_what_gains_is_moved_and_nothing_else():
    balancer = Balancer(EXPERTS, [(1, 1, 0), (2, 1, 1)], ways=4, nodes=1, interval=8)
    assert balancer.next() is None and balancer.stats() == {"moved": 0, "imbalance": []}
    assert [step for step in range(1, 20) if balancer.looks(step)] == [8, 16]
    loads = np.zeros((3, 10))
    loads[1], loads[2] = 1.0 / np.arange(1, 11), 1.0
    loads[2, :6] = 2.0  # what the first slots are even for
    balancer.add(loads)
    before = imbalance(loads[1:2], np.array([first_slots(EXPERTS, 4)]), 4)[0]
    place = balancer.next()
    assert (place.segment, place.layer) == (1, 0)
    assert balancer.expert_LS[0].tolist() == list(first_slots(EXPERTS, 4)), "not done yet"
    balancer.commit()
    stay, send, take, _ = routes(first_slots(EXPERTS, 4), balancer.expert_LS[0].tolist(), 4)
    for made, expected in zip(place[2:5], (stay, send, take), strict=True):
        np.testing.assert_array_equal(made, expected)
    assert balancer.next() is None and balancer.next() is None
    [moved, still] = balancer.stats()["imbalance"]
    assert moved < before and still == pytest.approx(1.0) and balancer.moved == 1
    balancer.add(loads)  # balanced already
    assert [balancer.next(), balancer.next()] == [None, None]


SLOW, LONG = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.long]
WHOLE = {"expert_parallel": True, "num_redundant_experts": 4}
CASES = [
    pytest.param("mixtral", "expert=4", {"num_redundant_experts": 4}, marks=SLOW),
    pytest.param("deepseek_v3", "expert=8", {"num_redundant_experts": 8}, marks=LONG),
    pytest.param("gpt_oss", "expert=2,tensor=2", {"decode_steps": 2}, marks=LONG),
    pytest.param("mixtral", "data=2,tensor=2", WHOLE, marks=LONG),
]


@pytest.mark.parametrize("arch, mesh, options", CASES)
def test_an_engine_that_places_its_experts_anew_says_the_same(arch, mesh, options):
    llm = open_mesh(arch, mesh, rebalance_interval=4, **options)
    results, cached = outputs(llm)
    assert cached > 0
    for (tokens, logprobs), (expected, logprobs_alone) in zip(results, alone(arch), strict=True):
        assert tokens == expected
        np.testing.assert_allclose(logprobs, logprobs_alone, atol=1e-4, rtol=0)
    stats = llm.engine.stats()["experts"]
    layers = sum(llm.model_config.expert_layers)
    assert stats["moved"] > 0 and len(stats["imbalance"]) == layers
    loads, ways = llm.engine._balancer._load_LE, llm.engine._balancer.ways
    assert loads.sum() > 0
    first = np.array([first_slots(llm.model_config.experts, ways)] * layers)
    assert np.mean(stats["imbalance"]) < imbalance(loads, first, ways).mean()


@pytest.mark.parametrize(
    "arch, mesh, options, told",
    [
        ("llama", "expert=2", {"rebalance_interval": 1}, "has no experts"),
        ("mixtral", "", {"num_redundant_experts": 1}, "num_redundant_experts needs a mesh"),
        ("mixtral", "expert=2,pipe=2", {"rebalance_interval": 1}, "does not go with stages"),
        ("mixtral", "expert=4", {"num_redundant_experts": 3}, "does not divide 7 slots of experts"),
        ("mixtral", "expert=4", {"num_redundant_experts": 16}, "use at most 12"),
        ("mixtral", "sequence=2", {"expert_parallel": True}, "needs a mesh with data, expert"),
        ("llama", "data=2", {"expert_parallel": True}, "which a llama has not"),
        ("mixtral", "expert=4", {"rebalance_interval": -1}, "rebalance_interval=-1"),
        (
            "mixtral",
            "expert=4",
            {"rebalance_interval": 1, "deterministic": True},
            "does not go with deterministic=True",
        ),
    ],
)
def test_experts_that_cannot_be_placed_so_are_refused(arch, mesh, options, told):
    with pytest.raises(ValueError, match=told):
        open_mesh(arch, mesh, **options)


def test_an_interrupt_while_experts_move_leaves_a_placement_that_is_true():
    """Just before it is noted, whose weights have moved already; another, and then no more."""
    llm = open_mesh("mixtral", "expert=4", rebalance_interval=2, num_redundant_experts=4)
    balancer, left = llm.engine._balancer, [2]
    commit = balancer.commit

    def interrupted():
        left[0] -= 1
        if left[0] >= 0:
            raise KeyboardInterrupt
        commit()

    balancer.commit = interrupted
    jobs, expected = prompts()[:4], [tokens for tokens, _ in alone("mixtral")[:4]]
    for job in jobs:
        llm.engine.add_request(llm.make_request(job, greedy(40))[0], streams=False)
    outputs = {}
    while llm.engine.has_work:
        try:
            outputs |= {d.request_id: d.output for d in llm.engine.step() if d.output is not None}
        except KeyboardInterrupt:
            pass
    assert left[0] < 0 and balancer.moved > 0
    assert [outputs[index].outputs[0].token_ids for index in sorted(outputs)] == expected
    for (_, segment, layer), expert_S in zip(balancer.layers, balancer.expert_LS, strict=True):
        assert llm.engine.worker.placement(segment, layer) == expert_S.tolist()

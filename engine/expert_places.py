# SPDX-License-Identifier: Apache-2.0
"""Experts in slots: where they are at first, and what moves when they are placed anew.

Letters: L layers, E experts, S slots of all devices, P devices, R slots of one, X the most copies
of an expert.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from engine.expert_balance import balance
from engine.layers import Params
from engine.models.config import Experts, ModelConfig
from sharding import Axis

SLOTS, COPIES = "expert_slots", "expert_copies"  # the parameters that tell where experts are


class Tables(NamedTuple):
    """Where the experts of a layer are, as `engine/experts.py` reads it."""

    slots_EX: np.ndarray
    copies_E: np.ndarray


class Placement(NamedTuple):
    """What brings a layer's experts to other slots.

    segment, layer: which. stay_PR: which of its own slots each slot of a device is filled from.
    send_PPR: of device p's slots, those that go to device q, round by round; take_PPR: into which
    of its slots device q puts what came from p. Beyond the slots: none. rounds: that there are.
    """

    segment: int
    layer: int
    stay_PR: np.ndarray
    send_PPR: np.ndarray
    take_PPR: np.ndarray
    rounds: int
    slots_EX: np.ndarray
    copies_E: np.ndarray


@functools.cache
def first_slots(experts: Experts, ways: int) -> tuple[int, ...]:
    """Returns the expert of each slot before anything is known of their loads."""
    expert_LS, _, _ = balance(np.ones((1, experts.count)), experts.slots, 1, 1, ways)
    return tuple(expert_LS[0].tolist())


def tables_of(expert_S: Sequence[int], experts: Experts) -> Tables:
    """Returns the tables of a placement; an expert's slots in rising order, then its first."""
    slots: list[list[int]] = [[] for _ in range(experts.count)]
    for slot, expert in enumerate(expert_S):
        slots[expert].append(slot)
    rows = [each + each[:1] * (experts.most_copies - len(each)) for each in slots]
    copies = [len(each) for each in slots]
    return Tables(np.array(rows, np.int32), np.array(copies, np.int32))


def placed(slots_EX: np.ndarray, copies_E: np.ndarray) -> list[int]:
    """Returns the placement that tables are of."""
    slots = {
        slot: expert
        for expert, (row, copies) in enumerate(zip(slots_EX.tolist(), copies_E, strict=True))
        for slot in row[:copies]
    }
    return [slots[slot] for slot in range(len(slots))]


def routes(
    before_S: Sequence[int], after_S: Sequence[int], ways: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Returns (stay_PR, send_PPR, take_PPR, rounds) that bring experts from their slots to others.

    A slot is filled from its own device where that has the expert, else from the device that has
    it and sends least.
    """
    size = len(before_S) // ways
    holders: dict[int, dict[int, int]] = {}
    for slot, expert in enumerate(before_S):
        holders.setdefault(expert, {}).setdefault(slot // size, slot % size)
    stay_PR = np.full((ways, size), size, np.int32)
    send_PPR = np.full((ways, ways, size), size, np.int32)
    take_PPR = np.full((ways, ways, size), size, np.int32)
    sent_PP = np.zeros((ways, ways), int)
    for slot, expert in enumerate(after_S):
        to, place = slot // size, slot % size
        there = holders[expert]
        if to in there:
            stay_PR[to, place] = there[to]
            continue
        by = min(there, key=lambda p: (sent_PP[p].sum(), p))
        turn = sent_PP[by, to]
        send_PPR[by, to, turn], take_PPR[to, by, turn] = there[by], place
        sent_PP[by, to] += 1
    return stay_PR, send_PPR, take_PPR, int(sent_PP.max())


def run_place(
    layers: Params,
    index: jax.Array,
    stay_1R: jax.Array,
    send_1PR: jax.Array,
    take_1PR: jax.Array,
    rounds: jax.Array,
    slots_EX: jax.Array,
    copies_E: jax.Array,
    *,
    expert: Axis,
    stacked: bool,
) -> Params:
    """Returns the experts of a layer in other slots, and the tables that say so.

    `layers`: what of a layer is by slot, and its tables; of all layers of a segment if `stacked`,
    of which `index` [1] is meant. Each device sends in each round at most one slot to every other.
    """
    layer = index[0]

    def moved(array: jax.Array) -> jax.Array:
        old = array[layer] if stacked else array

        def one(turn, new):
            sent = old.at[send_1PR[0, :, turn]].get(mode="fill", fill_value=0)
            came = jax.lax.all_to_all(sent, expert.names, 0, 0, tiled=True)
            return new.at[take_1PR[0, :, turn]].set(came, mode="drop")

        new = old.at[stay_1R[0]].get(mode="fill", fill_value=0)
        return new if expert.ways == 1 else jax.lax.fori_loop(0, rounds[0], one, new)

    tables = {SLOTS: slots_EX, COPIES: copies_E}
    new = {name: tables[name] if name in tables else moved(layers[name]) for name in layers}
    if not stacked:
        return new
    return {name: layers[name].at[layer].set(new[name]) for name in layers}


def expert_places(config: ModelConfig) -> list[tuple[int, int, int]]:
    """Returns, of each layer with experts, its number, its segment and its index in that."""
    return [
        (layer, segment, index)
        for segment, run in enumerate(config.segments())
        for index, layer in enumerate(run)
        if config.has_experts(layer)
    ]


def by_slot(layer: Params) -> dict[str, Any]:
    """Returns what of a layer's parameters moves with its experts, and the tables."""
    return {
        name: array
        for name, array in layer.items()
        if name.startswith("experts_") or name in (SLOTS, COPIES)
    }

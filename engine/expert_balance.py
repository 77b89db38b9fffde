# SPDX-License-Identifier: Apache-2.0
"""Which experts get copies, and which device has which copy: the balancer of DeepSeek.

EPLB (github.com/deepseek-ai/EPLB, 2025; DeepSeek-V3, arXiv 2412.19437, section 3.4): groups of
experts are packed onto nodes, so that a token's groups are on few of them; the experts of a node
get copies where a copy's load is highest; and a node's copies are packed onto its devices. A slot
is a place for one copy; device d has the d-th run of slots. All of it is greedy: now and then a
placement is less even than the one that it is to replace (`imbalance`), and a device can have two
copies of one expert.
Letters: L layers, E experts, S slots, X the most copies of an expert.
"""

import numpy as np


def balance(
    load_LE: np.ndarray, replicas: int, groups: int, nodes: int, devices: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns int32 (expert_of_slot [L, S], slots_of_expert [L, E, X], count [L, E]), S = replicas.

    `load_LE`: how much each expert is asked for, in any unit. The slots of an expert stand in the
    order in which its copies were made, then -1. Ties go to the lower expert, device and node.

    Hierarchical where the groups can be shared out evenly over nodes, otherwise as if there were
    one node and one group. Raises ValueError for numbers that do not fit one another.
    """
    load_LE = np.asarray(load_LE, np.float64)
    _check(load_LE, replicas, groups, nodes, devices)
    if groups % nodes:
        groups, nodes = 1, 1
    L, E = load_LE.shape
    placed = [_place(load_E, replicas, groups, nodes, devices) for load_E in load_LE]
    expert_LS = np.array([expert_S for expert_S, _ in placed], np.int32)
    rank_LS = np.array([rank_S for _, rank_S in placed], np.int32)
    slots_LEX = np.full((L, E, rank_LS.max() + 1), -1, np.int32)
    layer_LS = np.broadcast_to(np.arange(L)[:, None], expert_LS.shape)
    slots_LEX[layer_LS, expert_LS, rank_LS] = np.arange(replicas, dtype=np.int32)[None]
    return expert_LS, slots_LEX, (slots_LEX >= 0).sum(axis=2, dtype=np.int32)


def imbalance(load_LE: np.ndarray, expert_LS: np.ndarray, devices: int) -> np.ndarray:
    """Returns float64 [L]: the highest load of a device over the mean; 1 is best, also of no load.

    The load of an expert is shared out evenly over its slots, and slots in runs over devices.
    """
    load_LE = np.asarray(load_LE, np.float64)
    ratios = []
    for load_E, expert_S in zip(load_LE, expert_LS, strict=True):
        count_E = np.bincount(expert_S, minlength=len(load_E))
        of_devices = (load_E / count_E)[expert_S].reshape(devices, -1).sum(axis=1)
        mean = of_devices.mean()
        ratios.append(of_devices.max() / mean if mean else 1.0)
    return np.array(ratios)


def _check(load_LE: np.ndarray, replicas: int, groups: int, nodes: int, devices: int) -> None:
    """Raises ValueError for loads that are none, and for numbers that do not fit one another."""
    if load_LE.ndim != 2 or not load_LE.size:
        raise ValueError(f"loads have shape {load_LE.shape}; they must be [layers, experts]")
    if not np.isfinite(load_LE).all() or (load_LE < 0).any():
        layer, expert = np.argwhere(~np.isfinite(load_LE) | (load_LE < 0))[0].tolist()
        raise ValueError(
            f"the load of expert {expert} in layer {layer} is {load_LE[layer, expert]}; "
            "loads must be finite, and not below 0"
        )
    sizes = {"replicas": replicas, "groups": groups, "nodes": nodes, "devices": devices}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    experts = load_LE.shape[1]
    if replicas < experts:
        raise ValueError(f"replicas={replicas} must be at least the number of experts, {experts}")
    for whole, number, name, ways in (
        ("replicas", replicas, "devices", devices),
        ("devices", devices, "nodes", nodes),
        ("experts", experts, "groups", groups),
    ):
        if number % ways:
            raise ValueError(
                f"{whole}={number} cannot be shared out evenly over {name}={ways}; "
                f"use a multiple of {ways}, or {name} that divide {number}"
            )


def _place(
    load_E: np.ndarray, replicas: int, groups: int, nodes: int, devices: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (expert_S, rank_S) of one layer: whose copy each slot has, and which of them."""
    expert_of_group = np.arange(len(load_E)).reshape(groups, -1)
    groups_of_node = pack(load_E[expert_of_group].sum(axis=1), nodes)
    expert_S, rank_S = [], []
    for packed in groups_of_node:
        experts = expert_of_group[packed].reshape(-1)
        load = load_E[experts]
        owner, rank = replicate(load, replicas // nodes)
        copies = np.bincount(owner, minlength=len(load))
        slots = pack((load / copies)[owner], devices // nodes).reshape(-1)
        expert_S.append(experts[owner[slots]])
        rank_S.append(rank[slots])
    return np.concatenate(expert_S), np.concatenate(rank_S)


def pack(weight: np.ndarray, packs: int) -> np.ndarray:
    """Returns int [packs, len(weight) / packs]: the items of each pack, as many in each.

    "Balanced packing": from the heaviest on, each goes to the lightest pack that has room. Where
    packs have one item each, they stay in order.
    """
    size = len(weight) // packs
    if size == 1:
        return np.arange(packs)[:, None]
    items: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for item in np.argsort(-weight, kind="stable").tolist():
        lightest = min((p for p in range(packs) if len(items[p]) < size), key=total.__getitem__)
        items[lightest].append(item)
        total[lightest] += float(weight[item])
    return np.array(items)


def replicate(load: np.ndarray, copies: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (owner [copies], rank [copies]): whose copy each is, and which of them.

    "Replicate experts": each has one copy, and every further one goes to the expert whose copies
    have the highest load.
    """
    count = np.ones(len(load), int)
    owner, rank = list(range(len(load))), [0] * len(load)
    for _ in range(copies - len(load)):
        heaviest = int(np.argmax(load / count))
        owner.append(heaviest)
        rank.append(int(count[heaviest]))
        count[heaviest] += 1
    return np.array(owner), np.array(rank)

# SPDX-License-Identifier: Apache-2.0
"""Experts against a loop over them in float64, token by token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from engine.expert_balance import balance
from engine.experts import (
    EXPERT_MATRICES,
    expert_counts,
    expert_mlp,
    route,
    sent_at_once,
    slots_of,
)
from engine.models.config import Experts
from pallas_kernels.grouped_matmul import OfLayers
from sharding import ALONE, Axis, make_mesh

WIDTH, EXPERT_WIDTH = 16, 24
MIXTRAL = Experts(count=8, chosen=2, width=EXPERT_WIDTH)
QWEN2 = Experts(
    count=60, chosen=4, width=EXPERT_WIDTH, normalize=False, shared_width=40, shared_gate=True
)
DEEPSEEK_V2 = Experts(
    count=16, chosen=6, width=8, normalize=False, scale=16.0, groups=8, chosen_groups=3,
    shared_width=16,
)  # fmt: skip
DEEPSEEK_V3 = Experts(
    count=32, chosen=8, width=8, scoring="sigmoid", scale=2.5, groups=8, chosen_groups=4,
    group_best=2, correction=True, shared_width=8,
)  # fmt: skip
GPT_OSS = Experts(
    count=8, chosen=4, width=EXPERT_WIDTH, router_bias=True, biases=True, clamp=7.0,
    swish_slope=1.702,
)  # fmt: skip
KINDS = {
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
}


def make_params(experts, seed=0):
    """Returns the parameters of a feed-forward, numpy float32."""
    rng = np.random.default_rng(seed)
    E, D, F, S = experts.count, WIDTH, experts.width, experts.shared_width
    shapes = {
        "router": (E, D),
        "experts_gate": (E, D, F),
        "experts_up": (E, D, F),
        "experts_down": (E, F, D),
    }
    if experts.router_bias:
        shapes["router_bias"] = (E,)
    if experts.correction:
        shapes["router_correction"] = (E,)
    if experts.biases:
        shapes |= {
            "experts_gate_bias": (E, F),
            "experts_up_bias": (E, F),
            "experts_down_bias": (E, D),
        }
    if S:
        shapes |= {"shared_gate": (S, D), "shared_up": (S, D), "shared_down": (D, S)}
    if experts.shared_gate:
        shapes["gate_of_shared"] = (1, D)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def choose(logits, correction, experts):
    """Returns [(expert, weight)] of one token, by the definition; ties go to the lower id."""
    if experts.scoring == "sigmoid":
        scores = sigmoid(logits)
    else:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    choice = scores if correction is None else scores + correction
    allowed = range(experts.count)
    if experts.groups > 1:
        size = experts.count // experts.groups
        groups = [range(g * size, (g + 1) * size) for g in range(experts.groups)]
        value = [sum(sorted((choice[e] for e in g), reverse=True)[: experts.group_best])
                 for g in groups]  # fmt: skip
        best = sorted(range(experts.groups), key=lambda g: -value[g])[: experts.chosen_groups]
        allowed = [e for g in sorted(best) for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: experts.chosen]
    total = sum(scores[e] for e in chosen) if experts.normalize else 1.0
    return [(e, scores[e] / total * experts.scale) for e in chosen]


def dense(x, params, experts):
    """Returns [T, D], token by token and expert by expert, in float64."""
    p = {name: weight.astype(np.float64) for name, weight in params.items()}
    out = np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        logits = p["router"] @ row + p.get("router_bias", 0.0)
        for e, weight in choose(logits, p.get("router_correction"), experts):
            gate = row @ p["experts_gate"][e] + (p["experts_gate_bias"][e] if experts.biases else 0)
            up = row @ p["experts_up"][e] + (p["experts_up_bias"][e] if experts.biases else 0)
            if experts.clamp is None:
                hidden = gate * sigmoid(gate) * up
            else:
                gate, up = (
                    np.minimum(gate, experts.clamp),
                    np.clip(up, -experts.clamp, experts.clamp),
                )
                hidden = (up + 1) * gate * sigmoid(experts.swish_slope * gate)
            down = hidden @ p["experts_down"][e]
            out[t] += weight * (down + (p["experts_down_bias"][e] if experts.biases else 0))
        if experts.shared_width:
            gate = p["shared_gate"] @ row
            shared = p["shared_down"] @ (gate * sigmoid(gate) * (p["shared_up"] @ row))
            if experts.shared_gate:
                shared *= sigmoid(p["gate_of_shared"] @ row)
            out[t] += shared
    return out


expert_mlp_jit = jax.jit(expert_mlp, static_argnums=3)
route_jit = jax.jit(route, static_argnums=2)


def run(x, valid, params, experts):
    return np.asarray(expert_mlp_jit(x, valid, params, experts)[0])


def tokens(count, seed=1):
    return np.random.default_rng(seed).normal(0, 1, (count, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_equal_a_loop_over_them(kind, count):
    experts, x = KINDS[kind], tokens(count)
    params = make_params(experts)
    y = run(x, np.ones(count, bool), params, experts)
    expected = dense(x, params, experts)
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


def test_all_tokens_to_one_expert():
    experts = Experts(count=8, chosen=1, width=EXPERT_WIDTH)
    params, x = make_params(experts), np.abs(tokens(11))
    params["router"] = np.zeros_like(params["router"])
    params["router"][5] = 1.0
    np.testing.assert_allclose(
        run(x, np.ones(11, bool), params, experts), dense(x, params, experts), atol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_lower_expert(kind):
    experts = KINDS[kind]
    logits = np.zeros((3, experts.count), np.float32)
    correction = np.zeros(experts.count, np.float32) if experts.correction else None
    weights, chosen = route_jit(logits, correction, experts)
    assert chosen.tolist() == [list(range(experts.chosen))] * 3
    expected = [weight for _, weight in choose(logits[0].astype(np.float64), correction, experts)]
    np.testing.assert_allclose(weights, [expected] * 3, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_goes_to_no_expert_and_touches_nothing(kind):
    experts, x = KINDS[kind], tokens(11)
    params, valid = make_params(experts), np.arange(11) % 3 > 0
    expected = dense(x[valid], params, experts)
    x[~valid] = np.nan
    y = run(x, valid, params, experts)
    np.testing.assert_allclose(y[valid], expected, atol=1e-5 * np.abs(expected).max())


def test_a_token_that_is_not_finite_stays_alone():
    params, x = make_params(MIXTRAL), tokens(11)
    expected = dense(x, params, MIXTRAL)
    x[2] = np.nan
    y = run(x, np.ones(11, bool), params, MIXTRAL)
    assert np.isnan(y[2]).all()
    np.testing.assert_allclose(np.delete(y, 2, 0), np.delete(expected, 2, 0), atol=1e-4)


def test_the_correction_counts_for_the_choice_alone():
    experts = Experts(count=4, chosen=2, width=8, scoring="sigmoid", correction=True)
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    weights, chosen = route_jit(logits, np.array([0, 0, 0, 5.0], np.float32), experts)
    assert chosen.tolist() == [[3, 0]]
    scores = sigmoid(logits[0, [3, 0]].astype(np.float64))
    np.testing.assert_allclose(weights[0], scores / scores.sum(), rtol=1e-6)


def test_in_bfloat16_sums_are_of_float32():
    params = {name: jnp.asarray(w, jnp.bfloat16) for name, w in make_params(QWEN2).items()}
    x = jnp.asarray(tokens(7), jnp.bfloat16)
    y = np.asarray(run(x, np.ones(7, bool), params, QWEN2), np.float64)
    exact = {name: np.asarray(w, np.float32) for name, w in params.items()}
    expected = dense(np.asarray(x, np.float32), exact, QWEN2)
    assert np.abs(y - expected).max() < 0.02 * np.abs(expected).max()


def any_placement(experts, slots, seed):
    """Returns int [slots]: the expert of each, every one at least once, some much oftener."""
    rng = np.random.default_rng(seed)
    more = rng.integers(0, rng.integers(1, experts.count + 1), slots - experts.count)
    return rng.permutation(np.concatenate([np.arange(experts.count), more]))


def with_slots(params, expert_of_slot):
    """Returns the parameters of a layer whose experts have these slots."""
    E = len(params["router"])
    found = [np.flatnonzero(expert_of_slot == expert) for expert in range(E)]
    width = len(expert_of_slot) - E + 1  # the most copies that one can have
    tables = {
        "expert_slots": np.array([np.resize(slots, width) for slots in found], np.int32),
        "expert_copies": np.array([len(slots) for slots in found], np.int32),
    }
    moved = {name: w[expert_of_slot] for name, w in params.items() if name.startswith("experts_")}
    return params | tables | moved


def on_mesh(experts, params, ways, stacked=False):
    """Returns a program of (x, valid, params): tokens and slots shared out over `ways` devices."""
    specs = {
        name: PartitionSpec("expert") if name.startswith("experts_") else PartitionSpec()
        for name in params
    }

    def local(x_TD, valid_T, p):
        if stacked:  # as a scan has them, here as the last of two layers
            both = {name: jnp.stack([jnp.zeros_like(p[name]), p[name]]) for name in EXPERT_MATRICES}
            p = p | {name: OfLayers(array, jnp.int32(1)) for name, array in both.items()}
        axis = Axis(("expert",), ways) if ways > 1 else ALONE
        return expert_mlp(x_TD, valid_T, p, experts, expert=axis)[0]

    spec, mesh = PartitionSpec("expert"), make_mesh(expert=ways)
    in_specs = (spec, spec, specs)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)
    )


PLACEMENT_CASES = [
    ("mixtral", 1, 4, False),
    ("gpt_oss", 1, 4, True),
    ("deepseek_v3", 4, 0, False),
    ("deepseek_v3", 4, 8, False),
    ("gpt_oss", 4, 8, True),
]


@pytest.mark.parametrize("kind, ways, extra, stacked", PLACEMENT_CASES)
def test_any_placement_and_copies_say_the_same(kind, ways, extra, stacked, shape_suffixes):
    """From one program: which expert is where is data."""
    experts, x = KINDS[kind], tokens(24)
    params, valid = make_params(experts), np.arange(24) % 5 > 0
    expected = run(x, valid, params, experts)
    placed = [
        with_slots(params, any_placement(experts, experts.count + extra, seed)) for seed in range(4)
    ]
    program = on_mesh(experts, placed[0], ways, stacked)
    for p in placed:
        y = program(x, valid, p)
        np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert program._cache_size() == 1


def test_six_experts_on_four_devices():
    """With copies, experts need not divide evenly: slots do."""
    experts, x, valid = Experts(count=6, chosen=2, width=8), tokens(24), np.ones(24, bool)
    params = make_params(experts)
    placed = with_slots(params, any_placement(experts, 8, 0))
    y = on_mesh(experts, placed, 4)(x, valid, placed)
    np.testing.assert_allclose(y, run(x, valid, params, experts), atol=1e-4, rtol=0)


@pytest.mark.parametrize("expert_of_slot", [[2, 0, 2, 1, 2, 3, 4, 2], [0, 1, 2, 2, 3, 4, 0, 1]])
def test_all_tokens_to_one_expert_that_has_copies(expert_of_slot):
    """On every device, or all on one, which takes them in two rounds."""
    experts, x, valid = Experts(count=5, chosen=1, width=8), np.abs(tokens(96)), np.ones(96, bool)
    params = make_params(experts)
    params["router"] = np.zeros_like(params["router"])
    params["router"][2] = 1.0
    placed = with_slots(params, np.array(expert_of_slot))
    y = on_mesh(experts, placed, 4)(x, valid, placed)
    np.testing.assert_allclose(y, run(x, valid, params, experts), atol=1e-4, rtol=0)


@pytest.mark.parametrize("ways", [1, 4])
def test_copies_take_turns_over_all_tokens_of_a_step(ways):
    """Also where every device has one token only."""
    slots_EX, copies_E = jnp.array([[4, 0, 2], [1, 1, 1], [3, 5, 3]]), jnp.array([3, 1, 2])
    expert_TK = np.array([[0, 2]] * 6 + [[3, 0]] * 2, np.int32)  # 3 is no expert
    expected = [[4, 5], [0, 3], [2, 5], [4, 3], [0, 5], [2, 3], [6, 0], [6, 2]]
    axis, spec = Axis(("expert",), ways) if ways > 1 else ALONE, PartitionSpec("expert")
    sharded = jax.shard_map(
        lambda expert_TK: slots_of(expert_TK, slots_EX, copies_E, 6, axis),
        mesh=make_mesh(expert=ways),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    assert jax.jit(sharded)(expert_TK).tolist() == expected


def test_counts_of_experts_are_of_valid_tokens():
    rng = np.random.default_rng(0)
    expert_TK = rng.integers(0, MIXTRAL.count, (50, 2)).astype(np.int32)
    valid = rng.random(50) < 0.7
    chosen_TK = np.where(valid[:, None], expert_TK, MIXTRAL.count)
    counts = jax.jit(partial(expert_counts, experts=MIXTRAL))(chosen_TK)
    assert counts.dtype == np.int32
    expected = np.bincount(expert_TK[valid].reshape(-1), minlength=MIXTRAL.count)
    np.testing.assert_array_equal(counts, expected)


def test_a_balanced_placement_evens_out_the_rows_of_devices():
    """From counts of routing to rows by device, with one expert asked for by all tokens."""
    rng = np.random.default_rng(4)
    experts = Experts(count=16, chosen=2, width=8)
    other_T = rng.integers(1, 16, 400)
    expert_TK = np.stack([np.zeros(400), other_T], axis=1).astype(np.int32)
    counts = expert_counts(expert_TK, experts)
    expert_LS, slots_LEX, count_LE = balance(np.asarray(counts)[None], 24, 1, 1, 4)
    slot_TK = slots_of(expert_TK, jnp.asarray(slots_LEX[0]), jnp.asarray(count_LE[0]), 24, ALONE)
    np.testing.assert_array_equal(expert_LS[0][slot_TK], expert_TK)
    rows = np.bincount(np.asarray(slot_TK).reshape(-1) // 6, minlength=4)
    unbalanced = np.bincount(expert_TK.reshape(-1) // 4, minlength=4)
    assert rows.max() < 1.1 * rows.mean() < unbalanced.max() / 2


def test_what_comes_in_a_round_is_bounded_whatever_the_width():
    """Twice the even share, eight rows at least, and no more than 128 MiB from all in float32."""
    assert sent_at_once(4352, 8, 2048) == 1088
    assert sent_at_once(256, 64, 7168) == 8
    assert sent_at_once(4, 64, 7168) == 4
    share = sent_at_once(4352, 64, 7168)
    assert share * 64 * 7168 * 4 <= 2**27 < (share + 1) * 64 * 7168 * 4

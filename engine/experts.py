# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts feed-forward: routing, and the experts' MLPs over sorted tokens.

No token is dropped, and rows of padding are sent to no expert.

A layer can have copies of experts. Then its matrices and biases are those of slots, each with one
copy of some expert; "expert_slots" (int32 [E, X]) has the slots of each expert, in any order, and
anything behind them, and "expert_copies" (int32 [E], at least 1) how many they are. Which expert is
where is data: another placement runs the same program (`engine/expert_balance.py` makes them).
Letters: L layers, T tokens, D width, E experts, K experts a token, S = T K sorted rows, F an
expert's width, X the most copies of an expert. Where rows are multiplied, E are slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from engine.layers import ACTIVATIONS, Params, gated_mlp, matmul
from engine.models.config import Experts
from pallas_kernels.grouped_matmul import grouped_matmul, matrices
from sharding import ALONE, Axis
from sharding.exchange import exchange, exclusive_sums, sizes_of

EXPERT_MATRICES = ("experts_gate", "experts_up", "experts_down")
_LEAST_SENT = 8  # rows from one device to another in one round
_MOST_CAME_BYTES = 2**27  # of all rows that come to a device in one round, in float32


def expert_mlp(
    x_TD: jax.Array,
    valid_T: jax.Array,
    p: Params,
    experts: Experts,
    tensor: Axis = ALONE,
    expert: Axis = ALONE,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the weighted sum of the chosen experts' outputs, and of the shared ones'.

    And, where experts are counted, int32 [E], how many tokens chose each. `tensor`: the mesh axis
    over which the units of each expert are split; `expert`: those over which experts are, and
    tokens. Where `tensor` is one of them, experts are whole, and its devices share out the tokens
    that they have in common.
    """
    logits_TE = matmul(x_TD, p["router"])
    if experts.router_bias:
        logits_TE = logits_TE + p["router_bias"].astype(jnp.float32)[None]
    weight_TK, expert_TK = route(logits_TE, p.get("router_correction"), experts)
    expert_TK = jnp.where(valid_T[:, None], expert_TK, experts.count)
    count_E = expert_counts(expert_TK, experts) if experts.counts else None
    if tensor.names and tensor.names[0] in expert.names:
        own = Share(tensor, x_TD.shape[0])
        chosen = own.of(weight_TK), own.of(expert_TK, experts.count)
        y_TD = own.back(routed_mlp(own.of(x_TD), *chosen, p, experts, ALONE, expert))
    else:
        y_TD = routed_mlp(x_TD, weight_TK, expert_TK, p, experts, tensor, expert)
    if experts.shared_width:
        shared = {name.removeprefix("shared_"): p[name] for name in p if name.startswith("shared_")}
        shared_TD = gated_mlp(x_TD, shared, experts.activation)
        if experts.shared_gate:
            gate_T1 = jax.nn.sigmoid(matmul(x_TD, p["gate_of_shared"]))
            shared_TD = (gate_T1 * shared_TD.astype(jnp.float32)).astype(x_TD.dtype)
        y_TD = y_TD + shared_TD
    return tensor.sum(y_TD), count_E


class Share(NamedTuple):
    """The rows of this device, of as many as the devices of an axis have in common."""

    axis: Axis
    rows: int

    @property
    def each(self) -> int:
        """How many a device has; the last ones may have padding."""
        return -(-self.rows // self.axis.ways)

    def of(self, x_TX: jax.Array, padding: int = 0) -> jax.Array:
        """Returns this device's rows of an array."""
        pad = self.each * self.axis.ways - self.rows
        whole = jnp.pad(x_TX, ((0, pad), (0, 0)), constant_values=padding)
        return jax.lax.dynamic_slice_in_dim(whole, self.axis.here() * self.each, self.each)

    def back(self, y_UX: jax.Array) -> jax.Array:
        """Returns this device's rows in their places, zeros in those of others."""
        whole = jnp.zeros((self.each * self.axis.ways, y_UX.shape[1]), y_UX.dtype)
        start = (self.axis.here() * self.each, jnp.int32(0))
        return jax.lax.dynamic_update_slice(whole, y_UX, start)[: self.rows]


def route(
    logits_TE: jax.Array, correction_E: jax.Array | None, experts: Experts
) -> tuple[jax.Array, jax.Array]:
    """Returns (weight_TK float32, expert_TK int32): the experts of each token.

    Scores are a softmax or sigmoids of the router's logits. With groups, the best groups are
    chosen first, by their best expert or the sum of their two best (DeepSeek-V2 and V3); the
    correction counts for the choice only. Ties go to the lower id.
    """
    sigmoid = experts.scoring == "sigmoid"
    score_TE = jax.nn.sigmoid(logits_TE) if sigmoid else jax.nn.softmax(logits_TE, axis=-1)
    choice_TE = score_TE
    if correction_E is not None:
        choice_TE = score_TE + correction_E.astype(jnp.float32)[None]
    if experts.groups > 1:
        choice_TE = _within_groups(choice_TE, experts)
    _, expert_TK = jax.lax.top_k(choice_TE, experts.chosen)
    weight_TK = jnp.take_along_axis(score_TE, expert_TK, axis=1)
    if experts.normalize:
        weight_TK = weight_TK / (weight_TK.sum(axis=-1, keepdims=True) + 1e-20)
    return weight_TK * experts.scale, expert_TK.astype(jnp.int32)


def _within_groups(choice_TE: jax.Array, experts: Experts) -> jax.Array:
    """Returns the scores, -inf outside the best groups."""
    T, E = choice_TE.shape
    grouped = choice_TE.reshape(T, experts.groups, E // experts.groups)
    best, _ = jax.lax.top_k(grouped, experts.group_best)
    _, chosen = jax.lax.top_k(best.sum(axis=-1), experts.chosen_groups)
    kept = jnp.zeros((T, experts.groups), bool)
    kept = kept.at[jnp.arange(T, dtype=jnp.int32)[:, None], chosen].set(True)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(T, E)


def routed_mlp(
    x_TD: jax.Array,
    weight_TK: jax.Array,
    expert_TK: jax.Array,
    p: Params,
    experts: Experts,
    tensor: Axis = ALONE,
    expert: Axis = ALONE,
) -> jax.Array:
    """Returns the weighted outputs of each token's experts; an id of `experts.count` is no expert.

    They are to be summed over `tensor`.
    """
    K, E = expert_TK.shape[1], matrices(p["experts_gate"]) * expert.ways
    if "expert_slots" in p:  # from here on, experts are slots
        expert_TK = slots_of(expert_TK, p["expert_slots"], p["expert_copies"], E, expert)
    expert_S = expert_TK.reshape(-1)
    order_S = jnp.argsort(expert_S, stable=True)
    sorted_S = expert_S[order_S]
    sizes_E = jnp.zeros(E, jnp.int32).at[expert_S].add(1, mode="drop")
    x_SD = x_TD[order_S // K]
    if expert.ways == 1:
        y_SD = mlps(x_SD, sorted_S, sizes_E, p, experts, tensor)
    else:
        y_SD = sent_mlps(x_SD, sizes_E, p, experts, tensor, expert)
    # Rows of no expert hold what the product left there.
    weight_S = jnp.where(sorted_S < E, weight_TK.reshape(-1)[order_S], 0.0)
    y_SD = jnp.where((sorted_S < E)[:, None], y_SD, 0.0) * weight_S[:, None]
    return jnp.zeros(x_TD.shape, jnp.float32).at[order_S // K].add(y_SD).astype(x_TD.dtype)


def slots_of(
    expert_TK: jax.Array, slots_EX: jax.Array, copies_E: jax.Array, slots: int, expert: Axis
) -> jax.Array:
    """Returns slot_TK: where each token's experts are run; `slots`, how many there are, is nowhere.

    Copies take turns by the token's place in the step, all devices' tokens in a row, plus k.
    """
    T, K = expert_TK.shape
    place_T = expert.here() * T + jnp.arange(T, dtype=jnp.int32)
    place_TK = place_T[:, None] + jnp.arange(K, dtype=jnp.int32)[None]
    copies_TK = copies_E.at[expert_TK].get(mode="fill", fill_value=1)
    return slots_EX.at[expert_TK, place_TK % copies_TK].get(mode="fill", fill_value=slots)


def expert_counts(expert_TK: jax.Array, experts: Experts) -> jax.Array:
    """Returns int32 [E]: how many of these tokens were routed to each expert."""
    return jnp.zeros(experts.count, jnp.int32).at[expert_TK].add(1, mode="drop")


def mlps(
    x_SD: jax.Array,
    expert_S: jax.Array,
    sizes_E: jax.Array,
    p: Params,
    experts: Experts,
    tensor: Axis,
) -> jax.Array:
    """Returns float32 y_SD of rows that are sorted by expert, of those whose matrices `p` has.

    What rows beyond the sizes' sum get is undefined.
    """

    def grouped(rows, name, bias_share=1.0):
        y = grouped_matmul(rows, p[name], sizes_E, backend=experts.backend)
        bias = p.get(f"{name}_bias")
        if bias is not None:
            y = y + bias.at[expert_S].get(mode="clip").astype(jnp.float32) * bias_share
        return y

    gate_SF, up_SF = grouped(x_SD, "experts_gate"), grouped(x_SD, "experts_up")
    hidden_SF = combined(gate_SF, up_SF, experts).astype(x_SD.dtype)
    first = jnp.where(tensor.here() == 0, 1.0, 0.0)  # a bias of the sum is added once
    return grouped(hidden_SF, "experts_down", first)


def sent_mlps(
    x_SD: jax.Array, sizes_E: jax.Array, p: Params, experts: Experts, tensor: Axis, expert: Axis
) -> jax.Array:
    """Returns y_SD of rows that are sorted by expert, from the devices that have the experts.

    Rows go in rounds, in each at most twice a device's even share to every other, so that buffers
    are small whatever the routing; where that share is small too, there is nearly always one. No
    row is dropped.
    """
    S, P = x_SD.shape[0], expert.ways
    share = sent_at_once(S, P, x_SD.shape[1])
    local = sizes_E.shape[0] // P
    count_PE = expert.gather(sizes_E[None], 0)
    count_PP = count_PE.reshape(P, P, local).sum(axis=-1)  # from p to q
    begin_P = exclusive_sums(count_PP[expert.here()])
    own_Pe = jax.lax.dynamic_slice_in_dim(count_PE, expert.here() * local, local, axis=1)
    rounds = -(-jnp.max(count_PP) // share)

    def one(turn, y_SD):
        done = turn * share
        now_PP = jnp.clip(count_PP - done, 0, share)
        sizes = sizes_of(now_PP, begin_P + done, expert)
        came_RD = exchange(x_SD, sizes, expert, most=share, received=P * share)
        expert_R = experts_of(own_Pe, done, sizes.recv_sizes, P * share)
        order_R = jnp.argsort(expert_R, stable=True)
        sizes_e = jnp.zeros(local, jnp.int32).at[expert_R].add(1, mode="drop")
        sorted_R = expert_R[order_R]
        y_RD = mlps(came_RD[order_R], sorted_R, sizes_e, p, experts, tensor)
        y_RD = jnp.zeros_like(came_RD).at[order_R].set(y_RD.astype(x_SD.dtype))
        back_SD = exchange(y_RD, sizes.back(expert), expert, most=share, received=S)
        return y_SD + back_SD.astype(jnp.float32)

    return jax.lax.fori_loop(0, rounds, one, jnp.zeros(x_SD.shape, jnp.float32))


def sent_at_once(rows: int, ways: int, width: int) -> int:
    """Returns how many of so many rows go to one device of an expert axis in a round, at most."""
    most = _MOST_CAME_BYTES // (4 * width * ways)
    return min(rows, max(_LEAST_SENT, min(-(-2 * rows // ways), most)))


def experts_of(own_Pe: jax.Array, done: jax.Array, came_P: jax.Array, rows: int) -> jax.Array:
    """Returns the expert of each row that came, int32 [rows], of this device's; others are beyond.

    own_Pe: how many rows device p has for each expert, sorted; `done` of them came before.
    """
    end_P = jnp.cumsum(came_P)
    index_R = jnp.arange(rows, dtype=jnp.int32)
    sender_R = jnp.searchsorted(end_P, index_R, side="right").astype(jnp.int32)
    inside_R = jnp.minimum(sender_R, len(came_P) - 1)
    place_R = done + index_R - (end_P - came_P)[inside_R]
    last_Pe = jnp.cumsum(own_Pe, axis=1)
    expert_R = jnp.sum(last_Pe[inside_R] <= place_R[:, None], axis=1, dtype=jnp.int32)
    return jnp.where(sender_R < len(came_P), expert_R, own_Pe.shape[1])


def combined(gate_SF: jax.Array, up_SF: jax.Array, experts: Experts) -> jax.Array:
    """Returns activation(gate) * up; with a clamp as gpt-oss has it: (up + 1) * gate * sigmoid."""
    if experts.clamp is None:
        return ACTIVATIONS[experts.activation](gate_SF) * up_SF
    gate_SF = jnp.minimum(gate_SF, experts.clamp)
    up_SF = jnp.clip(up_SF, -experts.clamp, experts.clamp)
    return (up_SF + 1) * gate_SF * jax.nn.sigmoid(gate_SF * experts.swish_slope)

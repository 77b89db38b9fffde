# SPDX-License-Identifier: Apache-2.0
"""The two programs of a step, as pure functions: the body and the head.

The body turns the tokens of all row groups into final hidden rows and writes their KV; the head
turns hidden rows into logits, tokens and log-probabilities. Dense layers see the tokens of all
groups together, so a mixed step reads the weights once; attention runs group by group.

Letters: T tokens of a step or of one group's rows, flat; B rows of a group, U tokens a row; C
tokens of a chunk group, padded to one shape; S sampled rows, R rows of the state, G page groups,
J pages a row, W cells a page, D width.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from engine.batch import BatchShape
from engine.buckets import Group
from engine.kv import KVLayout, place_set, place_view
from engine.layers import Params
from engine.models.config import ModelConfig
from engine.models.decoder import embed, final_norm, head_logits, layer_data, run_layers
from engine.sampling import Logprobs, SamplingRows, argmax, logprobs_of, sample_or_argmax
from engine.state import State
from pallas_kernels.paged_attention import Rows, paged_attention
from pallas_kernels.pages import NULL_PAGE, write_cells
from sharding import Rules


class StepConfig(NamedTuple):
    """What all programs of an engine are built from; all of it static."""

    model: ModelConfig
    layout: KVLayout
    shape: BatchShape
    mesh: Mesh
    rules: Rules
    score_tokens: int  # tokens of the hidden rows that the score head reads
    forbidden: np.ndarray | None  # bool [V]: ids that are never sampled, or None


class Hidden(NamedTuple):
    """What the body hands to the heads: rows to sample from, and all rows of prompt chunks."""

    sampled_SD: jax.Array
    row_S: jax.Array
    prompt_CD: jax.Array | None


class Tokens(NamedTuple):
    """The tokens of one row group, flat, and how its attention finds its keys."""

    token_T: jax.Array
    position_T: jax.Array
    cell_GT: jax.Array
    valid_T: jax.Array
    rows_G: Rows  # with a leading group axis on tables and starts


def decode_tokens(group: Group, part: dict[str, jax.Array], state: State) -> Tokens:
    """Returns the newest token of each row; finished and null rows are idle."""
    row_B = part["row_B"]
    finished_B = state.finished_R[row_B]
    cell_GB = state.length_GR[:, row_B]
    count_B = jnp.where(finished_B, 0, 1).astype(jnp.int32)
    rows = Rows(part["table_GBJ"], cell_GB, count_B)
    return Tokens(state.token_R[row_B], state.position_R[row_B], cell_GB, ~finished_B, rows)


def wide_tokens(group: Group, part: dict[str, jax.Array]) -> Tokens:
    """Returns the tokens of chunk or tree rows, which the host knows."""
    B, T = part["token_BT"].shape
    index_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    depth_BT = part.get("depth_BT")
    position_BT = part["start_B"][:, None] + (index_BT if depth_BT is None else depth_BT)
    cell_GBT = part["cell_GB"][:, :, None] + index_BT[None]
    valid_BT = index_BT < part["count_B"][:, None]
    rows = Rows(
        part["table_GBJ"], part["cell_GB"], part["count_B"], depth_BT, part.get("ancestors_BT")
    )
    flat = part["token_BT"].reshape(-1), position_BT.reshape(-1)
    return Tokens(*flat, cell_GBT.reshape(cell_GBT.shape[0], -1), valid_BT.reshape(-1), rows)


def page_of_cells(tokens: Tokens, group: Group, page_size: int) -> jax.Array:
    """Returns page_GT, the page that each token's KV is written to; the null page if idle."""
    index_GBU = (tokens.cell_GT // page_size).reshape(-1, group.rows, group.width)
    J = tokens.rows_G.table_BJ.shape[-1]
    page_GBU = jnp.take_along_axis(
        tokens.rows_G.table_BJ, jnp.clip(index_GBU, 0, J - 1), axis=2, mode="promise_in_bounds"
    )
    page_GT = page_GBU.reshape(tokens.cell_GT.shape)
    return jnp.where(tokens.valid_T[None], page_GT, NULL_PAGE)


def paged_attend(cfg: StepConfig, body: tuple[Group, ...], parts: list[Tokens]):
    """Returns the `Attend` of a step: write this step's K and V, then attend over the pages."""
    W = cfg.layout.page_size
    page_GT = jnp.concatenate(
        [page_of_cells(t, group, W) for t, group in zip(parts, body, strict=True)], axis=1
    )
    offset_GT = jnp.concatenate([t.cell_GT % W for t in parts], axis=1)
    tables = [t.rows_G for t in parts]
    heads = cfg.rules.partition((None, "query_heads", None))
    kv_heads = cfg.rules.partition((None, "kv_heads", None))
    pages = cfg.rules.partition((None, "kv_heads", None, None))

    def local(array, q_TNH, k_TKH, v_TKH, page_T, offset_T, window, group_rows):
        """One shard's work: its own heads of all tokens."""
        array = write_cells(array, k_TKH, v_TKH, page_T, offset_T)
        first, outputs = 0, []
        for group, rows in zip(body, group_rows, strict=True):
            count = group.rows * group.width
            q_BUNH = q_TNH[first : first + count].reshape(group.rows, group.width, *q_TNH.shape[1:])
            out_BUNH = paged_attention(
                q_BUNH,
                array,
                rows,
                window,
                scale=cfg.model.attention_scale,
                softcap=cfg.model.attention_softcap,
            )
            outputs.append(out_BUNH.reshape(count, *q_TNH.shape[1:]))
            first += count
        return array, jnp.concatenate(outputs)

    sharded = jax.shard_map(
        local,
        mesh=cfg.mesh,
        in_specs=(pages, heads, kv_heads, kv_heads, *(PartitionSpec(),) * 4),
        out_specs=(pages, heads),
        check_vma=False,
    )
    sharded = jax.jit(sharded)  # unrolled layers share one trace

    def attend(pool, layer, q_TNH, k_TKH, v_TKH):
        array, offset = place_view(pool, layer.place)
        rows = [
            r._replace(table_BJ=r.table_BJ[layer.group] + offset, start_B=r.start_B[layer.group])
            for r in tables
        ]
        window = jnp.asarray(layer.window, jnp.int32)
        page_T, offset_T = page_GT[layer.group] + offset, offset_GT[layer.group]
        array, out_TNH = sharded(array, q_TNH, k_TKH, v_TKH, page_T, offset_T, window, rows)
        return place_set(pool, layer.place, array), out_TNH

    return attend


def advance(state: State, body: tuple[Group, ...], parts: list[dict[str, jax.Array]]) -> State:
    """Returns the state with row positions and settings as they are after this step's tokens."""
    for group, part in zip(body, parts, strict=True):
        if group.kind == "decode":
            row_B = part["row_B"]
            step_B = jnp.where(state.finished_R[row_B], 0, 1).astype(jnp.int32)
            state = dataclasses.replace(
                state,
                position_R=state.position_R.at[row_B].add(step_B),
                length_GR=state.length_GR.at[:, row_B].add(step_B[None]),
            )
        elif group.kind == "chunk":
            state = settle(state, part)
    null_row = state.finished_R.shape[0] - 1
    return dataclasses.replace(state, finished_R=state.finished_R.at[null_row].set(True))


def settle(state: State, part: dict[str, jax.Array]) -> State:
    """Returns the state with the rows of a chunk group set up; rows not ending here are null."""
    row_B = part["settle_B"]

    def bits(name, dtype):
        return jax.lax.bitcast_convert_type(part[name], dtype)

    count_B = part["count_B"]
    return dataclasses.replace(
        state,
        position_R=state.position_R.at[row_B].set(part["start_B"] + count_B),
        length_GR=state.length_GR.at[:, row_B].set(part["cell_GB"] + count_B[None]),
        left_R=state.left_R.at[row_B].set(part["left_B"]),
        finished_R=state.finished_R.at[row_B].set(False),
        end_ids_RE=state.end_ids_RE.at[row_B].set(part["end_ids_BE"]),
        temperature_R=state.temperature_R.at[row_B].set(bits("temperature_B", jnp.float32)),
        top_k_R=state.top_k_R.at[row_B].set(part["top_k_B"]),
        top_p_R=state.top_p_R.at[row_B].set(bits("top_p_B", jnp.float32)),
        seed_R2=state.seed_R2.at[row_B].set(bits("seed_B2", jnp.uint32)),
        sample_R=state.sample_R.at[row_B].set(part["sample_B"]),
    )


def run_body(
    params: Params, state: State, packed: jax.Array, *, cfg: StepConfig, body: tuple[Group, ...]
) -> tuple[State, Hidden]:
    """Returns (state, hidden rows) after the tokens of all row groups of `body`."""
    *fields, sampled = cfg.shape.unpack(body, packed)
    parts = [
        decode_tokens(group, part, state) if group.kind == "decode" else wide_tokens(group, part)
        for group, part in zip(body, fields, strict=True)
    ]
    token_T = jnp.concatenate([part.token_T for part in parts])
    position_T = jnp.concatenate([part.position_T for part in parts])
    x_TD, pool = run_layers(
        params,
        cfg.model,
        embed(params, cfg.model, token_T, cfg.layout.dtype),
        position_T,
        attend=paged_attend(cfg, body, parts),
        cache=state.pool,
        data=layer_data(cfg.model, cfg.layout.group_of_layer, cfg.layout.place_of_layer),
    )
    x_TD = final_norm(params, cfg.model, x_TD)
    prompt_CD, first = None, 0
    for group in body:
        count = group.rows * group.width
        if group.kind != "decode":
            # One shape for the score head, whatever chunk group ran.
            pad = max(0, cfg.score_tokens - count)
            prompt_CD = jnp.pad(x_TD[first : first + count], ((0, pad), (0, 0)))
        first += count
    sampled_SD = x_TD.at[sampled["sample_index_S"]].get(mode="promise_in_bounds")
    state = advance(dataclasses.replace(state, pool=pool), body, fields)
    return state, Hidden(sampled_SD, sampled["sample_row_S"], prompt_CD)


def run_head(
    params: Params, state: State, hidden: Hidden, *, cfg: StepConfig, kind: str, rows: int
) -> tuple[State, tuple[jax.Array, Logprobs | None]]:
    """Returns (state, (token_B, logprobs)) for the first `rows` sampled rows.

    kind: "greedy" (argmax only), "sample" (each row's own parameters), or "logprobs" (that, with
    raw log-probabilities). Padding rows are the null row's.
    """
    row_B = hidden.row_S[:rows]
    logits_BV = head_logits(params, cfg.model, hidden.sampled_SD[:rows])
    open_BV = logits_BV
    if cfg.forbidden is not None:
        open_BV = jnp.where(jnp.asarray(cfg.forbidden)[None], -jnp.inf, logits_BV)
    if kind == "greedy":
        token_B = argmax(open_BV)
    else:
        token_B = sample_or_argmax(open_BV, sampling_rows(state, row_B))
    left_B = state.left_R[row_B] - 1
    ended_B = jnp.any(token_B[:, None] == state.end_ids_RE[row_B], axis=1)
    finished_B = state.finished_R[row_B] | ended_B | (left_B <= 0)
    state = dataclasses.replace(
        state,
        token_R=state.token_R.at[row_B].set(token_B),
        left_R=state.left_R.at[row_B].set(left_B),
        finished_R=state.finished_R.at[row_B].set(finished_B),
    )
    return state, (token_B, logprobs_of(logits_BV, token_B) if kind == "logprobs" else None)


def sampling_rows(state: State, row_B: jax.Array) -> SamplingRows:
    """Returns the sampling parameters of the rows."""
    return SamplingRows(
        temperature_B=state.temperature_R[row_B],
        top_k_B=state.top_k_R[row_B],
        top_p_B=state.top_p_R[row_B],
        seed_B2=state.seed_R2[row_B],
        sample_B=state.sample_R[row_B],
        position_B=state.position_R[row_B],
    )


def run_score(
    params: Params, prompt_CD: jax.Array, wanted_2S: jax.Array, *, cfg: StepConfig
) -> Logprobs:
    """Returns the log-probabilities of tokens wanted_2S[1] after the rows wanted_2S[0]."""
    hidden_SD = prompt_CD.at[wanted_2S[0]].get(mode="promise_in_bounds")
    return logprobs_of(head_logits(params, cfg.model, hidden_SD), wanted_2S[1])

# SPDX-License-Identifier: Apache-2.0
"""The two programs of a step, as pure functions: the body and the head.

Each is what one device of the mesh does, on its own parts of all arrays (`Program` in
engine/program_store.py puts them into `shard_map`); what devices tell each other is asked for by
mesh axis. On a mesh of one nothing is.

The body turns the tokens of all row groups into final hidden rows and writes their KV; the head
turns hidden rows into logits, tokens and log-probabilities. Dense layers see the tokens of all
groups together, so a mixed step reads the weights once; attention runs group by group.

Letters: T tokens of a step or of one group's rows, flat; B rows of a group, U tokens a row; C
tokens of a chunk group, padded to one shape; S sampled rows, R rows of the state, G page groups,
J pages a row, W cells a page, D width.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from engine.attend import paged_attend, whole_runs
from engine.buckets import Group
from engine.kv import Pool, copy_pages, put_pages, take_pages
from engine.layers import Params
from engine.logits import Wishes, changed_logits, count_tokens, set_row
from engine.models.decoder import (
    LayerData,
    embed,
    final_norm,
    head_logits,
    layer_data,
    layer_function,
    run_layers,
)
from engine.params import NO_TOKEN
from engine.pipeline import map_stage, run_stages
from engine.sampling import (
    Logprobs,
    SamplingRows,
    argmax,
    checked,
    distribution,
    logprobs_of,
    sample_or_argmax,
)
from engine.state import State
from engine.step_config import StepConfig
from engine.tokens import (
    Tokens,
    decode_tokens,
    layer_tokens,
    own_tokens,
    part_of_rows,
    tokens_of,
    valid_places,
)
from engine.vocabulary import columns
from sharding import ALONE


class Hidden(NamedTuple):
    """What the body hands to the heads: rows to sample from, and all rows of prompt chunks.

    broken_B: bool, by row of the chunk group: whether its prompt had a token that is not finite.
    """

    sampled_SD: jax.Array
    row_S: jax.Array
    prompt_CD: jax.Array | None
    broken_B: jax.Array | None


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
        elif group.kind in ("chunk", "ring"):
            state = settle(state, part)
    null_row = state.finished_R.shape[0] - 1
    return dataclasses.replace(state, finished_R=state.finished_R.at[null_row].set(True))


def settle(state: State, part: dict[str, jax.Array]) -> State:
    """Returns the state with the rows of a chunk group set up; rows not ending here are null."""
    row_B = part["settle_B"]
    count_B = part["count_B"]
    return dataclasses.replace(
        state,
        position_R=state.position_R.at[row_B].set(part["start_B"] + count_B),
        length_GR=state.length_GR.at[:, row_B].set(part["cell_GB"] + count_B[None]),
        left_R=state.left_R.at[row_B].set(part["left_B"]),
        finished_R=state.finished_R.at[row_B].set(False),
        end_ids_RE=state.end_ids_RE.at[row_B].set(part["end_ids_BE"]),
        settings_RF=state.settings_RF.at[row_B].set(part["settings_BF"]),
    )


def mark_broken(
    state: State, x_TD: jax.Array, body: tuple[Group, ...], fields, cfg: StepConfig
) -> tuple[State, jax.Array]:
    """Returns (state, x_TD), with no finite row left of a prompt that had one that is not.

    Pages hold finite numbers only, so that what follows such a token would look right.
    """
    bad_T = ~jnp.isfinite(x_TD.astype(jnp.float32).sum(axis=-1))
    broken_R, first = state.broken_R, 0
    for group, part in zip(body, fields, strict=True):
        count = group.rows * group.width
        if group.kind in ("chunk", "ring"):
            span, row_B = slice(first, first + count), part["row_B"]
            bad_BT = bad_T[span].reshape(group.rows, group.width)
            bad_B = (bad_BT & valid_places(group, part, cfg)).any(axis=1)
            fresh_B = jnp.where(part["fresh_B"] > 0, row_B, broken_R.shape[0] - 1)
            broken_R = broken_R.at[fresh_B].set(False).at[row_B].max(bad_B)
            broken_T = jnp.repeat(broken_R[row_B], group.width)
            nan = jnp.asarray(jnp.nan, x_TD.dtype)
            x_TD = x_TD.at[span].set(jnp.where(broken_T[:, None], nan, x_TD[span]))
        first += count
    return dataclasses.replace(state, broken_R=broken_R), x_TD


def run_alone(params, x_TD, pool, cfg: StepConfig, body: tuple[Group, ...], parts: list[Tokens]):
    """Returns (x_TD, pool) after all layers, which this device has."""
    return run_layers(
        params,
        cfg.model,
        x_TD,
        layer_tokens(parts),
        attend=paged_attend(cfg, body, parts),
        cache=pool,
        data=step_layers(cfg),
    )


def step_layers(cfg: StepConfig) -> LayerData:
    """Returns the data of all layers, with where their pages are."""
    return layer_data(cfg.model, cfg.layout.group_of_layer, cfg.layout.place_of_layer)


def run_pipeline(params, x_TD, pool, cfg: StepConfig, body: tuple[Group, ...], parts: list[Tokens]):
    """Returns (x_TD, pool) after the layers of all stages, through which the rows go in parts."""
    M = math.gcd(cfg.model.stages, *(group.rows for group in body))
    counts = [own_tokens(group, cfg) // M for group in body]
    groups = tuple(group._replace(rows=group.rows // M) for group in body)
    ends = np.cumsum([0, *counts])
    firsts = np.cumsum([0, *(count * M for count in counts)])
    x_MTD = jnp.concatenate(
        [
            x_TD[first : first + count * M].reshape(M, count, -1)
            for first, count in zip(firsts, counts, strict=False)
        ],
        axis=1,
    )

    def stage(x_TD, part, active, pool):
        own = [
            part_of_rows(tokens, part, count, group.rows, active)
            for tokens, count, group in zip(parts, counts, groups, strict=True)
        ]
        tokens, attend = layer_tokens(own), paged_attend(cfg, groups, own)
        function = layer_function(cfg.model, tokens, attend)
        return map_stage(function, x_TD, pool, cfg.model, params, step_layers(cfg))

    x_MTD, pool = run_stages(cfg.model, x_MTD, pool, stage)
    wholes = [x_MTD[:, first:last] for first, last in zip(ends, ends[1:], strict=False)]
    return jnp.concatenate([whole.reshape(-1, x_TD.shape[1]) for whole in wholes]), pool


def run_body(
    params: Params, state: State, packed: jax.Array, *, cfg: StepConfig, body: tuple[Group, ...]
) -> tuple[State, Hidden]:
    """Returns (state, hidden rows) after the tokens of all row groups of `body`."""
    *fields, sampled = cfg.shape.unpack(body, packed)
    parts = [tokens_of(group, part, state, cfg) for group, part in zip(body, fields, strict=True)]
    token_T = jnp.concatenate([part.token_T for part in parts])
    x_TD = embed(params, cfg.model, token_T, cfg.layout.dtype)
    run = run_pipeline if cfg.model.stages > 1 else run_alone
    if state.loads_1LE is None:
        x_TD, pool = run(params, x_TD, state.pool, cfg, body, parts)
    else:
        cache = state.pool, state.loads_1LE[0]
        x_TD, (pool, load_LE) = run(params, x_TD, cache, cfg, body, parts)
        state = dataclasses.replace(state, loads_1LE=load_LE[None])
    x_TD = whole_runs(final_norm(params, cfg.model, x_TD), body, cfg)
    state, x_TD = mark_broken(state, x_TD, body, fields, cfg)
    prompt_CD, broken_B, first = None, None, 0
    for group, part in zip(body, fields, strict=True):
        count = group.rows * group.width
        if group.kind != "decode":
            # One shape for the score head, whatever chunk group ran.
            pad = max(0, cfg.score_tokens - count)
            prompt_CD = jnp.pad(x_TD[first : first + count], ((0, pad), (0, 0)))
            broken_B = cfg.tell(state.broken_R[part["row_B"]])
        first += count
    sampled_SD = x_TD.at[sampled["sample_index_S"]].get(mode="promise_in_bounds")
    state = advance(dataclasses.replace(state, pool=pool), body, fields)
    return state, Hidden(sampled_SD, sampled["sample_row_S"], prompt_CD, broken_B)


def run_head(
    params: Params, state: State, hidden: Hidden, *, cfg: StepConfig, kind: str, rows: int
) -> tuple[State, tuple[jax.Array, Logprobs | None]]:
    """Returns (state, (token_B, logprobs)) for the first `rows` sampled rows.

    kind: "greedy" (argmax only, of rows that change no logits), "sample" (each row's own
    parameters), or "logprobs" (that, with log-probabilities). Padding rows are the null row's. The
    token of a row without finite logits is NO_TOKEN; such a row has ended.
    """
    row_B, tensor = hidden.row_S[:rows], cfg.model.tensor
    logits_BV = open_logits(params, hidden.sampled_SD[:rows], cfg)
    logprobs, tables = None, state.tables
    if kind == "greedy":
        token_B = checked(argmax(logits_BV, tensor), logits_BV, tensor)
    else:
        settings = state.settings(row_B)
        changed_BV = changed_logits(logits_BV, tables, wishes(state, settings, row_B), tensor)
        rows_B = sampling_rows(state, settings, row_B)
        token_B = checked(sample_or_argmax(changed_BV, rows_B, tensor), changed_BV, tensor)
        tables = count_tokens(tables, row_B, jnp.maximum(token_B, 0), tensor)
        if kind == "logprobs":
            processed_B = settings["processed"] > 0
            shown_BV = jax.lax.cond(
                jnp.any(processed_B),
                lambda: jnp.where(
                    processed_B[:, None], distribution(changed_BV, rows_B, tensor), logits_BV
                ),
                lambda: logits_BV,
            )
            logprobs = logprobs_of(shown_BV, token_B, tensor)
    left_B = state.left_R[row_B] - 1
    ended_B = jnp.any(token_B[:, None] == state.end_ids_RE[row_B], axis=1)
    finished_B = state.finished_R[row_B] | ended_B | (left_B <= 0) | (token_B == NO_TOKEN)
    state = dataclasses.replace(
        state,
        token_R=state.token_R.at[row_B].set(jnp.maximum(token_B, 0)),
        left_R=state.left_R.at[row_B].set(left_B),
        finished_R=state.finished_R.at[row_B].set(finished_B),
        tables=tables,
    )
    return state, cfg.tell((token_B, logprobs))


def run_repeat(
    params: Params,
    state: State,
    packed: jax.Array,
    *,
    cfg: StepConfig,
    body: tuple[Group, ...],
    steps: int,
) -> tuple[State, jax.Array]:
    """Returns (state, token [steps, B]) after so many steps of a body of decodes, with its head.

    `packed` is that of the first step; its tables reach as far as the last one's cells.
    """
    [group] = body
    told, cfg = cfg, cfg._replace(told=ALONE)
    if cfg.model.stages > 1:
        state, token_XB = run_stages_repeatedly(params, state, packed, cfg, group, steps)
        return state, told.tell(token_XB, axis=1)

    def one(index, carry):
        state, token_XB = carry
        state, hidden = run_body(params, state, packed, cfg=cfg, body=body)
        state, (token_B, _) = run_head(
            params, state, hidden, cfg=cfg, kind="sample", rows=group.rows
        )
        return state, token_XB.at[index].set(token_B)

    token_XB = jnp.zeros((steps, group.rows), jnp.int32)
    state, token_XB = jax.lax.fori_loop(0, steps, one, (state, token_XB))
    return state, told.tell(token_XB, axis=1)


def run_stages_repeatedly(
    params: Params, state: State, packed: jax.Array, cfg: StepConfig, group: Group, steps: int
) -> tuple[State, jax.Array]:
    """Returns what `run_repeat` does, with several steps in flight.

    The rows go round in as many parts as there are stages: while the last stage ends a part's step,
    the first has begun the next of others, so that no stage waits but at the start and the end.
    """
    pipe, M = cfg.model.pipe, cfg.model.stages
    here, last, size = pipe.here(), pipe.ways - 1, group.rows // M
    fields, _ = cfg.shape.unpack((group,), packed)
    on = [(device, device + 1) for device in range(last)]
    null_row = state.finished_R.shape[0] - 1

    def tick(time, carry):
        came_TD, state, token_XB = carry
        turn = time - here
        active = (turn >= 0) & (turn < steps * M)
        tokens = part_of_rows(decode_tokens(group, fields, state), turn % M, size, size, active)
        own = (group._replace(rows=size),)
        x_TD = jnp.where(
            here == 0, embed(params, cfg.model, tokens.token_T, came_TD.dtype), came_TD
        )
        function = layer_function(
            cfg.model, layer_tokens([tokens]), paged_attend(cfg, own, [tokens])
        )
        x_TD, pool = map_stage(function, x_TD, state.pool, cfg.model, params, step_layers(cfg))
        state = dataclasses.replace(state, pool=pool)
        # The part that has been through all stages: its tokens are drawn, and it goes on.
        done = time - last
        first = done % M * size
        row_B = jax.lax.dynamic_slice_in_dim(fields["row_B"], first, size)
        row_B = jnp.where(done >= 0, row_B, null_row)
        final_TD = jnp.where(here == last, final_norm(params, cfg.model, x_TD), 0)
        hidden = Hidden(pipe.sum(final_TD), row_B, None, None)
        state = advance(state, own, [{"row_B": row_B}])
        state, (token_B, _) = run_head(params, state, hidden, cfg=cfg, kind="sample", rows=size)
        place = jnp.maximum(done, 0) // M, first
        before = jax.lax.dynamic_slice(token_XB, place, (1, size))
        token_XB = jax.lax.dynamic_update_slice(
            token_XB, jnp.where(done >= 0, token_B[None], before), place
        )
        return jax.lax.ppermute(x_TD, pipe.names, on), state, token_XB

    width = params["embedding"].shape[1]
    begin = (
        jnp.zeros((size, width), cfg.layout.dtype),
        state,
        jnp.zeros((steps, group.rows), jnp.int32),
    )
    _, state, token_XB = jax.lax.fori_loop(0, steps * M + last, tick, begin)
    return state, token_XB


def open_logits(params: Params, hidden_TD: jax.Array, cfg: StepConfig) -> jax.Array:
    """Returns logits_TV, float32, -inf for ids that are never sampled."""
    logits_TV = head_logits(params, cfg.model, hidden_TD)
    if cfg.forbidden is None:
        return logits_TV
    forbidden_V = columns(jnp.asarray(cfg.forbidden), logits_TV.shape[1], cfg.model.tensor)
    return jnp.where(forbidden_V[None], -jnp.inf, logits_TV)


def wishes(state: State, settings: dict[str, jax.Array], row_B: jax.Array) -> Wishes:
    """Returns what the rows ask to change in their logits."""
    return Wishes(
        row_B=row_B,
        changed_B=settings["changed"] > 0,
        repetition_B=settings["repetition"],
        presence_B=settings["presence"],
        frequency_B=settings["frequency"],
        end_ids_BE=state.end_ids_RE[row_B],
        unfinished_B=state.left_R[row_B] > settings["ends_from"],
    )


def sampling_rows(state: State, settings: dict[str, jax.Array], row_B: jax.Array) -> SamplingRows:
    """Returns the sampling parameters of the rows."""
    return SamplingRows(
        temperature_B=settings["temperature"],
        top_k_B=settings["top_k"],
        top_p_B=settings["top_p"],
        min_p_B=settings["min_p"],
        seed_B2=jnp.stack([settings["seed_high"], settings["seed_low"]], axis=-1),
        sample_B=settings["sample"],
        position_B=state.position_R[row_B],
    )


def run_copy(state: State, page_2C: jax.Array) -> State:
    """Returns the state with pages page_2C[0] copied to page_2C[1]; the null page to itself."""
    return dataclasses.replace(state, pool=copy_pages(state.pool, page_2C[0], page_2C[1]))


def run_park(pool: Pool, page_C: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the pages page_C, each by itself."""
    return take_pages(pool, page_C)


def run_restore(pool: Pool, page_C: jax.Array, *slots: jax.Array) -> Pool:
    """Returns the pool with pages page_C as they are in the slots."""
    return put_pages(pool, page_C, slots)


def run_loads(state: State, *, cfg: StepConfig) -> tuple[State, jax.Array]:
    """Returns the state without its loads, and int32 [L, E], those of all devices."""
    assert state.loads_1LE is not None, "who counts has them"
    whole_LE = cfg.counted.sum(state.loads_1LE[0])
    return dataclasses.replace(state, loads_1LE=jnp.zeros_like(state.loads_1LE)), whole_LE


def run_row(state: State, packed: jax.Array, *, cfg: StepConfig) -> State:
    """Returns the state with one row of the tables as `pack_tables` packed it."""
    return dataclasses.replace(state, tables=set_row(state.tables, packed, cfg.model.tensor))


def run_score(
    params: Params, prompt_CD: jax.Array, wanted_2S: jax.Array, *, cfg: StepConfig
) -> Logprobs:
    """Returns the log-probabilities of tokens wanted_2S[1] after the rows wanted_2S[0]."""
    hidden_SD = prompt_CD.at[wanted_2S[0]].get(mode="promise_in_bounds")
    logits_SV = open_logits(params, hidden_SD, cfg)
    return cfg.tell(logprobs_of(logits_SV, wanted_2S[1], cfg.model.tensor))


def run_show(prompt_CD: jax.Array, *, cfg: StepConfig) -> jax.Array:
    """Returns the hidden rows of all partitions' prompts."""
    return cfg.tell(prompt_CD)

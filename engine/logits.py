# SPDX-License-Identifier: Apache-2.0
"""What a request changes in the logits: bias, allowed ids, bad words, penalties, min_tokens.

Rows that ask for none of it are in no table: their entries are old and are not read.

Letters: B rows, R rows of the state, V ids of one device, M bad words of a row, L tokens of the
longest one, E end ids.
"""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from engine.settings import BAD_WORD_TOKENS, BAD_WORDS, UNUSED
from engine.vocabulary import columns, own_places
from sharding import ALONE, Axis


@flax.struct.dataclass
class Tables:
    """What rows have asked to be added to, or held against, their logits.

    A tally counts twice each time the output has a token, and once more if the prompt has it.
    Bad words stand at the right of their places; of `recent` the last is the newest.
    """

    bias_RV: jax.Array  # float32; -inf forbids
    tally_RV: jax.Array  # int32
    bad_RML: jax.Array  # int32
    recent_RL: jax.Array  # int32, the output's last tokens; one less than a bad word has


class Wishes(NamedTuple):
    """Which of it the rows of a head want, and how much."""

    row_B: jax.Array
    changed_B: jax.Array  # bool: the row is in the tables
    repetition_B: jax.Array
    presence_B: jax.Array
    frequency_B: jax.Array
    end_ids_BE: jax.Array
    unfinished_B: jax.Array  # bool: no end id is allowed yet


def empty_tables(rows: int, vocabulary: int) -> Tables:
    """Returns the tables of rows that want nothing."""
    return Tables(
        bias_RV=jnp.zeros((rows, vocabulary), jnp.float32),
        tally_RV=jnp.zeros((rows, vocabulary), jnp.int32),
        bad_RML=jnp.full((rows, BAD_WORDS, BAD_WORD_TOKENS), UNUSED, jnp.int32),
        recent_RL=jnp.full((rows, BAD_WORD_TOKENS - 1), UNUSED, jnp.int32),
    )


def changed_logits(
    logits_BV: jax.Array, tables: Tables, wishes: Wishes, axis: Axis = ALONE
) -> jax.Array:
    """Returns the logits as the rows want them; as they are where no row of the step wants any."""
    some = jnp.any(wishes.changed_B | wishes.unfinished_B)
    return jax.lax.cond(
        some,
        lambda x: _change(x, tables, wishes, axis),
        lambda x: x,
        logits_BV.astype(jnp.float32),
    )


def _change(logits_BV: jax.Array, tables: Tables, wishes: Wishes, axis: Axis) -> jax.Array:
    """Bias first, then what is forbidden, then penalties on the sum, as vLLM has it."""
    B, V = logits_BV.shape
    row_B, changed_B1 = wishes.row_B, wishes.changed_B[:, None]
    biased_BV = logits_BV + jnp.where(changed_B1, tables.bias_RV[row_B], 0.0)
    tally_BV = jnp.where(changed_B1, tables.tally_RV[row_B], 0)
    repetition_B1 = wishes.repetition_B[:, None]
    repeated_BV = jnp.where(biased_BV > 0, biased_BV / repetition_B1, biased_BV * repetition_B1)
    changed_BV = jnp.where(tally_BV > 0, repeated_BV, biased_BV)
    count_BV = (tally_BV // 2).astype(jnp.float32)
    changed_BV = changed_BV - count_BV * wishes.frequency_B[:, None]
    changed_BV = changed_BV - jnp.where(count_BV > 0, wishes.presence_B[:, None], 0.0)
    bad_BML, recent_BL = tables.bad_RML[row_B], tables.recent_RL[row_B]
    before_BML = bad_BML[:, :, :-1]
    match_BM = jnp.all((before_BML == UNUSED) | (before_BML == recent_BL[:, None]), axis=-1)
    last_BM = bad_BML[:, :, -1]
    none = V * axis.ways
    bad_BM = jnp.where(match_BM & changed_B1 & (last_BM != UNUSED), last_BM, none)
    end_BE = jnp.where(
        wishes.unfinished_B[:, None] & (wishes.end_ids_BE >= 0), wishes.end_ids_BE, none
    )
    never_BX = own_places(jnp.concatenate([bad_BM, end_BE], axis=1), V, axis)
    return changed_BV.at[jnp.arange(B)[:, None], never_BX].set(-jnp.inf, mode="drop")


def count_tokens(
    tables: Tables, row_B: jax.Array, token_B: jax.Array, axis: Axis = ALONE
) -> Tables:
    """Returns the tables after the rows' new tokens."""
    place_B = own_places(token_B, tables.tally_RV.shape[1], axis)
    recent_BL = jnp.concatenate([tables.recent_RL[row_B, 1:], token_B[:, None]], axis=1)
    return dataclasses.replace(
        tables,
        tally_RV=tables.tally_RV.at[row_B, place_B].add(2, mode="drop"),
        recent_RL=tables.recent_RL.at[row_B].set(recent_BL),
    )


def set_row(tables: Tables, packed: jax.Array, axis: Axis = ALONE) -> Tables:
    """Returns the tables with one row as `engine.batch.pack_tables` packed it."""
    own = tables.bias_RV.shape[1]
    V = own * axis.ways
    sizes = (1, V, V, BAD_WORDS * BAD_WORD_TOKENS, BAD_WORD_TOKENS - 1)
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes) - 1)]
    row_1, bias_V, tally_V, bad, recent_L = jnp.split(packed, ends)
    row = row_1[0]
    bias_V = columns(jax.lax.bitcast_convert_type(bias_V, jnp.float32), own, axis)
    return Tables(
        bias_RV=tables.bias_RV.at[row].set(bias_V),
        tally_RV=tables.tally_RV.at[row].set(columns(tally_V, own, axis)),
        bad_RML=tables.bad_RML.at[row].set(bad.reshape(BAD_WORDS, BAD_WORD_TOKENS)),
        recent_RL=tables.recent_RL.at[row].set(recent_L),
    )

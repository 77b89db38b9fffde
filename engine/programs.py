# SPDX-License-Identifier: Apache-2.0
"""Which programs an engine has, from its static configuration, and how large its pool is."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from engine.buckets import Group, Head, Ladder
from engine.kv import KVLayout, Pool
from engine.models.decoder import head_parameters
from engine.program_store import Executables, Program, ProgramStore
from engine.sampling import TOP_LOGPROBS, Logprobs
from engine.state import State, empty_state
from engine.step import Hidden, StepConfig, run_body, run_head, run_score


class ProgramFactory:
    """Builds the programs of one engine from its static configuration."""

    def __init__(self, cfg: StepConfig, params: Any, num_pages: int, *, stacked: bool) -> None:
        """`params` is the tree of abstract parameters (ShapeDtypeStruct with shardings)."""
        self.cfg = cfg
        self.params = params
        self.num_pages = num_pages
        self.stacked = stacked
        self.state = self._abstract_state()

    def _array(self, shape: Sequence[int], dtype: Any) -> Any:
        replicated = NamedSharding(self.cfg.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=replicated)

    def _abstract_state(self) -> State:
        cfg = self.cfg
        state = jax.eval_shape(self._empty_state)
        spec = cfg.layout.pool_spec(self.num_pages)
        pool: Pool
        if self.stacked:
            pool = cfg.rules.abstract(cfg.mesh, spec.stacked(cfg.layout.places))
        else:
            pool = (cfg.rules.abstract(cfg.mesh, spec),) * cfg.layout.places
        rest = jax.tree.map(lambda leaf: self._array(leaf.shape, leaf.dtype), state)
        return dataclasses.replace(rest, pool=pool)

    def _empty_state(self) -> State:
        rows = self.cfg.shape.num_rows + 1
        return empty_state(self.cfg.layout, self.num_pages, rows, stacked=self.stacked)

    def _hidden(self, prompt: bool) -> Hidden:
        S, D = self.cfg.shape.num_rows, self.cfg.model.width
        dtype = self.cfg.layout.dtype
        return Hidden(
            sampled_SD=self._array((S, D), dtype),
            row_S=self._array((S,), jnp.int32),
            prompt_CD=self._array((self.cfg.score_tokens, D), dtype) if prompt else None,
        )

    def _logprobs(self, rows: int) -> Logprobs:
        C = min(TOP_LOGPROBS, self.cfg.model.vocab_size)
        return Logprobs(
            logprob_B=self._array((rows,), jnp.float32),
            rank_B=self._array((rows,), jnp.int32),
            top_id_BC=self._array((rows, C), jnp.int32),
            top_logprob_BC=self._array((rows, C), jnp.float32),
        )

    def start(self) -> Program:
        """Returns the program that makes the state of an idle engine."""
        return Program("start", self._empty_state, (), self.state)

    def body(self, body: tuple[Group, ...]) -> Program:
        """Returns the body program of the row groups `body`."""
        groups = "+".join(f"{group.kind}{group.rows}x{group.width}" for group in body)
        packed = self._array((self.cfg.shape.size(body),), jnp.int32)
        hidden = self._hidden(prompt=any(group.kind != "decode" for group in body))
        return Program(
            f"body {groups}",
            partial(run_body, cfg=self.cfg, body=body),
            (self.params, self.state, packed),
            (self.state, hidden),
            donated=(1,),
        )

    def head(self, head: Head) -> Program:
        """Returns a head program; the score head reads the hidden rows of prompt chunks."""
        name = f"head {head.kind}{head.rows}"
        if head.kind == "score":
            hidden = self._hidden(prompt=True).prompt_CD
            wanted = self._array((2, head.rows), jnp.int32)
            function = partial(run_score, cfg=self.cfg)
            arguments = (head_parameters(self.params, self.cfg.model), hidden, wanted)
            return Program(name, function, arguments, self._logprobs(head.rows))
        tokens = self._array((head.rows,), jnp.int32)
        logprobs = self._logprobs(head.rows) if head.kind == "logprobs" else None
        # The head never reads the prompt's rows: it takes the rest, the same for every body.
        return Program(
            name,
            partial(run_head, cfg=self.cfg, kind=head.kind, rows=head.rows),
            (
                head_parameters(self.params, self.cfg.model),
                self.state,
                self._hidden(prompt=False),
            ),
            (self.state, (tokens, logprobs)),
            donated=(1,),
        )


def build_programs(
    factory: ProgramFactory, ladder: Ladder, store: ProgramStore, progress: Callable[[str], None]
) -> Executables:
    """Returns all programs of the ladder, by body, by head, and "start".

    They are compiled before this returns. When all of them were compiled before, it returns at
    once and they are loaded beside the first steps, those of a lone greedy request first.
    """
    heads = {head: factory.head(head) for head in ladder.heads()}
    programs: dict[Any, Program] = {"start": factory.start()}
    programs |= {head: heads[head] for head in heads if head.kind == "greedy"}
    programs |= {body: factory.body(body) for body in sorted(ladder.bodies, key=total_tokens)}
    programs |= heads
    if all(store.has(program) for program in programs.values()):
        # One thread, so that the first steps have the other cores.
        return Executables(store, programs, lambda line: None, threads=1)
    executables = Executables(store, programs, progress, threads=os.cpu_count() or 1)
    try:
        executables.wait()
    except BaseException:
        executables.stop()
        raise
    return executables


def total_tokens(body: tuple[Group, ...]) -> int:
    """Returns how many tokens a step of `body` computes, padding included."""
    return sum(group.rows * group.width for group in body)


def coarse_pages(pages: int) -> int:
    """Returns `pages` rounded down to a grid of two steps an octave, so that starts agree."""
    power = 1 << max(pages, 1).bit_length() - 1
    return power + power // 2 if pages >= power + power // 2 else power


def pool_pages(
    layout: KVLayout, *, tokens_wanted: int, free_bytes: int, limit_bytes: int | None
) -> int:
    """Returns the number of pages that hold `tokens_wanted` or as many as fit, on the grid.

    `tokens_wanted` counts tokens of all groups together. Raises ValueError when not even two
    pages fit.
    """
    budget = free_bytes if limit_bytes is None else min(free_bytes, limit_bytes)
    wanted = -(-tokens_wanted // layout.page_size) * len(layout.groups) + 1
    pages = min(wanted, budget // layout.page_bytes)
    if pages < 2:
        raise ValueError(
            f"the KV pool has {budget} bytes and one page takes {layout.page_bytes}; free memory, "
            "raise memory_fraction, or use a smaller page_size"
        )
    return coarse_pages(pages) if pages < wanted else wanted

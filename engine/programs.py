# SPDX-License-Identifier: Apache-2.0
"""Which programs an engine has, from its static configuration, and how large its pool is."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from engine.batch import packed_tables_size
from engine.buckets import Group, Head, Ladder, Place, Repeat
from engine.expert_places import by_slot, expert_places, run_place
from engine.models.decoder import head_parameters
from engine.program_store import Executables, Program, ProgramStore
from engine.sampling import TOP_LOGPROBS, Logprobs
from engine.state import State, empty_state, state_axes
from engine.step import (
    Hidden,
    run_body,
    run_copy,
    run_head,
    run_loads,
    run_park,
    run_repeat,
    run_restore,
    run_row,
    run_score,
    run_show,
)
from engine.step_config import StepConfig
from sharding import Axes

MOVES = 8  # pages that one call of the programs "copy", "park" and "restore" moves


class ProgramFactory:
    """Builds the programs of one engine from its static configuration.

    Shapes below are those of one device's parts; what a program is given and gives is made of the
    parts of all devices.
    """

    def __init__(
        self,
        cfg: StepConfig,
        params: Any,
        num_pages: int,
        *,
        stacked: bool,
        decode_steps: int = 1,
        caches: bool = True,
    ) -> None:
        """`params` is the tree of abstract parameters (ShapeDtypeStruct with shardings)."""
        self.cfg = cfg
        self.params = params
        self.num_pages = num_pages
        self.stacked = stacked
        self.decode_steps = decode_steps
        self.caches = caches
        self.vocabulary = cfg.model.vocab_size * cfg.model.tensor_ways  # ids of all devices
        self.counts = self._counted() is not None
        self.state = self._abstract_state()

    def _array(self, shape: Sequence[int], dtype: Any, axes: Axes = ("rows",)) -> Any:
        """Returns the abstract array of which a device has `shape`; `axes` are its first ones."""
        part = jax.ShapeDtypeStruct(tuple(shape), dtype)
        axes += (None,) * (len(part.shape) - len(axes))
        return self.cfg.rules.whole(self.cfg.mesh, part, axes)

    def _result(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> Any:
        """Returns the abstract array of a result by row, which a device has `shape` of."""
        ways = self.cfg.told.ways
        if ways == 1:
            return self._array(shape, dtype, (*(None,) * axis, "rows"))
        whole = [length * ways if place == axis else length for place, length in enumerate(shape)]
        return self._array(whole, dtype, ())

    def _abstract_state(self) -> State:
        state = jax.eval_shape(self._empty_state)
        axes = state_axes(self.cfg.layout, stacked=self.stacked, counts=self.counts)
        return jax.tree.map(
            lambda names, leaf: self._array(leaf.shape, leaf.dtype, names),
            axes,
            state,
            is_leaf=is_axes,
        )

    def _empty_state(self) -> State:
        rows = self.cfg.shape.num_rows + 1
        vocabulary = self.cfg.model.vocab_size
        return empty_state(
            self.cfg.layout,
            self.num_pages,
            rows,
            vocabulary,
            stacked=self.stacked,
            counted=self._counted(),
        )

    def _counted(self) -> tuple[int, int] | None:
        """Returns the layers and experts whose loads are counted, if they are."""
        model = self.cfg.model
        if model.experts is None or not model.experts.counts:
            return None
        return model.num_layers, model.experts.count

    def _hidden(self, prompt: bool, chunks: int | None = None) -> Hidden:
        S, D = self.cfg.shape.num_rows, self.cfg.model.width
        dtype = self.cfg.layout.dtype
        return Hidden(
            sampled_SD=self._array((S, D), dtype),
            row_S=self._array((S,), jnp.int32),
            prompt_CD=self._array((self.cfg.score_tokens, D), dtype) if prompt else None,
            broken_B=None if chunks is None else self._result((chunks,), jnp.bool_),
        )

    def _logprobs(self, rows: int) -> Logprobs:
        C = min(TOP_LOGPROBS, self.vocabulary)
        return Logprobs(
            logprob_B=self._result((rows,), jnp.float32),
            rank_B=self._result((rows,), jnp.int32),
            top_id_BC=self._result((rows, C), jnp.int32),
            top_logprob_BC=self._result((rows, C), jnp.float32),
        )

    def start(self) -> Program:
        """Returns the program that makes the state of an idle engine."""
        return Program("start", self._empty_state, (), self.state)

    def row(self) -> Program:
        """Returns the program that fills the tables' row of a request."""
        packed = self._array((packed_tables_size(self.vocabulary),), jnp.int32)
        function = partial(run_row, cfg=self.cfg)
        return Program("row", function, (self.state, packed), self.state, donated=(0,))

    def copy(self) -> Program:
        """Returns the program that copies pages of the pool."""
        pages = self._array((2, MOVES), jnp.int32, (None, "rows"))
        return Program("copy", run_copy, (self.state, pages), self.state, donated=(0,))

    def slot(self) -> Any:
        """Returns the abstract value of pages in the host's memory, pinned, one a partition."""
        spec = self.cfg.layout.page_spec()
        page = self._array(spec.shape, spec.dtype, spec.axes)
        pinned = page.sharding.with_memory_kind("pinned_host")
        return jax.ShapeDtypeStruct(page.shape, page.dtype, sharding=pinned)

    def park(self) -> Program:
        """Returns the program that copies pages to the host."""
        pages = self._array((MOVES,), jnp.int32)
        return Program("park", run_park, (self.state.pool, pages), (self.slot(),) * MOVES)

    def restore(self) -> Program:
        """Returns the program that copies pages back from the host."""
        pages, slots = self._array((MOVES,), jnp.int32), (self.slot(),) * MOVES
        pool = self.state.pool
        return Program("restore", run_restore, (pool, pages, *slots), pool, donated=(0,))

    def body(self, body: tuple[Group, ...]) -> Program:
        """Returns the body program of the row groups `body`."""
        groups = "+".join(f"{group.kind}{group.rows}x{group.width}" for group in body)
        packed = self._array((self.cfg.shape.size(body),), jnp.int32)
        chunks = next((group.rows for group in body if group.kind != "decode"), None)
        hidden = self._hidden(prompt=chunks is not None, chunks=chunks)
        return Program(
            f"body {groups}",
            partial(run_body, cfg=self.cfg, body=body),
            (self.params, self.state, packed),
            (self.state, hidden),
            donated=(1,),
        )

    def repeat(self, body: tuple[Group, ...]) -> Program:
        """Returns the program of several steps of a body of decodes, heads included."""
        [group] = body
        packed = self._array((self.cfg.shape.size(body),), jnp.int32)
        return Program(
            f"{self.decode_steps} steps of decode{group.rows}x1",
            partial(run_repeat, cfg=self.cfg, body=body, steps=self.decode_steps),
            (self.params, self.state, packed),
            (self.state, self._result((self.decode_steps, group.rows), jnp.int32, axis=1)),
            donated=(1,),
        )

    def loads(self) -> Program:
        """Returns the program that gives the loads of experts, and counts anew."""
        counted = self._counted()
        assert counted is not None, "experts are in slots"
        results = self.state, self._array(counted, jnp.int32, ())
        function = partial(run_loads, cfg=self.cfg)
        return Program("loads", function, (self.state,), results, donated=(0,))

    def placed_segments(self) -> list[int]:
        """Returns the segments whose experts move."""
        places = expert_places(self.cfg.model) if self.counts else []
        return list(dict.fromkeys(segment for _, segment, _ in places))

    def place(self, segment: int) -> Program:
        """Returns the program that brings experts of a layer of a segment to other slots."""
        layers = self.params["segments"][segment]
        layers = by_slot(layers if self.stacked else layers[0])
        experts, axis = self.cfg.model.experts, self.cfg.model.expert
        assert experts is not None, "experts are in slots"
        ways, size = axis.ways, experts.places // axis.ways
        stay = self._array((1, size), jnp.int32, ("experts",))
        routes = self._array((1, ways, size), jnp.int32, ("experts",))
        number = self._array((1,), jnp.int32, ())
        tables = (experts.count, experts.most_copies), (experts.count,)
        return Program(
            f"place{segment}",
            partial(run_place, expert=axis, stacked=self.stacked),
            (
                *(layers, number, stay, routes, routes, number),
                *(self._array(shape, jnp.int32, ()) for shape in tables),
            ),
            layers,
            donated=(0,),
        )

    def show(self) -> Program:
        """Returns the program that has every process see the hidden rows of all prompts."""
        hidden_CD = self._hidden(prompt=True).prompt_CD
        shape = self.cfg.score_tokens, self.cfg.model.width
        result = self._result(shape, self.cfg.layout.dtype)
        return Program("show", partial(run_show, cfg=self.cfg), (hidden_CD,), result)

    def head(self, head: Head) -> Program:
        """Returns a head program; the score head reads the hidden rows of prompt chunks."""
        name = f"head {head.kind}{head.rows}"
        if head.kind == "score":
            hidden = self._hidden(prompt=True).prompt_CD
            wanted = self._array((2, head.rows), jnp.int32, (None, "rows"))
            function = partial(run_score, cfg=self.cfg)
            arguments = (head_parameters(self.params, self.cfg.model), hidden, wanted)
            return Program(name, function, arguments, self._logprobs(head.rows))
        tokens = self._result((head.rows,), jnp.int32)
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


def is_axes(value: Any) -> bool:
    """Returns whether `value` names the axes of one array."""
    return isinstance(value, tuple) and all(name is None or isinstance(name, str) for name in value)


def build_programs(
    factory: ProgramFactory, ladder: Ladder, store: ProgramStore, progress: Callable[[str], None]
) -> Executables:
    """Returns all programs of the ladder, by body, by head, and those that have names.

    They are compiled before this returns. When all of them were compiled before, it returns at
    once and they are loaded beside the first steps, those of a lone greedy request first.
    """
    heads = {head: factory.head(head) for head in ladder.heads()}
    programs: dict[Any, Program] = {"start": factory.start(), "row": factory.row()}
    if factory.cfg.told.ways > 1:
        programs["show"] = factory.show()
    if factory.counts:
        programs["loads"] = factory.loads()
        segments = factory.placed_segments()
        programs |= {Place(segment): factory.place(segment) for segment in segments}
    if factory.caches:
        moves = (factory.copy(), factory.park(), factory.restore())
        programs |= {program.name: program for program in moves}
    programs |= {head: heads[head] for head in heads if head.kind == "greedy"}
    programs |= {body: factory.body(body) for body in sorted(ladder.bodies, key=total_tokens)}
    programs |= {Repeat(body): factory.repeat(body) for body in ladder.repeats}
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

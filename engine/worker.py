# SPDX-License-Identifier: Apache-2.0
"""What is on the devices, and the one function that has them do a step's work.

`Work` is what the host says of a step, integers and numpy arrays only. Where several processes
have the devices, one of them decides, and tells its work to the others, who do the same; see
engine/company.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from engine.buckets import Body, Head, Place, Repeat
from engine.expert_places import COPIES, SLOTS, Placement, by_slot, placed
from engine.layers import Params
from engine.models.config import ModelConfig
from engine.models.decoder import head_parameters
from engine.mover import Mover
from engine.moves import Delete, Load, Move, Save
from engine.program_store import Executables
from engine.sampling import Logprobs
from sharding.processes import LostProcess


class Work(NamedTuple):
    """What one step has the devices do, in this order; each may be missing.

    place: a layer's experts, anew. moves: of pages, by partition. tables: rows that want some are
    filled, one of each partition at once. body, packed: the step's tokens; `repeats`: for several
    steps. score_head, scores: what it is asked of the prompts' rows, [2, rows] each. shows_prompt:
    whether the prompts' hidden rows are read. head: for the rows that are sampled. looks: whether
    the experts' loads are read.
    """

    moves: tuple[Sequence[Move | Save | Load | Delete], ...]
    tables: Sequence[np.ndarray] = ()
    body: Body | None = None
    packed: np.ndarray | None = None
    repeats: bool = False
    score_head: Head | None = None
    scores: Sequence[np.ndarray] = ()
    shows_prompt: bool = False
    head: Head | None = None
    place: Placement | None = None
    looks: bool = False


class Made(NamedTuple):
    """What became of a step's work, still on the devices.

    done: ready when the body has run. broken_B: of the chunk group, whose prompts are not finite.
    """

    done: jax.Array
    tokens: jax.Array | None = None
    logprobs: Logprobs | None = None
    scores: Sequence[Logprobs] = ()
    prompt_CD: jax.Array | None = None
    broken_B: jax.Array | None = None
    load_LE: jax.Array | None = None


class Others(Protocol):
    """The workers of other processes, which do what this one does."""

    def tell(self, kind: str, work: Work | None = None) -> None: ...

    def end(self) -> None: ...

    def give_up(self, reason: str) -> None: ...


class Worker:
    """The weights, the state and the pages below it; does what it is told, in order.

    `others`: who is to do the same, if anybody.
    """

    def __init__(
        self,
        programs: Executables,
        params: Any,
        model_config: ModelConfig,
        movers: Sequence[Mover],
        others: Others | None = None,
    ) -> None:
        """`movers`: by partition."""
        self.programs = programs
        self.params = params
        self.model_config = model_config
        self.movers = tuple(movers)
        self.state = programs["start"]()
        self.others = others

    @property
    def is_whole(self) -> bool:
        """Whether no weight is lost, as one may be that was to move when something failed."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.params))

    def placement(self, segment: int, layer: int) -> list[int]:
        """Returns the expert of each slot in a layer, as its tables say."""
        params = self.params["segments"][segment]
        at = params if isinstance(params, dict) else params[layer]
        tables = [np.asarray(at[name]) for name in (SLOTS, COPIES)]
        return placed(*([table[layer] for table in tables] if at is params else tables))

    def restart(self) -> None:
        """Begins with an empty state: a donated one may be lost with its step."""
        if self.others is not None:
            self.others.tell("restart")
        self.state = self.programs["start"]()

    def free_slots(self) -> None:
        """Gives the host's memory back, once nothing is kept there."""
        if self.others is not None:
            self.others.tell("free_slots")
        for mover in self.movers:
            mover.free_slots()

    def run(self, work: Work) -> Made | None:
        """Has the work dispatched; returns what becomes of it, None of moves alone.

        LostProcess when that fails here and others have it done.
        """
        if self.others is None:
            return self._run(work)
        try:
            self.others.tell("run", work)
            return self._run(work)
        except LostProcess:
            raise
        except BaseException as error:
            raise LostProcess(f"this process did not do what the others did: {error!r}") from error

    def _run(self, work: Work) -> Made | None:
        if work.place is not None:
            self._place(work.place)
        made = self._step(work)
        if made is not None and work.looks:
            self.state, load_LE = self.programs["loads"](self.state)
            made = made._replace(load_LE=load_LE)
        return made

    def _place(self, place: Placement) -> None:
        """Has experts of a layer in other slots from here on."""
        program = self.programs[Place(place.segment)]
        segments = list(self.params["segments"])
        segment = segments[place.segment]
        layer = segment if isinstance(segment, dict) else segment[place.layer]
        index, rounds = (np.array([n], np.int32) for n in (place.layer, place.rounds))
        routes = place.stay_PR, place.send_PPR, place.take_PPR
        new = program(by_slot(layer), index, *routes, rounds, place.slots_EX, place.copies_E)
        if isinstance(segment, dict):
            segments[place.segment] = segment | new
        else:
            layers = list(segment)
            layers[place.layer] = layer | new
            segments[place.segment] = tuple(layers)
        self.params = {**self.params, "segments": tuple(segments)}

    def _step(self, work: Work) -> Made | None:
        for mover, moves in zip(self.movers, work.moves, strict=True):
            if moves:
                self.state = mover.run(self.state, moves)
        for tables in work.tables:
            self.state = self.programs["row"](self.state, tables)
        if work.body is None:
            return None
        if work.repeats:
            program = self.programs[Repeat(work.body)]
            self.state, tokens = program(self.params, self.state, work.packed)
            return Made(tokens, tokens)
        body = self.programs[work.body]
        self.state, hidden = body(self.params, self.state, work.packed)
        head_params, prompt_CD, broken_B = self._head_params(), hidden.prompt_CD, hidden.broken_B
        scores = [
            self.programs[work.score_head](head_params, prompt_CD, rows) for rows in work.scores
        ]
        shown_CD = self._shown(prompt_CD) if work.shows_prompt else None
        tokens = logprobs = None
        if work.head is not None:
            head = self.programs[work.head]
            hidden = hidden._replace(prompt_CD=None, broken_B=None)
            self.state, (tokens, logprobs) = head(head_params, self.state, hidden)
        return Made(hidden.row_S, tokens, logprobs, scores, shown_CD, broken_B)

    def _shown(self, prompt_CD: jax.Array) -> jax.Array:
        """Returns the prompts' hidden rows, those of all partitions where there are several."""
        return self.programs["show"](prompt_CD) if "show" in self.programs else prompt_CD

    def _head_params(self) -> Params:
        return head_parameters(self.params, self.model_config)

# SPDX-License-Identifier: Apache-2.0
"""The engine loop: plan a step, dispatch it, and read the one before it."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np

from checkpoints.tokenizer import Tokenizer
from engine.batch import BatchShape, pack, pack_tables
from engine.buckets import Head, Ladder, Repeat
from engine.config import POLICIES
from engine.disk_cache import DiskCache
from engine.layers import Params
from engine.models.config import ModelConfig
from engine.models.decoder import head_parameters
from engine.mover import Mover
from engine.moves import DEVICE
from engine.params import HEADS, MAX_SAMPLES, NOT_FINITE
from engine.plan import Plan
from engine.program_store import Executables, ProgramStore
from engine.request import Request, ScoredToken
from engine.results import Delta, Record, Results
from engine.sampling import Logprobs
from engine.scheduler import Scheduler
from engine.segment_file import Segment
from engine.strict import CompileCounter, no_compilation

_MOST_SLEEP_S = 0.05  # between looks at whether a tenant may go on


@dataclasses.dataclass
class Scored:
    """One call of the score head: request and position of each of its rows, and its result."""

    wanted: list[tuple[Request, int]]
    logprobs: Logprobs


@dataclasses.dataclass
class Pending:
    """A dispatched step whose results are still on the device."""

    plan: Plan
    done: jax.Array  # ready when the body has run
    tokens: jax.Array | None
    logprobs: Logprobs | None
    scored: list[Scored]
    prompt_CD: jax.Array | None  # hidden rows of the chunk group, where they are wanted
    broken_B: jax.Array | None  # of the chunk group


class Engine:
    """Runs requests. `add_request`, `step` and `abort` may be mixed at will, from one thread.

    With `overlap`, a step is planned and dispatched before the previous one's tokens are read, so
    that the device never waits for the host. With a `counter`, a step that compiles anything raises
    StrictError.
    """

    def __init__(
        self,
        *,
        programs: Executables,
        store: ProgramStore,
        params: Any,
        model_config: ModelConfig,
        make_scheduler: Callable[[], Scheduler],
        ladder: Ladder,
        shape: BatchShape,
        tokenizer: Tokenizer | None,
        overlap: bool,
        mover: Mover,
        counter: CompileCounter | None = None,
    ) -> None:
        self.programs = programs
        self.params = params
        self.tokenizer = tokenizer
        self.model_config = model_config
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler()
        self._mover = mover
        self.state = programs["start"]()
        self._store = store
        self._shape = shape
        self._counter = counter
        self._lag = 1 if overlap else 0
        self._heads = {
            kind: sorted(head for head in ladder.heads() if head.kind == kind)
            for kind in (*HEADS, "score")
        }
        self._next_id = 0
        self._num_forks = 0
        self._is_closed = False
        self._last_step_s = time.monotonic()
        self._pending: collections.deque[Pending] = collections.deque()
        self._results = Results(tokenizer, model_config.width)

    def add_request(
        self, request: Request, prompt: str | None = None, *, streams: bool = True
    ) -> int:
        """Queues `request` and returns its id; raises ValueError if it can never fit.

        QueueFull, a ValueError too, if no more may wait. Without `streams`, `step` returns nothing
        of it until it is finished, which costs less.
        """
        if self._is_closed:
            raise RuntimeError("the engine is closed; make another")
        request.id = self._next_id
        self._next_id += 1
        self.scheduler.add(request)
        request.arrival_s = time.monotonic()
        self._results.open(request, prompt, streams)
        return request.id

    def fork(self, request_id: int) -> int | None:
        """Adds a request that goes on from where another is, with noise of its own.

        It has the other's prompt, parameters and tokens so far, and shares its pages. Returns its
        id, None if the other is not there any more. ValueError with deterministic=True, where a
        request that starts again draws its tokens again.
        """
        if self.scheduler.is_pinned:
            raise ValueError("deterministic=True has no forks; leave it out")
        record = self._results.get(request_id)
        if record is None:
            return None
        original, count = record.request, record.num_tokens
        self._num_forks += 1
        request = original.as_new(sample=MAX_SAMPLES + self._num_forks)
        request.output_token_ids = original.output_token_ids[:count]
        request.given_tokens = count
        if record.prompt_logprobs is not None and None not in record.prompt_logprobs[1:]:
            request.scored = len(request.prompt_token_ids)
        self.scheduler.show_tail(original)
        self.add_request(request, record.prompt, streams=record.streams)
        self._results.copy(record, request)
        return request.id

    def set_policy(self, policy: str) -> None:
        """Changes who of those that wait is tried first; ValueError if there is no such policy."""
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is not known; use one of {', '.join(POLICIES)}")
        self.scheduler.set_policy(policy)

    def abort(self, request_id: int) -> bool:
        """Ends a request at whatever stage it is; returns whether it was still running.

        The next `step` returns what it had, with the reason "abort".
        """
        record = self._results.get(request_id)
        if record is None:
            return False
        self.scheduler.abort(request_id)
        self._results.deliver(record, [])
        return True

    def is_running(self, request_id: int) -> bool:
        """Returns whether a request is waiting or running."""
        return self._results.get(request_id) is not None

    @property
    def keeps(self) -> bool:
        """Whether anything is kept of requests."""
        return self.scheduler.keeps

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do."""
        return self._results.has_work or bool(self._pending)

    def step(self) -> list[Delta]:
        """Dispatches the next step and reads the one before; returns what was read.

        If a step is interrupted or fails, what it raised is raised here, and no request is lost:
        all of them run again from the tokens they had.
        """
        if self._is_closed:
            return self._results.take()
        try:
            with no_compilation(self._counter):
                self._run_step()
        except BaseException:
            self._recover()
            raise
        return self._results.take()

    def _run_step(self) -> None:
        idle = self.scheduler.cache.tiers.is_loading and not (
            self._pending or self.scheduler.running()
        )
        self._mover.read_events(self.scheduler.cache, wait=idle)
        now = time.monotonic()
        self.scheduler.refill(now - self._last_step_s)
        self._last_step_s = now
        plan = self.scheduler.schedule()
        if plan is not None:
            self._pending.append(self._dispatch(plan))
        else:
            self.state = self._mover.run(self.state, self.scheduler.take_moves())
            if not self._pending and (wait_s := self.scheduler.wait_s()) is not None:
                time.sleep(min(wait_s, _MOST_SLEEP_S))
        while len(self._pending) > (self._lag if plan is not None else 0):
            self._read(self._pending.popleft())
        for request in self.scheduler.drain():
            if record := self._results.get(request.id):
                self._results.deliver(record, [])

    def _recover(self) -> None:
        """Starts anew from what the host knows: a donated state may be lost with its step."""
        self._pending.clear()
        self.state = self.programs["start"]()
        before, self.scheduler = self.scheduler, self._make_scheduler()
        self.scheduler.carry_on(before)
        for record in self._results.records():
            record.request.restart(record.num_tokens)
            del record.request.token_times[record.num_tokens :]
            self.scheduler.add(record.request, was_here=True)

    def close(self) -> None:
        """Has all that is kept of requests written to disk, if there is such a tier, and ends it.

        What still runs is aborted: `step` returns that, and runs nothing any more.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for record in self._results.records():
            self.abort(record.request.id)
        self._pending.clear()
        if self._mover.disk is not None:
            self.scheduler.cache.tiers.flush()
            self.state = self._mover.run(self.state, self.scheduler.take_moves(), waits=True)
        self._mover.close()

    def clear_cache(self, spaces: Iterable[Hashable] | None = None) -> None:
        """Lets go of all pages that are only kept, or of those in some of the cache's spaces."""
        self.scheduler.cache.clear(spaces)
        self.state = self._mover.run(self.state, self.scheduler.take_moves())
        if spaces is None:
            self._mover.free_slots()

    def write_cache(self, disk: DiskCache) -> int:
        """Has all that is on the device and the host written; returns how many segments."""
        saves = list(self.scheduler.cache.tiers.saves())
        for save in saves:
            disk.save(save, self._mover.pages(self.state, save), waits=True)
        return len(saves)

    def read_segment(self, disk: DiskCache, segment: Segment) -> bool:
        """Puts a segment's pages on the device; returns whether there was room and they are whole.

        What is before them has to be there.
        """
        pages = disk.read(segment)
        if pages is None:
            return False
        numbers = self.scheduler.cache.tiers.add_saved(DEVICE, *segment.run)
        if numbers is None:
            return False
        self.state = self._mover.put(self.state, numbers, pages)
        return True

    def stats(self) -> dict[str, Any]:
        """Returns counts (pages by group, requests, preemptions, steps, programs), and `program_s`:
        the seconds that each program that is there took to compile or load, by name.
        """
        return {
            **self.scheduler.stats(),
            "programs": len(self.programs),
            "programs_compiled": self._store.compiled,
            "programs_loaded": self._store.loaded,
            "program_s": dict(self.programs.seconds),
        }

    # Dispatch

    def _dispatch(self, plan: Plan) -> Pending:
        now = time.monotonic()
        self.state = self._mover.run(self.state, plan.moves)
        for piece in plan.pieces:
            if piece.request.first_scheduled_s is None:
                piece.request.first_scheduled_s = now
            if piece.fresh and piece.request.params.changes_logits:
                tables = pack_tables(piece.request, self.model_config.vocab_size)
                self.state = self.programs["row"](self.state, tables)
        packed = pack(plan, self._shape, self.scheduler.tables, self.scheduler.lengths)
        if plan.repeat > 1:
            program = self.programs[Repeat(plan.body)]
            self.state, tokens = program(self.params, self.state, packed)
            tokens.copy_to_host_async()
            return Pending(plan, tokens, tokens, None, [], None, None)
        body = self.programs[plan.body]
        self.state, hidden = body(self.params, self.state, packed)
        scored = self._score(plan, hidden.prompt_CD)
        wanted = any(piece.request.wants_hidden for piece in plan.pieces)
        prompt_CD = hidden.prompt_CD if wanted else None
        broken_B = hidden.broken_B
        if broken_B is not None:
            broken_B.copy_to_host_async()
        if not plan.sampled:
            return Pending(plan, hidden.row_S, None, None, scored, prompt_CD, broken_B)
        head = self.programs[self._head(plan)]
        hidden = hidden._replace(prompt_CD=None, broken_B=None)
        self.state, (tokens, logprobs) = head(self._head_params(), self.state, hidden)
        tokens.copy_to_host_async()
        return Pending(plan, hidden.row_S, tokens, logprobs, scored, prompt_CD, broken_B)

    def _head(self, plan: Plan) -> Head:
        kind = HEADS[max([request.head for request in plan.sampled])]
        return next(head for head in self._heads[kind] if head.rows >= len(plan.sampled))

    def _score(self, plan: Plan, prompt_CD: jax.Array | None) -> list[Scored]:
        """Dispatches the score head over the prompt positions that the plan wants."""
        width = plan.body[0].width
        wanted = [
            (piece.request, position, index * width + position - piece.start)
            for index, piece in enumerate(plan.pieces)
            if piece.scores is not None
            for position in range(*piece.scores)
        ]
        head = self._heads["score"][0]
        calls = []
        for first in range(0, len(wanted), head.rows):
            part = wanted[first : first + head.rows]
            rows = np.zeros((2, head.rows), np.int32)
            for index, (request, position, hidden_row) in enumerate(part):
                rows[:, index] = hidden_row, request.prompt_token_ids[position + 1]
            logprobs = self.programs[head](self._head_params(), prompt_CD, rows)
            calls.append(Scored([(request, position) for request, position, _ in part], logprobs))
        return calls

    def _head_params(self) -> Params:
        return head_parameters(self.params, self.model_config)

    # Reading

    def _read(self, pending: Pending) -> None:
        plan = pending.plan
        # A step without tokens is waited for too: the host is never further ahead than one step.
        jax.block_until_ready(pending.done)
        steps: list[list[int]] = [[]]
        if pending.tokens is not None:
            tokens_XB = np.atleast_2d(np.asarray(pending.tokens))
            steps = tokens_XB[:, : len(plan.sampled)].tolist()
        self._read_scores(pending.scored)
        self._read_hidden(pending)
        logprobs = None if pending.logprobs is None else jax.device_get(pending.logprobs)
        broken: list[int] = []
        if pending.broken_B is not None:
            broken = np.flatnonzero(np.asarray(pending.broken_B)[: len(plan.pieces)]).tolist()
        now = time.monotonic()
        for tokens in steps:
            self._read_tokens(plan, tokens, broken, logprobs, now)

    def _read_tokens(
        self,
        plan: Plan,
        tokens: list[int],
        broken: list[int],
        logprobs: Logprobs | None,
        now: float,
    ) -> None:
        """Delivers one token of each sampled row, and what ended."""
        results, record_of = self._results, self._results.get
        for request, place in self.scheduler.update(plan, tokens, broken):
            record = record_of(request.id)
            assert record is not None, "the scheduler has ended it"
            # A token drawn again after a preemption was delivered before it.
            if place is not None and len(request.output_token_ids) > record.num_tokens:
                request.token_times.append(now)
                if record.is_quiet and request.finish_reason is None:
                    record.num_tokens += 1  # all that `deliver` would do
                    continue
                entry = None
                if record.logprobs is not None and logprobs is not None:
                    entry = results.entry(logprobs, place, tokens[place], request.params.logprobs)
                if results.deliver(record, [tokens[place]], entry):
                    self.scheduler.finish(request, "stop", request.stop_reason)
            elif request.finish_reason is not None:
                results.deliver(record, [])

    def _read_scores(self, scored: list[Scored]) -> None:
        for call in scored:
            logprobs = jax.device_get(call.logprobs)
            values, best = logprobs.logprob_B.tolist(), logprobs.top_id_BC[:, 0].tolist()
            for index, (request, position) in enumerate(call.wanted):
                record = self._results.get(request.id)
                if record is None:
                    continue
                token = request.prompt_token_ids[position + 1]
                if record.prompt_logprobs is not None:
                    count = request.params.prompt_logprobs
                    entry = self._results.entry(logprobs, index, token, count)
                    record.prompt_logprobs[position + 1] = entry
                else:
                    record.scores[position] = ScoredToken(values[index], best[index] == token)
                if math.isnan(values[index]):
                    self._fail(record)

    def _read_hidden(self, pending: Pending) -> None:
        """Keeps the hidden rows of the prompts that want theirs."""
        if pending.prompt_CD is None:
            return
        hidden_CD = np.asarray(pending.prompt_CD, np.float32)
        width = pending.plan.body[0].width
        for index, piece in enumerate(pending.plan.pieces):
            record = self._results.get(piece.request.id)
            if record is None or record.hidden_TD is None:
                continue
            count = piece.stop - piece.start
            rows_TD = hidden_CD[index * width : index * width + count]
            record.hidden_TD[piece.start : piece.stop] = rows_TD
            if not np.isfinite(rows_TD).all():
                self._fail(record)

    def _fail(self, record: Record) -> None:
        """Ends a request whose numbers are not finite."""
        self.scheduler.finish(record.request, "error", NOT_FINITE)
        self._results.deliver(record, [])

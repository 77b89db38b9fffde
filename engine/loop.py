# SPDX-License-Identifier: Apache-2.0
"""The engine loop: plan a step, dispatch it, and read the one before it."""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from checkpoints.tokenizer import Tokenizer
from engine.batch import BatchShape, no_tables, pack, pack_tables
from engine.buckets import Group, Head, Ladder
from engine.config import POLICIES
from engine.disk_cache import DiskCache
from engine.moves import DEVICE
from engine.params import HEADS, MAX_SAMPLES, NOT_FINITE
from engine.partitions import Partitions, Step
from engine.plan import Piece, Plan
from engine.program_store import ProgramStore
from engine.rebalance import Balancer
from engine.request import Request, ScoredToken
from engine.results import Delta, Record, Results
from engine.sampling import Logprobs
from engine.scheduler import Scheduler
from engine.segment_file import Segment
from engine.strict import CompileCounter, no_compilation
from engine.worker import Made, Work, Worker
from sharding.processes import LostProcess, lost

_MOST_SLEEP_S = 0.05  # between looks at whether a tenant may go on


@dataclasses.dataclass
class Pending:
    """A dispatched step whose results are still on the devices.

    scored: of each call of the score head, request, position and row of what is wanted.
    """

    step: Step
    made: Made
    scored: list[list[tuple[Request, int, int]]]


class Engine:
    """Runs requests. `add_request`, `step` and `abort` may be mixed at will, from one thread.

    With `overlap`, a step is planned and dispatched before the previous one's tokens are read, so
    that the device never waits for the host. With a `counter`, a step that compiles anything raises
    StrictError. One that `follows` another process takes no requests: its worker is told all.
    """

    def __init__(
        self,
        *,
        worker: Worker,
        store: ProgramStore,
        make_schedulers: Callable[[], Sequence[Scheduler]],
        ladder: Ladder,
        shape: BatchShape,
        tokenizer: Tokenizer | None,
        overlap: bool,
        counter: CompileCounter | None = None,
        balancer: Balancer | None = None,
        follows: bool = False,
    ) -> None:
        self.worker = worker
        self._follows = follows
        self._balancer = balancer
        self._dispatched = 0
        self.tokenizer = tokenizer
        self._make_partitions = lambda: Partitions(make_schedulers(), ladder)
        self._set_partitions(self._make_partitions())
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
        self._results = Results(tokenizer, worker.model_config.width)

    def _set_partitions(self, partitions: Partitions) -> None:
        self.partitions = partitions
        # Each partition's scheduler, and who carries its pages.
        self._cared = list(zip(partitions.parts, self.worker.movers, strict=True))

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the first partition, which is the only one unless rows are sharded."""
        return self.partitions.parts[0]

    def add_request(
        self, request: Request, prompt: str | None = None, *, streams: bool = True
    ) -> int:
        """Queues `request` and returns its id; raises ValueError if it can never fit.

        QueueFull, a ValueError too, if no more may wait. Without `streams`, `step` returns nothing
        of it until it is finished, which costs less.
        """
        self._check_open()
        self._queue(request, prompt, streams)
        return request.id

    def _check_open(self) -> None:
        if self._follows:
            raise RuntimeError("this process follows another, which takes the requests; follow it")
        if self._is_closed:
            raise RuntimeError("the engine is closed; make another")

    def _queue(
        self,
        request: Request,
        prompt: str | None,
        streams: bool,
        beside: Request | None = None,
    ) -> None:
        request.id = self._next_id
        self._next_id += 1
        self.partitions.add(request, beside=beside)
        request.arrival_s = time.monotonic()
        self._results.open(request, prompt, streams)

    def fork(self, request_id: int) -> int | None:
        """Adds a request that goes on from where another is, with noise of its own.

        It has the other's prompt, parameters and tokens so far, and shares its pages. Returns its
        id, None if the other is not there any more. ValueError with deterministic=True, where a
        request that starts again draws its tokens again.
        """
        self._check_open()
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
        self.partitions.home(original).show_tail(original)
        self._queue(request, record.prompt, record.streams, beside=original)
        self._results.copy(record, request)
        return request.id

    def set_policy(self, policy: str) -> None:
        """Changes who of those that wait is tried first; ValueError if there is no such policy."""
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is not known; use one of {', '.join(POLICIES)}")
        for part in self.partitions.parts:
            part.set_policy(policy)

    def abort(self, request_id: int) -> bool:
        """Ends a request at whatever stage it is; returns whether it was still running.

        The next `step` returns what it had, with the reason "abort".
        """
        record = self._results.get(request_id)
        if record is None:
            return False
        self.partitions.finish(record.request, "abort")
        self._deliver(record, [])
        return True

    def is_running(self, request_id: int) -> bool:
        """Returns whether a request is waiting or running."""
        return self._results.get(request_id) is not None

    @property
    def is_shared(self) -> bool:
        """Whether other processes have devices of this engine."""
        return self._follows or self.worker.others is not None

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
        all of them run again from the tokens they had. LostProcess, where other processes have
        devices of this engine, ends it.
        """
        if self._is_closed:
            return self._results.take()
        try:
            with no_compilation(self._counter):
                self._run_step()
        except BaseException as error:
            self._recover_from(error)
            raise
        return self._results.take()

    def _recover_from(self, error: BaseException) -> None:
        """Starts anew after an error; raises LostProcess where that cannot be."""
        others = self.worker.others
        if others is not None and isinstance(error, LostProcess | jax.errors.JaxRuntimeError):
            self._is_closed = True
            others.give_up(str(error))
            if not isinstance(error, LostProcess):
                raise lost(error) from error
        elif not self.worker.is_whole:
            self._is_closed = True
            raise RuntimeError("it ended while experts moved, which are lost; make another engine")
        else:
            self._recover()

    def _run_step(self) -> None:
        parts = self.partitions.parts
        idle = not self._pending and not any(part.running() for part in parts)
        for part, mover in self._cared:
            mover.read_events(part.cache, wait=idle and part.cache.tiers.is_loading)
        now = time.monotonic()
        self.scheduler.refill(now - self._last_step_s)  # tenants are those of all partitions
        self._last_step_s = now
        step = self.partitions.schedule()
        if step is not None:
            self._pending.append(self._dispatch(step))
        else:
            self._move()
            waits = [wait for part in parts if (wait := part.wait_s()) is not None]
            if not self._pending and waits:
                time.sleep(min(*waits, _MOST_SLEEP_S))
        while len(self._pending) > (self._lag if step is not None else 0):
            self._read(self._pending.popleft())
        for part in parts:
            for request in part.drain():
                if record := self._results.get(request.id):
                    self._deliver(record, [])

    def _move(self) -> None:
        """Moves pages as the schedulers want it though no step is planned."""
        moves = tuple(part.take_moves() for part in self.partitions.parts)
        if any(moves):
            self.worker.run(Work(moves))

    def _deliver(self, record: Record, tokens: list[int], entry: Any = None) -> bool:
        """Gives a request's tokens to its results; returns whether a text ended it."""
        ends = self._results.deliver(record, tokens, entry)
        if record.request.finish_reason is not None:
            self.partitions.forget(record.request)
        return ends

    def _recover(self) -> None:
        """Starts anew from what the host knows: a donated state may be lost with its step."""
        self._pending.clear()
        self.worker.restart()
        if self._balancer is not None:  # it may not have heard of what was placed last
            for index, (_, *place) in enumerate(self._balancer.layers):
                self._balancer.expert_LS[index] = self.worker.placement(*place)
        before = self.partitions
        self._set_partitions(self._make_partitions())
        self.partitions.carry_on(before)
        for record in self._results.records():
            record.request.restart(record.num_tokens)
            del record.request.token_times[record.num_tokens :]
            self.partitions.add(record.request, was_here=True)

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
        worker = self.worker
        for part, mover in self._cared:
            if mover.disk is not None:
                part.cache.tiers.flush()
                worker.state = mover.run(worker.state, part.take_moves(), waits=True)
            mover.close()
        if worker.others is not None:
            worker.others.end()

    def clear_cache(self, spaces: Iterable[Hashable] | None = None) -> None:
        """Lets go of all pages that are only kept, or of those in some of the cache's spaces."""
        for part in self.partitions.parts:
            part.cache.clear(spaces)
        self._move()
        if spaces is None:
            self.worker.free_slots()

    def write_cache(self, disk: DiskCache) -> int:
        """Has all that is on the device and the host written; returns how many segments."""
        count = 0
        for part, mover in self._cared:
            for save in list(part.cache.tiers.saves()):
                disk.save(save, mover.pages(self.worker.state, save), waits=True)
                count += 1
        return count

    def read_segment(self, disk: DiskCache, segment: Segment) -> bool:
        """Puts a segment's pages on the device; returns whether there was room and they are whole.

        What is before them has to be there; they go to the first partition that has it, and room.
        """
        pages = disk.read(segment)
        if pages is None:
            return False
        for part, mover in self._cared:
            numbers = part.cache.tiers.add_saved(DEVICE, *segment.run)
            if numbers is not None:
                self.worker.state = mover.put(self.worker.state, numbers, pages)
                return True
        return False

    def stats(self) -> dict[str, Any]:
        """Returns counts (pages by group, requests, preemptions, steps, programs), and `program_s`:
        the seconds that each program that is there took to compile or load, by name.
        """
        programs = self.worker.programs
        return {
            **self.partitions.stats(),
            "programs": len(programs),
            "programs_compiled": self._store.compiled,
            "programs_loaded": self._store.loaded,
            "program_s": dict(programs.seconds),
            **({} if self._balancer is None else {"experts": self._balancer.stats()}),
        }

    # Dispatch

    def _dispatch(self, step: Step) -> Pending:
        now = time.monotonic()
        parts = self.partitions.parts
        work = Work(
            tuple(
                part.take_moves() if plan is None else plan.moves
                for part, plan in zip(parts, step.plans, strict=True)
            ),
            body=step.body,
            packed=self._pack(step),
            repeats=step.repeat > 1,
            head=self._head(step),
        )
        scored: list[list[tuple[Request, int, int]]] = []
        if step.body[0].kind != "decode":
            scored, scores = self._scores(step)
            work = work._replace(
                tables=self._open_rows(step, now),
                score_head=self._heads["score"][0],
                scores=scores,
                shows_prompt=any(
                    piece.request.wants_hidden for _, plan in step.some for piece in plan.pieces
                ),
            )
        if self._balancer is not None:
            self._dispatched += 1
            self._place_experts(self._balancer, work)
            work = work._replace(looks=self._balancer.looks(self._dispatched))
        made = self.worker.run(work)
        assert made is not None, "the step has a body"
        for array in (made.broken_B, made.tokens):
            if array is not None:
                array.copy_to_host_async()
        return Pending(step, made, scored)

    def _place_experts(self, balancer: Balancer, work: Work) -> None:
        """Has the experts of a layer moved, if one gains by it."""
        place = balancer.next()
        if place is not None:
            self.worker.run(Work(tuple(() for _ in work.moves), place=place))
            balancer.commit()

    def _open_rows(self, step: Step, now: float) -> list[np.ndarray]:
        """Notes who runs for the first time; returns the tables of rows that want any."""
        opened: list[list[Request]] = [[] for _ in step.plans]
        for p, plan in step.some:
            for piece in plan.pieces:
                if piece.request.first_scheduled_s is None:
                    piece.request.first_scheduled_s = now
                if piece.fresh and piece.request.params.changes_logits:
                    opened[p].append(piece.request)
        vocabulary, rows = self.worker.model_config.vocab_size, self._shape.num_rows

        def table(request: Request | None) -> np.ndarray:
            return (
                no_tables(vocabulary, rows) if request is None else pack_tables(request, vocabulary)
            )

        return [
            np.concatenate([table(request) for request in requests])
            for requests in itertools.zip_longest(*opened)
        ]

    def _pack(self, step: Step) -> np.ndarray:
        """Returns the packed array of all partitions, one after the other."""
        parts = [
            pack(plan, step.body, self._shape, part.tables, part.lengths)
            for part, plan in zip(self.partitions.parts, step.plans, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _head(self, step: Step) -> Head | None:
        """Returns the head of the rows that are sampled, if there are any and no repeat has it."""
        plans = [plan for _, plan in step.some]
        most = max(len(plan.sampled) for plan in plans)
        if not most or step.repeat > 1:
            return None
        kind = HEADS[max(request.head for plan in plans for request in plan.sampled)]
        return next(head for head in self._heads[kind] if head.rows >= most)

    def _scores(self, step: Step) -> tuple[list[list[tuple[Request, int, int]]], list[np.ndarray]]:
        """Returns what the score head is asked of the prompt positions that the plans want.

        By call: request, position and row of each, and the array that asks.
        """
        group = step.body[0]
        head = self._heads["score"][0]
        parts = len(step.plans)
        wanted: list[list[tuple[Request, int, int]]] = [[] for _ in step.plans]
        for p, plan in step.some:
            wanted[p] = [
                (piece.request, position, self._row_of(group, index, piece) + position)
                for index, piece in enumerate(plan.pieces)
                if piece.scores is not None
                for position in range(*piece.scores)
            ]
        scored, calls = [], []
        for first in range(0, max(len(each) for each in wanted), head.rows):
            rows = np.zeros((2, parts * head.rows), np.int32)
            asked = []
            for p, each in enumerate(wanted):
                part = each[first : first + head.rows]
                for index, (request, position, hidden_row) in enumerate(part, p * head.rows):
                    rows[:, index] = hidden_row, request.prompt_token_ids[position + 1]
                    asked.append((request, position, index))
            scored.append(asked)
            calls.append(rows)
        return scored, calls

    def _row_of(self, group: Group, index: int, piece: Piece) -> int:
        """Returns the row among the prompt's hidden ones that token 0 of a piece's request had."""
        return index * group.width + self._shape.offset(group, piece.start) - piece.start

    # Reading

    def _read(self, pending: Pending) -> None:
        step, made = pending.step, pending.made
        # A step without tokens is waited for too: the host is never further ahead than one step.
        jax.block_until_ready(made.done)
        if made.load_LE is not None and self._balancer is not None:
            self._balancer.add(np.asarray(made.load_LE))
        parts = len(step.plans)
        tokens_XPB = np.zeros((1, parts, 0), np.int32)
        if made.tokens is not None:
            tokens_XB = np.atleast_2d(np.asarray(made.tokens))
            tokens_XPB = tokens_XB.reshape(len(tokens_XB), parts, -1)
        for wanted, scores in zip(pending.scored, made.scores, strict=True):
            self._read_scores(wanted, scores)
        if made.prompt_CD is not None:
            self._read_hidden(step, np.asarray(made.prompt_CD, np.float32))
        logprobs = None if made.logprobs is None else jax.device_get(made.logprobs)
        broken_PB = np.zeros((parts, 0), bool)
        if made.broken_B is not None:
            broken_PB = np.asarray(made.broken_B).reshape(parts, -1)
        now, rows = time.monotonic(), tokens_XPB.shape[2]
        for p, plan in step.some:
            broken = np.flatnonzero(broken_PB[p, : len(plan.pieces)]).tolist()
            part = self.partitions.parts[p]
            for tokens in tokens_XPB[:, p, : len(plan.sampled)].tolist():
                self._read_tokens(part, plan, tokens, broken, logprobs, p * rows, now)

    def _read_tokens(
        self,
        part: Scheduler,
        plan: Plan,
        tokens: list[int],
        broken: list[int],
        logprobs: Logprobs | None,
        first: int,
        now: float,
    ) -> None:
        """Delivers one token of each sampled row of a partition, and what ended.

        `first`: its first row of the log-probabilities.
        """
        results, record_of = self._results, self._results.get
        for request, place in part.update(plan, tokens, broken):
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
                    count = request.params.logprobs
                    entry = results.entry(logprobs, first + place, tokens[place], count)
                if self._deliver(record, [tokens[place]], entry):
                    part.finish(request, "stop", request.stop_reason)
                    self.partitions.forget(request)
            elif request.finish_reason is not None:
                self._deliver(record, [])

    def _read_scores(self, wanted: list[tuple[Request, int, int]], scores: Logprobs) -> None:
        """Keeps what a call of the score head says of the positions that were wanted."""
        scores = jax.device_get(scores)
        values, best = scores.logprob_B.tolist(), scores.top_id_BC[:, 0].tolist()
        for request, position, index in wanted:
            record = self._results.get(request.id)
            if record is None:
                continue
            token = request.prompt_token_ids[position + 1]
            if record.prompt_logprobs is not None:
                count = request.params.prompt_logprobs
                entry = self._results.entry(scores, index, token, count)
                record.prompt_logprobs[position + 1] = entry
            else:
                record.scores[position] = ScoredToken(values[index], best[index] == token)
            if math.isnan(values[index]):
                self._fail(record)

    def _read_hidden(self, step: Step, hidden_CD: np.ndarray) -> None:
        """Keeps the hidden rows of the prompts that want theirs."""
        group = step.body[0]
        rows = len(hidden_CD) // len(step.plans)
        pieces = ((p, *each) for p, plan in step.some for each in enumerate(plan.pieces))
        for p, index, piece in pieces:
            record = self._results.get(piece.request.id)
            if record is None or record.hidden_TD is None:
                continue
            first = p * rows + self._row_of(group, index, piece)
            rows_TD = hidden_CD[first + piece.start : first + piece.stop]
            record.hidden_TD[piece.start : piece.stop] = rows_TD
            if not np.isfinite(rows_TD).all():
                self._fail(record)

    def _fail(self, record: Record) -> None:
        """Ends a request whose numbers are not finite."""
        self.partitions.finish(record.request, "error", NOT_FINITE)
        self._deliver(record, [])

# SPDX-License-Identifier: Apache-2.0
"""The engine loop: plan a step, dispatch it, and read the one before it."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from checkpoints.tokenizer import Tokenizer
from engine.batch import BatchShape, pack, pack_tables
from engine.buckets import Head, Ladder, Repeat
from engine.layers import Params
from engine.metrics import request_metrics
from engine.models.config import ModelConfig
from engine.models.decoder import head_parameters
from engine.params import HEADS, NOT_FINITE
from engine.plan import Plan
from engine.program_store import Executables, ProgramStore
from engine.request import CompletionOutput, Logprob, Request, RequestOutput
from engine.sampling import Logprobs
from engine.scheduler import Scheduler
from engine.strict import CompileCounter, no_compilation
from engine.text import OutputText


@dataclasses.dataclass
class Delta:
    """What a step added to one output. `output` is the whole result, once it is finished."""

    request_id: int
    index: int  # of the outputs of one prompt
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    output: RequestOutput | None


@dataclasses.dataclass
class Record:
    """What the host keeps of a request beside the scheduler's part, until it is finished."""

    request: Request
    prompt: str | None
    text: OutputText | None
    logprobs: list[dict[int, Logprob]] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    hidden_TD: np.ndarray | None  # of the prompt, as far as it was read
    num_tokens: int = 0  # output tokens delivered


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
        counter: CompileCounter | None = None,
    ) -> None:
        self.programs = programs
        self.params = params
        self.tokenizer = tokenizer
        self._model_config = model_config
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler()
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
        self._records: dict[int, Record] = {}
        self._pending: collections.deque[Pending] = collections.deque()
        self._ready: list[Delta] = []  # read, and not returned yet
        self._decoded = token_decoder(tokenizer)

    def add_request(self, request: Request, prompt: str | None = None) -> int:
        """Queues `request` and returns its id; raises ValueError if it can never fit."""
        request.id = self._next_id
        self._next_id += 1
        self.scheduler.add(request)
        request.arrival_s = time.monotonic()
        params = request.params
        length, width = len(request.prompt_token_ids), self._model_config.width
        self._records[request.id] = Record(
            request,
            prompt,
            OutputText(self.tokenizer, params) if self.tokenizer else None,
            None if params.logprobs is None else [],
            None if params.prompt_logprobs is None else [None] * length,
            np.full((length, width), np.nan, np.float32) if request.wants_hidden else None,
        )
        return request.id

    def abort(self, request_id: int) -> bool:
        """Ends a request at whatever stage it is; returns whether it was still running.

        The next `step` returns what it had, with the reason "abort".
        """
        record = self._records.get(request_id)
        if record is None:
            return False
        self.scheduler.abort(request_id)
        self._deliver(record, [], None)
        return True

    def is_running(self, request_id: int) -> bool:
        """Returns whether a request is waiting or running."""
        return request_id in self._records

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do."""
        return bool(self._records or self._ready or self._pending)

    def step(self) -> list[Delta]:
        """Dispatches the next step and reads the one before; returns what was read.

        If a step is interrupted or fails, what it raised is raised here, and no request is lost:
        all of them run again from the tokens they had.
        """
        try:
            with no_compilation(self._counter):
                self._run_step()
        except BaseException:
            self._recover()
            raise
        deltas, self._ready = self._ready, []
        return deltas

    def _run_step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self._pending.append(self._dispatch(plan))
        while len(self._pending) > (self._lag if plan is not None else 0):
            self._read(self._pending.popleft())
        for request in self.scheduler.drain():
            if request.id in self._records:
                self._deliver(self._records[request.id], [], None)

    def _recover(self) -> None:
        """Starts anew from what the host knows: a donated state may be lost with its step."""
        self._pending.clear()
        self.state = self.programs["start"]()
        self.scheduler = self._make_scheduler()
        for record in self._records.values():
            record.request.restart(record.num_tokens)
            del record.request.token_times[record.num_tokens :]
            self.scheduler.add(record.request)

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
        for piece in plan.pieces:
            if piece.request.first_scheduled_s is None:
                piece.request.first_scheduled_s = now
            if piece.fresh and piece.request.params.changes_logits:
                tables = pack_tables(piece.request, self._model_config.vocab_size)
                self.state = self.programs["row"](self.state, tables)
        packed = pack(plan, self._shape, self.scheduler.tables, self.scheduler.lengths)
        if plan.repeat > 1:
            program = self.programs[Repeat(plan.body)]
            self.state, tokens = program(self.params, self.state, packed)
            tokens.copy_to_host_async()
            return Pending(plan, tokens, tokens, None, [], None)
        body = self.programs[plan.body]
        self.state, hidden = body(self.params, self.state, packed)
        scored = self._score(plan, hidden.prompt_CD)
        wanted = any(piece.request.wants_hidden for piece in plan.pieces)
        prompt_CD = hidden.prompt_CD if wanted else None
        if not plan.sampled:
            return Pending(plan, hidden.row_S, None, None, scored, prompt_CD)
        head = self.programs[self._head(plan)]
        hidden = hidden._replace(prompt_CD=None)
        self.state, (tokens, logprobs) = head(self._head_params(), self.state, hidden)
        tokens.copy_to_host_async()
        return Pending(plan, hidden.row_S, tokens, logprobs, scored, prompt_CD)

    def _head(self, plan: Plan) -> Head:
        kind = HEADS[max(request.head for request, _ in plan.sampled)]
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
        return head_parameters(self.params, self._model_config)

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
        logprobs = jax.device_get(pending.logprobs)
        now = time.monotonic()
        for tokens in steps:
            self._read_tokens(plan, tokens, logprobs, now)

    def _read_tokens(
        self, plan: Plan, tokens: list[int], logprobs: Logprobs | None, now: float
    ) -> None:
        """Delivers one token of each sampled row, and what ended."""
        before = [len(request.output_token_ids) for request, _ in plan.sampled]
        progressed = self.scheduler.update(plan, tokens)
        for index, (request, _) in enumerate(plan.sampled):
            record = self._records.get(request.id)
            if record is None or len(request.output_token_ids) == before[index]:
                continue  # an overrun of a request that ended while this step ran
            if len(request.output_token_ids) <= record.num_tokens:
                continue  # drawn again after a preemption, and delivered before it
            request.token_times.append(now)
            entry = None
            if record.logprobs is not None and logprobs is not None:
                entry = self._entry(logprobs, index, tokens[index], request.params.logprobs)
            self._deliver(record, [tokens[index]], entry)
        for request in progressed:
            if request.finish_reason and request.id in self._records:
                self._deliver(self._records[request.id], [], None)

    def _read_scores(self, scored: list[Scored]) -> None:
        for call in scored:
            logprobs = jax.device_get(call.logprobs)
            for index, (request, position) in enumerate(call.wanted):
                record = self._records.get(request.id)
                if record is None or record.prompt_logprobs is None:
                    continue
                token = request.prompt_token_ids[position + 1]
                count = request.params.prompt_logprobs
                record.prompt_logprobs[position + 1] = self._entry(logprobs, index, token, count)
                if math.isnan(logprobs.logprob_B[index]):
                    self._fail(record)

    def _read_hidden(self, pending: Pending) -> None:
        """Keeps the hidden rows of the prompts that want theirs."""
        if pending.prompt_CD is None:
            return
        hidden_CD = np.asarray(pending.prompt_CD, np.float32)
        width = pending.plan.body[0].width
        for index, piece in enumerate(pending.plan.pieces):
            record = self._records.get(piece.request.id)
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
        self._deliver(record, [], None)

    def _entry(
        self, logprobs: Logprobs, index: int, token: int, count: int | None
    ) -> dict[int, Logprob]:
        """Returns one position's log-probabilities: the token's own, and the `count` top ones."""
        rank = int(logprobs.rank_B[index])
        entry = {token: Logprob(float(logprobs.logprob_B[index]), rank, self._decoded(token))}
        ids = logprobs.top_id_BC[index, : count or 0].tolist()
        values = logprobs.top_logprob_BC[index, : count or 0].tolist()
        for place, (top, value) in enumerate(zip(ids, values, strict=True)):
            if value > -math.inf:  # else there are not so many that can be sampled
                entry.setdefault(top, Logprob(value, place + 1, self._decoded(top)))
        return entry

    def _deliver(self, record: Record, tokens: list[int], entry: dict[int, Logprob] | None) -> None:
        """Makes ready what the tokens add to a request; a finished one leaves the records."""
        request = record.request
        if entry is not None and record.logprobs is not None:
            record.logprobs.append(entry)
        text = self._add_text(record, tokens) if record.text is not None else ""
        record.num_tokens += len(tokens)
        output = None
        if request.finish_reason is not None:
            request.finished_s = time.monotonic()
            del self._records[request.id]
            output = self._output(record)
        entries = None if entry is None else [entry]
        reason = request.finish_reason
        delta = Delta(request.id, request.sample, text, tokens, entries, reason, output)
        self._ready.append(delta)

    def _add_text(self, record: Record, tokens: list[int]) -> str:
        """Returns what the tokens add to the text; ends the request where they complete a stop."""
        request, text = record.request, record.text
        assert text is not None
        ended = request.finish_reason == "stop"  # by its last token, which is no text
        hidden = ended and not request.params.include_stop_str_in_output
        new = "".join(text.push(token) for token in (tokens[:-1] if hidden else tokens))
        if request.finish_reason is not None and text.stop is None:
            new += text.finish()
        if text.stop is not None:
            if request.finish_reason is None:
                self.scheduler.finish(request, "stop", text.stop)
            request.finish_reason, request.stop_reason = "stop", text.stop
            del request.output_token_ids[text.num_tokens :]
            if record.logprobs is not None:
                del record.logprobs[text.num_tokens :]
        return new

    def _output(self, record: Record) -> RequestOutput:
        request = record.request
        completion = CompletionOutput(
            index=request.sample,
            text=record.text.text if record.text else "",
            token_ids=list(request.output_token_ids),
            logprobs=record.logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.id,
            prompt=record.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=record.prompt_logprobs,
            outputs=[completion],
            metrics=request_metrics(request),
            finished=True,
            seed=request.seed,
            hidden_states=record.hidden_TD,
        )


def token_decoder(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """Returns a function from an id to its text, which remembers; all empty without a tokenizer."""

    @lru_cache(maxsize=65536)
    def decoded(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False) if tokenizer else ""

    return decoded

# SPDX-License-Identifier: Apache-2.0
"""The engine loop: plan a step, dispatch it, and read the one before it."""

import collections
import dataclasses
import time
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from checkpoints.tokenizer import Tokenizer
from engine.batch import BatchShape, pack
from engine.buckets import Head, Ladder
from engine.detokenize import Detokenizer
from engine.metrics import request_metrics
from engine.plan import Piece, Plan
from engine.program_store import Executables, ProgramStore
from engine.request import CompletionOutput, Logprob, Request, RequestOutput
from engine.sampling import Logprobs
from engine.scheduler import Scheduler


@dataclasses.dataclass
class Delta:
    """What a step added to one request. `output` is the whole result, once it is finished."""

    request_id: int
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
    detokenizer: Detokenizer | None
    logprobs: list[dict[int, Logprob]] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None


@dataclasses.dataclass
class Scored:
    """One call of the score head: request and position of each of its rows, and its result."""

    wanted: list[tuple[Request, int]]
    logprobs: Logprobs


@dataclasses.dataclass
class Pending:
    """A dispatched step whose results are still on the device."""

    plan: Plan
    tokens: jax.Array | None
    logprobs: Logprobs | None
    scored: list[Scored]


class Engine:
    """Runs requests. `add_request`, `step` and `abort` may be mixed at will, from one thread.

    With `overlap`, a step is planned and dispatched before the previous one's tokens are read,
    so that the device never waits for the host.
    """

    def __init__(
        self,
        *,
        programs: Executables,
        store: ProgramStore,
        params: Any,
        scheduler: Scheduler,
        ladder: Ladder,
        shape: BatchShape,
        tokenizer: Tokenizer | None,
        overlap: bool,
    ) -> None:
        self.programs = programs
        self.params = params
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.state = programs["start"]()
        self._store = store
        self._shape = shape
        self._lag = 1 if overlap else 0
        self._heads = {
            kind: sorted(head for head in ladder.heads() if head.kind == kind)
            for kind in ("greedy", "sample", "logprobs", "score")
        }
        self._records: dict[int, Record] = {}
        self._pending: collections.deque[Pending] = collections.deque()
        self._ended: list[Delta] = []
        self.decoded = lru_cache(maxsize=65536)(self._decode_token)

    def add_request(self, request: Request, prompt: str | None = None) -> int:
        """Queues `request` and returns its id; raises ValueError if it can never fit."""
        self.scheduler.add(request)
        request.arrival_s = time.monotonic()
        params = request.params
        length = len(request.prompt_token_ids)
        self._records[request.id] = Record(
            request,
            prompt,
            Detokenizer(self.tokenizer) if self.tokenizer else None,
            None if params.logprobs is None else [],
            None if params.prompt_logprobs is None else [None] * length,
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
        self._ended.append(self._delta(record, [], None))
        return True

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do."""
        return bool(self._records or self._ended or self._pending)

    def step(self) -> list[Delta]:
        """Dispatches the next step and reads the one before; returns what was read."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._pending.append(self._dispatch(plan))
        deltas, self._ended = self._ended, []
        while len(self._pending) > (self._lag if plan is not None else 0):
            deltas += self._read(self._pending.popleft())
        for request in self.scheduler.drain():
            deltas.append(self._delta(self._records[request.id], [], None))
        return deltas

    def stats(self) -> dict[str, Any]:
        """Returns counts: pages by group, requests, preemptions, steps and programs."""
        return {
            **self.scheduler.stats(),
            "programs": len(self.programs),
            "programs_compiled": self._store.compiled,
            "programs_loaded": self._store.loaded,
        }

    # Dispatch

    def _dispatch(self, plan: Plan) -> Pending:
        now = time.monotonic()
        for piece in plan.pieces:
            if piece.request.first_scheduled_s is None:
                piece.request.first_scheduled_s = now
        packed = pack(plan, self._shape, self.scheduler.tables, self.scheduler.lengths)
        body = self.programs[plan.body]
        self.state, hidden = body(self.params, self.state, packed)
        scored = self._score(plan, hidden.prompt_CD)
        if not plan.sampled:
            return Pending(plan, None, None, scored)
        head = self.programs[self._head(plan)]
        hidden = hidden._replace(prompt_CD=None)
        self.state, (tokens, logprobs) = head(self.params, self.state, hidden)
        tokens.copy_to_host_async()
        return Pending(plan, tokens, logprobs, scored)

    def _head(self, plan: Plan) -> Head:
        params = [request.params for request, _ in plan.sampled]
        if any(p.logprobs is not None for p in params):
            kind = "logprobs"
        elif any(p.temperature > 0 for p in params):
            kind = "sample"
        else:
            kind = "greedy"
        return next(head for head in self._heads[kind] if head.rows >= len(params))

    def _score(self, plan: Plan, prompt_CD: jax.Array | None) -> list[Scored]:
        """Dispatches the score head over the prompt positions that the plan wants."""
        width = plan.body[0].width
        wanted = [
            (piece.request, position, index * width + position - piece.start)
            for index, piece in enumerate(plan.pieces)
            for position in range(*score_range(piece))
        ]
        head = self._heads["score"][0]
        calls = []
        for first in range(0, len(wanted), head.rows):
            part = wanted[first : first + head.rows]
            rows = np.zeros((2, head.rows), np.int32)
            for index, (request, position, hidden_row) in enumerate(part):
                rows[:, index] = hidden_row, request.prompt_token_ids[position + 1]
            logprobs = self.programs[head](self.params, prompt_CD, rows)
            calls.append(Scored([(request, position) for request, position, _ in part], logprobs))
        return calls

    # Reading

    def _read(self, pending: Pending) -> list[Delta]:
        plan = pending.plan
        tokens: list[int] = []
        if pending.tokens is not None:
            tokens = np.asarray(pending.tokens)[: len(plan.sampled)].tolist()
        now = time.monotonic()
        self._read_scores(pending.scored)
        before = [len(request.output_token_ids) for request, _ in plan.sampled]
        progressed = self.scheduler.update(plan, tokens)
        logprobs = jax.device_get(pending.logprobs)
        deltas = []
        for index, (request, _) in enumerate(plan.sampled):
            record = self._records.get(request.id)
            if record is None or len(request.output_token_ids) == before[index]:
                continue  # an overrun of a request that ended while this step ran
            request.token_times.append(now)
            entry = None
            if record.logprobs is not None:
                entry = self._entry(logprobs, index, tokens[index], request.params.logprobs)
            deltas.append(self._delta(record, [tokens[index]], entry))
        for request in progressed:
            if request.finish_reason and request.id in self._records:
                deltas.append(self._delta(self._records[request.id], [], None))
        return deltas

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

    def _entry(
        self, logprobs: Logprobs, index: int, token: int, count: int | None
    ) -> dict[int, Logprob]:
        """Returns one position's log-probabilities: the token's own, and the `count` top ones."""
        rank = int(logprobs.rank_B[index])
        entry = {token: Logprob(float(logprobs.logprob_B[index]), rank, self.decoded(token))}
        ids = logprobs.top_id_BC[index, : count or 0].tolist()
        values = logprobs.top_logprob_BC[index, : count or 0].tolist()
        for place, (top, value) in enumerate(zip(ids, values, strict=True)):
            entry.setdefault(top, Logprob(value, place + 1, self.decoded(top)))
        return entry

    def _decode_token(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False) if self.tokenizer else ""

    def _delta(self, record: Record, tokens: list[int], entry: dict[int, Logprob] | None) -> Delta:
        """Returns what the tokens add to a request; a finished one leaves the records."""
        request = record.request
        text = ""
        if record.detokenizer is not None:
            shown = tokens if request.finish_reason != "stop" else tokens[:-1]
            text = record.detokenizer.push(shown) if shown else ""
            if request.finish_reason is not None:
                text += record.detokenizer.finish()
        if entry is not None and record.logprobs is not None:
            record.logprobs.append(entry)
        output = None
        if request.finish_reason is not None:
            del self._records[request.id]
            output = self._output(record)
        entries = None if entry is None else [entry]
        return Delta(request.id, text, tokens, entries, request.finish_reason, output)

    def _output(self, record: Record) -> RequestOutput:
        request = record.request
        completion = CompletionOutput(
            index=0,
            text=record.detokenizer.text if record.detokenizer else "",
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
        )


def score_range(piece: Piece) -> tuple[int, int]:
    """Returns the positions whose next token's log-probability the piece must give."""
    return piece.scores if piece.scores is not None else (0, 0)

# SPDX-License-Identifier: Apache-2.0
"""Which tokens run in the next step. Knows integers: no clock, no device, no model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.buckets import Ladder
from engine.moves import DEVICE, Delete, Load, Move, Save
from engine.pages import PageGroup, PagePool
from engine.params import NO_TOKEN, NOT_FINITE
from engine.plan import Draft, Need, Piece, Plan, make_piece
from engine.prefix_cache import Match, PrefixCache
from engine.request import Request, Status
from engine.reuse import Reuse
from engine.rows import Rows
from engine.waiting import FIRST_COME, Admission, QueueFull, Tenants, Waiting

__all__ = ["Piece", "Plan", "Scheduler"]

_MOVES_A_STEP = 64  # pages that come up or are parked in a step, so that others keep their pace
_ALL = 1 << 30
_LEAST_RING = 2  # a ring is for pieces of at least so many chunks, or as long as it can be
# Of those that did not fit before, so many are tried in a step; the others, each as seldom.
_BLOCKED_A_STEP = 8


class Scheduler:
    """Plans steps: every running row decodes, then prompts fill what is left of the budget.

    - A plan may be made before the last one's tokens are read: `computed` advances when a step
      is planned, tokens and ends when `update` reads it. What is planned past an end is ignored.
    - Who waits is tried in the order of a policy (engine/waiting.py). A request that does not fit
      may be passed by later ones until it is `patience` steps older than when it first did not
      fit; then nothing passes it.
    - When a running row finds no page, the latest admitted one of the lowest priority is preempted:
      it lets go of its pages, which the cache keeps while there is room, and waits.
    - A request starts with what the cache has of its tokens, once that is on the device. It waits
      for one that is just computing more of them.
    - A row that outgrows the pool alone ends with the reason "capacity". That depends on its
      length only, never on its company.
    - At most `max_num_batched_tokens` rows run, so that each finds a token in every step.
    - With `pinned`, a row's numbers depend on its tokens alone: a step has decodes or chunks, never
      both; chunks end at multiples of the width, whatever budget is left; and one that starts again
      draws its tokens again, since their KV is to come from decodes. The same tokens come out.
    - With `decode_steps`, decodes of nobody but themselves run so often in one dispatch: while
      nobody waits, no page lacks, and no text is looked for.
    - With `static`, batches: the first waiting requests, as many as there are rows, run until the
      last of them has ended; nobody else is admitted, and the rows of the ended stay in the step.
      That is the baseline of the benchmarks, and of no other use.

    The result of `schedule` and the arrays `tables` and `lengths` belong together: copy them
    before the next call of any method. The next plans rely on steps running in order.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        page_size: int,
        max_model_len: int,
        groups: tuple[PageGroup, ...],
        pool: PagePool,
        ladder: Ladder,
        admission: Admission = FIRST_COME,
        static: bool = False,
        pinned: bool = False,
        decode_steps: int = 1,
        prefix_cache: bool = False,
        lower: Sequence[PagePool] = (),
        preemption: str = "recompute",
        tenants: Tenants | None = None,
    ):
        self._budget = max_num_batched_tokens
        self._page_size = page_size
        self._max_model_len = max_model_len
        self._groups = groups
        self._pool = pool
        self._ladder = ladder
        self._admission = admission
        self._policy = admission.policy
        self._static = static
        self._pinned = pinned
        self._decode_steps = decode_steps
        self._least_ring = min(_LEAST_RING * ladder.width, ladder.ring)
        self._batch: list[Request] = []  # the requests of the static batch, ended ones too
        self._rows = Rows(
            num_rows=ladder.rows,
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            max_model_len=max_model_len,
            step_tokens=min(max_num_batched_tokens, max(ladder.pieces * ladder.width, ladder.ring)),
            groups=groups,
            pool=pool,
            chunk=ladder.width,
            pinned=pinned,
            prefix_cache=prefix_cache,
            lower=lower,
        )
        self._reuse = Reuse(self._rows, page_size, len(groups))
        self._park = _MOVES_A_STEP if preemption == "park" else 0
        self._requests: dict[int, Request] = {}
        self._running: dict[int, Request] = {}  # in order of admission
        self._waiting = Waiting(admission.policy, admission.age_bound, max_num_seqs)
        self._tenants = tenants or Tenants(
            admission.max_num_seqs_per_tenant, admission.tokens_per_s_per_tenant
        )
        self._ended: list[Request] = []
        self._last_id: int | None = None
        self._step = 0
        self._preemptions = self._refused = 0

    @property
    def tables(self) -> np.ndarray:
        """int32 [group, row, place]: pages; row `max_num_seqs` is the null row."""
        return self._rows.tables

    @property
    def lengths(self) -> np.ndarray:
        """int32 [group, row]: cells in use, those of the last plan included."""
        return self._rows.lengths

    @property
    def is_pinned(self) -> bool:
        """Whether what a request computes never depends on its company."""
        return self._pinned

    @property
    def keeps(self) -> bool:
        """Whether anything is kept of requests."""
        return self._rows.keeps

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._requests)

    def stats(self) -> dict[str, Any]:
        """Returns the counters; `pages` has free (shared), held and cached pages by group."""
        counts = [self._pool.counts(0, group) for group in range(len(self._groups))]
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "preemptions": self._preemptions,
            "refused": self._refused,
            "steps": self._step,
            "pages": [count._asdict() for count in counts],
            "cache": {**self._reuse.stats(), **self._rows.cache.stats()},
        }

    def carry_on(self, other: "Scheduler") -> None:
        """Takes over the policy, what tenants may spend, and the counters from one of before."""
        self.set_policy(other._policy)
        self._tenants.carry_on(other._tenants)
        self._step, self._preemptions = other._step, other._preemptions
        self._refused = other._refused
        self._reuse.counts.update(other._reuse.counts)
        self.cache.kept.counts.update(other.cache.kept.counts)

    def fits(self, cells: int) -> bool:
        """Whether a request of so many cells fits the pool alone."""
        return self._rows.fits(cells)

    def running(self) -> list[Request]:
        """Returns the requests that have rows, in order of admission."""
        return list(self._running.values())

    @property
    def decode_steps(self) -> int:
        """How often decodes of nobody but themselves run in one dispatch."""
        return self._decode_steps

    def add(self, request: Request, *, was_here: bool = False, waiting: int | None = None) -> None:
        """Queues `request`. Ids grow with arrival. ValueError if it can never run.

        QueueFull if no more may wait; not for one that `was_here` before. `waiting`: how many do,
        in other partitions too; None: in this one.
        """
        try:
            self._check(request, was_here, self.num_waiting if waiting is None else waiting)
        except ValueError:
            self._refused += 1
            raise
        self._last_id = request.id
        self._requests[request.id] = request
        self._waiting.add(request, self._step)

    def _check(self, request: Request, was_here: bool, waiting: int) -> None:
        """Raises unless a request may be queued, as `add` says."""
        prompt = len(request.prompt_token_ids)
        if self._last_id is not None and request.id <= self._last_id:
            raise ValueError(f"request id {request.id} must be above the last, {self._last_id}")
        if not 0 < prompt <= self._max_model_len:
            raise ValueError(
                f"a prompt of {prompt} tokens must have from 1 to max_model_len="
                f"{self._max_model_len}; shorten it or raise max_model_len"
            )
        assert prompt <= request.limit <= self._max_model_len, "the engine sets a limit in range"
        if not self._rows.fits(prompt):
            raise ValueError(
                f"a prompt of {prompt} tokens needs {self._rows.least_pages(prompt)} pages of "
                f"{self._page_size} tokens, the pool has {self._pool.capacity}; "
                "raise num_pages or memory_fraction, or shorten the prompt"
            )
        most = self._admission.max_num_waiting
        if most is not None and waiting >= most and not was_here:
            raise QueueFull(
                f"{waiting} requests wait already and max_num_waiting={most}; "
                "send it later, or raise max_num_waiting"
            )

    def abort(self, request_id: int) -> Request | None:
        """Ends a request at once, wherever it stands. Returns it, or None if it is not here."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends `request` now; its tokens that are not read yet are ignored."""
        if request.status is Status.RUNNING:
            self._rows.close(request)
            del self._running[request.id]
            self._tenants.stop(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.id]
        self._waiting.forget(request)
        self._tenants.finish(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def drain(self) -> list[Request]:
        """Returns, once, the requests that `schedule` ended (reason "capacity")."""
        ended, self._ended = self._ended, []
        return ended

    def matched(self, request: Request) -> int:
        """Returns how many tokens of a request are kept, in any tier, 0 for less than a page."""
        cells = self._reuse.cells(request)
        return cells if cells >= self._page_size else 0

    @property
    def num_requests(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    @property
    def has_free_row(self) -> bool:
        """Whether one more request could run beside those that are here."""
        return len(self._requests) < self._ladder.rows

    @property
    def num_waiting(self) -> int:
        """Requests that have no row."""
        return len(self._waiting)

    def schedule(self) -> Plan | None:
        """Returns the next step, or None if there is nothing to run before a step is read."""
        draft = self.draft()
        steps = self._decode_steps if self.may_repeat(draft) else 1
        return self.commit(draft, self.need(draft), steps)

    def draft(self) -> Draft:
        """Returns what the next step shall have, for `commit` before any other call.

        Rows and pages are taken; what is left out of the draft until then is drafted again.
        """
        draft = Draft(self._budget, self._ladder.pieces)
        if not self._pinned:
            self._plan_decodes(draft)
        for request in [r for r in self._running.values() if r.prefills]:
            if request.status is Status.RUNNING:
                self._plan_chunks(draft, request)
        if not draft.preempted:
            self._admit(draft)
        if self._pinned and not draft.pieces:
            self._plan_decodes(draft)
        return draft

    def need(self, draft: Draft) -> Need:
        """Returns what a body must have room for."""
        widest = max((piece.stop - piece.start for piece in draft.pieces), default=0)
        count = len(self._batch) if self._static and draft.decodes else len(draft.decodes)
        return Need(count, len(draft.pieces), widest)

    def show_tail(self, request: Request) -> None:
        """Lets others copy what a running request has stored, to its last token."""
        if request.status is Status.RUNNING:
            self._rows.seal(request)
            self._rows.put_tail(request)

    def take_moves(self) -> tuple[Move | Save | Load | Delete, ...]:
        """Returns, once, what is to be moved though no step is planned."""
        return self._rows.take_moves()

    @property
    def cache(self) -> PrefixCache:
        """What is kept of requests, ended ones too."""
        return self._rows.cache

    def update(
        self, plan: Plan, tokens: Sequence[int], broken: Sequence[int] = ()
    ) -> list[tuple[Request, int | None]]:
        """Reads the tokens of `plan.sampled`; returns the requests that went on or finished.

        Beside each is the place of its token in `tokens`, None where it got none. NO_TOKEN for a
        token ends its request with the reason "error". `broken`: indexes of the pieces whose
        numbers were not all finite; the cache keeps nothing of those.
        """
        progressed: list[tuple[Request, int | None]] = []
        self._store(plan.pieces, broken)
        for place, (request, token) in enumerate(zip(plan.sampled, tokens, strict=True)):
            if request.status is Status.FINISHED:
                continue
            request.in_flight -= 1
            if token == NO_TOKEN:
                self.finish(request, "error", NOT_FINITE)
                progressed.append((request, None))
                continue
            output = request.output_token_ids
            output.append(token)
            if len(output) >= request.seal_at and request.status is Status.RUNNING:
                self._rows.seal(request)
            progressed.append((request, place))
            if token in request.end_ids:
                self.finish(request, "stop", token)
            elif request.known >= request.limit:
                self.finish(request, request.limit_reason)
        for piece in plan.pieces:
            request = piece.request
            scored = request.scores_only and piece.stop == request.limit
            if scored and request.status is not Status.FINISHED:
                self.finish(request, "length")
                progressed.append((request, None))
        return progressed

    def _store(self, pieces: Sequence[Piece], broken: Sequence[int]) -> None:
        """Notes what was stored for rows that are still the ones of the pieces."""
        for index, piece in enumerate(pieces):
            request = piece.request
            if request.status is Status.RUNNING and request.admissions == piece.admission:
                if index in broken:
                    self._rows.forget(request)
                self._rows.store(request, piece.stop)

    def _plan_decodes(self, draft: Draft) -> None:
        for request in [r for r in self._running.values() if r.decodes]:
            if request.computed < request.quiet_cells or self._make_room(draft, request):
                draft.decodes.append(request)
        draft.tokens_left -= len(draft.decodes)
        assert draft.tokens_left >= 0, "no more rows run than the budget has tokens"

    def _make_room(self, draft: Draft, request: Request) -> bool:
        """Returns whether `request` still runs, now with a page for one more cell."""
        if request.status is not Status.RUNNING:
            return False  # it was preempted for a row before it
        self._rows.drop_passed(request)
        return self._reserve(draft, request, request.computed + 1)

    def _plan_chunks(self, draft: Draft, request: Request) -> None:
        self._rows.drop_passed(request)
        start, end = request.computed, request.target
        if self._rows.is_narrow(end):
            end = min(end, self._rows.page_end(start))
        elif self._ladder.ring and not self._pinned:
            if self._plan_ring(draft, request, start, end):
                return
            page_end = self._rows.page_end(start)
            if start % self._page_size and end - page_end >= self._least_ring:
                end = page_end  # from where on rings are whole
        while start < end and draft.tokens_left and draft.pieces_left:
            stop = min(end, start + min(self._ladder.width, draft.tokens_left))
            if self._pinned:
                stop = min(end, start - start % self._ladder.width + self._ladder.width)
                if stop - start > draft.tokens_left:
                    return
            if not self._reserve(draft, request, stop):
                return
            draft.pieces.append(make_piece(request, start, stop))
            draft.pieces_left -= 1
            draft.tokens_left -= stop - start
            start = stop

    def _plan_ring(self, draft: Draft, request: Request, start: int, end: int) -> bool:
        """Returns whether the next piece of `request` is one of a ring, alone in the step."""
        # Decodes take nothing from it, or it would end within a page, and the next have no room.
        stop = min(end, self._ring_end(start))
        if stop - start < self._least_ring or draft.pieces:
            return False
        if self._reserve(draft, request, stop):
            draft.pieces.append(make_piece(request, start, stop))
        draft.tokens_left = draft.pieces_left = 0
        return True

    def _ring_end(self, start: int) -> int:
        """Returns where a piece of a ring that begins at `start` ends at the latest.

        The devices share out whole pages, from that of the first token on.
        """
        return start - start % self._page_size + self._ladder.ring

    def has_ring(self, draft: Draft) -> bool:
        """Returns whether the draft's piece is one of a ring."""
        return self.need(draft).widest > self._ladder.width

    def leave_to_ring(self, draft: Draft) -> None:
        """Keeps of the pieces the first, and of that what a ring has room for.

        To be called where another partition has a ring in this step.
        """
        for piece in draft.pieces[:1]:
            stop = min(piece.stop, self._ring_end(piece.start))
            draft.pieces = [make_piece(piece.request, piece.start, stop)]

    def _reserve(self, draft: Draft, request: Request, cells: int) -> bool:
        """Returns whether `request` has pages for `cells` cells, if need be by preempting."""
        missing = self._rows.missing_pages(request, cells)
        while missing > self._rows.num_free_pages:
            victim = self._victim()
            if victim is request and len(self._running) == 1:
                self._end_at_capacity(request)
                return False
            self._preempt(draft, victim)
            if victim is request:
                return False
        self._rows.extend(request, cells)
        return True

    def _end_at_capacity(self, request: Request) -> None:
        """Ends `request` with the tokens it has, when those on their way are read."""
        if request.in_flight:
            request.limit, request.limit_reason = request.length, "capacity"
        else:
            self.finish(request, "capacity")
            self._ended.append(request)

    def _preempt(self, draft: Draft, victim: Request) -> None:
        draft.preempted = True
        draft.drop(victim)
        self._rows.close(victim, self._park)
        del self._running[victim.id]
        self._tenants.stop(victim)
        if victim.prefills or victim.decodes:  # else all is planned, and it only waits for reads
            victim.preemptions += 1
            self._preemptions += 1
        victim.status = Status.WAITING
        victim.computed = victim.target = 0
        self._waiting.add(victim, self._step)

    def _victim(self) -> Request:
        """Returns who gives way: the newest of the lowest priority."""
        newest = reversed(self._running.values())
        if self._policy == "priority":
            return max(newest, key=lambda request: request.params.priority)
        return next(newest)

    def _admit(self, draft: Draft) -> None:
        """Starts waiting requests, in order, as rows, pages and the budget allow."""
        if not (self._waiting and self._has_room(draft)):
            return
        promised = sum(self._rows.promised_pages(r) for r in self._running.values())
        available = self._rows.num_free_pages - promised
        if self._running:
            available -= int(self._admission.watermark * self._pool.capacity)
        blocked = 0
        for request in self._candidates():
            if not self._has_room(draft):
                break
            if blocked >= _BLOCKED_A_STEP and request.blocked_since is not None:
                if (self._step + request.id) % _BLOCKED_A_STEP:
                    continue
            if self._pinned and request.in_flight == 0:
                request.output_token_ids.clear()
            if request.in_flight == 0 and not self._rows.fits(request.known):
                self._end_at_capacity(request)
                continue
            if not self._tenants.may_start(request) or self._reuse.follows(request):
                continue
            found = None if request.in_flight else self._reuse.best(request, available)
            if found is None or found[1] > available:
                if request.blocked_since is None:
                    request.blocked_since = self._step
                if self._step - request.blocked_since >= self._admission.patience:
                    break
                blocked += 1
                continue
            match, need = found
            if self._reuse.finds_leader(request, match, self._running.values()):
                continue
            if match.low:
                most = _MOVES_A_STEP - draft.lifted if self._running else _ALL
                is_up, moved = self._reuse.lift(request, match, most)
                draft.lifted += moved
                if not is_up:
                    continue
                # What could not be brought up is computed.
                match, need = self._reuse.best(request, available, DEVICE)
                if need > available:
                    continue
            available -= need
            self._start(draft, request, match)

    def _has_room(self, draft: Draft) -> bool:
        """Whether a row, tokens and pieces are left for one more request."""
        return bool(self._rows.num_free_rows and draft.tokens_left and draft.pieces_left)

    def _start(self, draft: Draft, request: Request, match: Match) -> None:
        """Gives a waiting request a row, and plans its first chunks."""
        self._waiting.remove(request)
        self._running[request.id] = request
        request.status = Status.RUNNING
        request.target = request.known
        request.blocked_since = None
        self._rows.open(request, match)
        request.admissions += 1
        self._tenants.start(request, max(0, len(request.prompt_token_ids) - match.cells))
        self._reuse.count(request, match)
        self._plan_chunks(draft, request)

    def set_policy(self, policy: str) -> None:
        """Changes the order in which requests are tried from now on."""
        self._policy = policy
        self._waiting.set_policy(policy)

    def refill(self, seconds: float) -> None:
        """Enters that time has passed, by which tenants may have more computed."""
        self._tenants.refill(seconds)

    def wait_s(self) -> float | None:
        """Returns the seconds until somebody who waits for a refill may start; None for nobody."""
        waits = [self._tenants.wait_s(request) for request in self._waiting]
        return min((wait for wait in waits if wait is not None), default=None)

    def _candidates(self) -> list[Request]:
        """Returns the waiting requests that may start now, in order."""
        may_start = self._tenants.may_start if self._tenants.has_limits else None
        first = self._waiting.first(self._step, self._reuse.cells, may_start)
        if not self._static:
            return first
        if all(request.status is Status.FINISHED for request in self._batch):
            self._batch = first[: self._ladder.rows]
        # A batch's requests are the oldest: those that are not admitted yet wait in front.
        return [request for request in first if request in self._batch]

    def commit(self, draft: Draft, need: Need, repeat: int = 1) -> Plan | None:
        """Returns the draft as a plan, and counts its tokens as computed; None if it is empty.

        `need`: what the step's body has room for; `repeat`: how often it runs.
        """
        if not draft.decodes and not draft.pieces:
            return None
        last = [piece for piece in draft.pieces if piece.samples]
        decode_rows = [request.running_row for request in draft.decodes]
        sampled = [*(piece.request for piece in last), *draft.decodes]
        for piece in draft.pieces:
            piece.request.computed = piece.stop
            if piece.scores is not None:
                piece.request.scored = piece.scores[1]
            self._rows.set_lengths(piece.request)
        if repeat > 1:
            for request in draft.decodes:
                self._rows.extend(request, request.computed + repeat)
        for request in sampled:
            request.in_flight += repeat
        for request in draft.decodes:
            request.computed += repeat
        self._rows.grow(decode_rows, repeat)
        body = self._ladder.choose_repeat(need.decodes) if repeat > 1 else None
        plan = Plan(
            step=self._step,
            body=body or self._ladder.choose(*need),
            decodes=tuple(draft.decodes),
            pieces=tuple(draft.pieces),
            sampled=tuple(sampled),
            rows=(*(piece.row for piece in last), *decode_rows),
            repeat=repeat,
            moves=self._rows.take_moves(),
        )
        self._step += 1
        return plan

    def may_repeat(self, draft: Draft) -> bool:
        """Returns whether the draft may run as often in one dispatch as `decode_steps` has it."""
        steps = self._decode_steps
        if steps == 1 or draft.pieces or self._waiting or self._static:
            return False
        if not all(r.repeats and r.limit - r.length >= steps for r in draft.decodes):
            return False
        cells = [(request, request.computed + steps) for request in draft.decodes]
        missing = sum(self._rows.missing_pages(*each) for each in cells)
        fits = missing <= self._rows.num_free_pages
        return fits and self._ladder.choose_repeat(len(cells)) is not None

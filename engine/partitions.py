# SPDX-License-Identifier: Apache-2.0
"""Several schedulers, each with rows, pages and a tree of its own, that step together.

The data shards of a mesh run one program, so each step has one body, with room for whichever of
them needs most. A request belongs to one partition from its arrival to its end.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from engine.buckets import Body, Ladder
from engine.plan import Need, Plan
from engine.request import Request
from engine.scheduler import Scheduler

# Requests more than the partition with fewest has, at which what is kept no longer decides.
_MOST_AHEAD = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of all partitions; those that have nothing to run have no plan."""

    body: Body
    repeat: int
    plans: tuple[Plan | None, ...]

    @property
    def some(self) -> list[tuple[int, Plan]]:
        """The partitions that run, and their plans."""
        return [(p, plan) for p, plan in enumerate(self.plans) if plan is not None]


class Partitions:
    """The schedulers of an engine, one a partition."""

    def __init__(self, parts: Sequence[Scheduler], ladder: Ladder) -> None:
        self.parts = tuple(parts)
        self._ladder = ladder
        self._home: dict[int, int] = {}

    @property
    def is_pinned(self) -> bool:
        """Whether what a request computes never depends on its company."""
        return self.parts[0].is_pinned

    def home(self, request: Request) -> Scheduler:
        """Returns the scheduler that has a request, which must not be finished."""
        return self.parts[self._home[request.id]]

    def add(
        self, request: Request, *, was_here: bool = False, beside: Request | None = None
    ) -> None:
        """Queues a request where `route` has it, or with the one `beside` it.

        Raises ValueError as `Scheduler.add` does.
        """
        place = self._home[beside.id] if beside is not None else self.route(request)
        waiting = sum(part.num_waiting for part in self.parts)
        self.parts[place].add(request, was_here=was_here, waiting=waiting)
        self._home[request.id] = place

    def route(self, request: Request) -> int:
        """Returns the partition for a request.

        The one that has most of its tokens, unless that has many more requests than another; where
        nothing is kept, the one with fewest.
        """
        if len(self.parts) == 1:
            return 0
        counts = [part.num_requests for part in self.parts]
        near = [p for p, count in enumerate(counts) if count - min(counts) <= _MOST_AHEAD]
        kept = {p: self.parts[p].matched(request) for p in near}
        return min(near, key=lambda p: (-kept[p], counts[p], p))

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request now, as `Scheduler.finish` does."""
        self.home(request).finish(request, reason, stop_reason)

    def forget(self, request: Request) -> None:
        """Notes that a request is finished, and its results are given."""
        self._home.pop(request.id, None)

    def schedule(self) -> Step | None:
        """Returns the next step, or None if nobody has anything to run before a step is read."""
        drafts = [part.draft() for part in self.parts]
        both = list(zip(self.parts, drafts, strict=True))
        if self.is_pinned and any(draft.pieces for draft in drafts):
            for draft in drafts:  # a step has decodes or pieces, never both
                draft.decodes.clear()
        if any(part.has_ring(draft) for part, draft in both):
            for part, draft in both:
                part.leave_to_ring(draft)
        each = [part.need(draft) for part, draft in both]
        need = Need(*(max(column) for column in zip(*each, strict=True)))
        repeats = all(part.may_repeat(draft) for part, draft in both)
        repeats = repeats and self._ladder.choose_repeat(need.decodes) is not None
        steps = self.parts[0].decode_steps if repeats else 1
        plans = tuple(part.commit(draft, need, steps) for part, draft in both)
        bodies = [plan.body for plan in plans if plan is not None]
        return Step(bodies[0], steps, plans) if bodies else None

    def stats(self) -> dict[str, Any]:
        """Returns the counters of all partitions together, as `Scheduler.stats` has them."""
        return total([part.stats() for part in self.parts])


def total(values: Sequence[Any]) -> Any:
    """Returns the sum of numbers, or of trees of them; steps are not summed."""
    first = values[0]
    if isinstance(first, dict):
        return {
            key: max(v[key] for v in values) if key == "steps" else total([v[key] for v in values])
            for key in first
        }
    if isinstance(first, list):
        return [total(each) for each in zip(*values, strict=True)]
    return sum(values)

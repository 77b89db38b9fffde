# SPDX-License-Identifier: Apache-2.0
"""Several schedulers, each with rows, pages and a tree of its own, that step together.

The data shards of a mesh run one program, so each step has one body, with room for whichever of
them needs most. A request belongs to one partition from its arrival to its end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.buckets import Body, Ladder
from engine.plan import Draft, Need, Plan
from engine.request import Request
from engine.scheduler import Scheduler


class Step(NamedTuple):
    """One step of all partitions. `some`: those that run, and their plans; the others have none."""

    body: Body
    repeat: int
    plans: tuple[Plan | None, ...]
    some: tuple[tuple[int, Plan], ...]


class Partitions:
    """The schedulers of an engine, one a partition."""

    def __init__(self, parts: Sequence[Scheduler], ladder: Ladder) -> None:
        self.parts = tuple(parts)
        self._ladder = ladder
        self._home: dict[int, int] = {}
        self._had_ring = False
        self.steps = 0  # that were planned of several partitions

    @property
    def is_pinned(self) -> bool:
        """Whether what a request computes never depends on its company."""
        return self.parts[0].is_pinned

    def carry_on(self, before: "Partitions") -> None:
        """Takes over from those of before what `Scheduler.carry_on` does, and the steps."""
        self.steps = before.steps
        for part, old in zip(self.parts, before.parts, strict=True):
            part.carry_on(old)

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

        Of those with a free row, or all if none has one, that which has most of its tokens, if it
        has a page of them; else that with fewest requests.
        """
        if len(self.parts) == 1:
            return 0
        free = [p for p, part in enumerate(self.parts) if part.has_free_row]
        counts = [part.num_requests for part in self.parts]
        if free:
            kept = {p: self.parts[p].matched(request) for p in free}
            return min(free, key=lambda p: (-kept[p], counts[p], p))
        return min(range(len(counts)), key=lambda p: (counts[p], p))

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request now, as `Scheduler.finish` does."""
        self.home(request).finish(request, reason, stop_reason)

    def forget(self, request: Request) -> None:
        """Notes that a request is finished, and its results are given."""
        self._home.pop(request.id, None)

    def schedule(self) -> Step | None:
        """Returns the next step, or None if nobody has anything to run before a step is read."""
        if len(self.parts) == 1:
            plan = self.parts[0].schedule()
            if plan is None:
                return None
            return Step(plan.body, plan.repeat, (plan,), ((0, plan),))
        both = [(part, part.draft()) for part in self.parts]
        if self.is_pinned and any(draft.pieces for _, draft in both):
            for _, draft in both:  # a step has decodes or pieces, never both
                draft.decodes.clear()
        self._settle_rings(both)
        each = [part.need(draft) for part, draft in both]
        need = Need(*(max(column) for column in zip(*each, strict=True)))
        repeats = all(part.may_repeat(draft) for part, draft in both)
        repeats = repeats and self._ladder.choose_repeat(need.decodes) is not None
        steps = self.parts[0].decode_steps if repeats else 1
        plans = tuple(part.commit(draft, need, steps) for part, draft in both)
        some = tuple((p, plan) for p, plan in enumerate(plans) if plan is not None)
        if not some:
            return None
        self.steps += 1
        return Step(some[0][1].body, steps, plans, some)

    def _settle_rings(self, both: Sequence[tuple[Scheduler, Draft]]) -> None:
        """Leaves the step to a ring, with one piece in each partition, or to all other pieces.

        In turn, where there are both: the pieces of one partition do not wait for a long prompt of
        another.
        """
        rings = [part.has_ring(draft) for part, draft in both]
        others = any(d.pieces and not ring for (_, d), ring in zip(both, rings, strict=True))
        self._had_ring = any(rings) and not (self._had_ring and others)
        for (part, draft), ring in zip(both, rings, strict=True):
            if self._had_ring:
                part.leave_to_ring(draft)
            elif ring:
                draft.pieces.clear()

    def stats(self) -> dict[str, Any]:
        """Returns the counters of all partitions together, as `Scheduler.stats` has them."""
        stats = total([part.stats() for part in self.parts])
        return stats if len(self.parts) == 1 else stats | {"steps": self.steps}


def total(values: Sequence[Any]) -> Any:
    """Returns the sum of numbers, or of trees of them."""
    first = values[0]
    if isinstance(first, dict):
        return {key: total([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [total(each) for each in zip(*values, strict=True)]
    return sum(values)

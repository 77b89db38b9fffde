# SPDX-License-Identifier: Apache-2.0
"""Who waits for a row, in which order they are tried, and what each tenant may have.

Time comes in as an event (`Tenants.refill`): nothing here looks at a clock.
"""

import dataclasses
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from engine.request import Request

# The order of requests that wait, by policy; what is equal stands in order of arrival. Who was
# preempted has waited before: it comes first, of its priority.
POLICIES: dict[str, Callable[[Request], tuple[Any, ...]]] = {
    "fcfs": lambda request: (not request.preemptions,),
    "priority": lambda request: (request.params.priority, not request.preemptions),
    "shortest_first": lambda request: (not request.preemptions, request.limit),
    "longest_prefix": lambda request: (not request.preemptions,),  # and then by what is cached
}


_MATCHED = 64  # of those that wait, whose prefixes are looked up in a step


class QueueFull(ValueError):
    """No more requests may wait; send it later."""


@dataclasses.dataclass(frozen=True)
class Admission:
    """Who may start.

    policy: one of POLICIES. patience: steps after which nobody passes a request that did not fit.
    age_bound: steps after which a request comes before all that arrived later, whatever the policy.
    max_num_waiting: requests that may wait. watermark: share of the pages that stays free for
    those that run when another starts. max_num_seqs_per_tenant, tokens_per_s_per_tenant: what a
    tenant may run at once, and have computed on average; None is no limit.
    """

    policy: str = "fcfs"
    patience: int = 64
    age_bound: int = 1024
    max_num_waiting: int | None = None
    watermark: float = 0.0
    max_num_seqs_per_tenant: int | None = None
    tokens_per_s_per_tenant: float | None = None


FIRST_COME = Admission()


class Waiting:
    """The requests without a row, in the order of a policy."""

    def __init__(self, policy: str, age_bound: int, window: int) -> None:
        """`window`: how many are looked at in a step, so that its work is bounded."""
        self._age_bound = age_bound
        self._window = window
        self._since: dict[int, int] = {}  # the step at which each first waited, by id, in order
        self._order: list[tuple[Any, ...]] = []  # (*key, id), sorted
        self._requests: dict[int, Request] = {}
        self.set_policy(policy)

    def set_policy(self, policy: str) -> None:
        """Puts all who wait into the order of a policy."""
        self._policy = policy
        self._key = POLICIES[policy]
        self._order = sorted((*self._key(r), r.id) for r in self._requests.values())

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[entry[-1]] for entry in self._order)

    def add(self, request: Request, step: int) -> None:
        """Puts a request where it belongs."""
        self._since.setdefault(request.id, step)
        self._requests[request.id] = request
        insort(self._order, (*self._key(request), request.id))

    def remove(self, request: Request) -> None:
        """Takes out a request, which has not changed since it was added."""
        entry = (*self._key(request), request.id)
        place = bisect_left(self._order, entry)
        assert self._order[place] == entry, f"request {request.id} does not wait"
        del self._order[place]
        del self._requests[request.id]

    def forget(self, request: Request) -> None:
        """Ends the account of how long a request has waited."""
        self._since.pop(request.id, None)

    def first(
        self,
        step: int,
        cells: Callable[[Request], int],
        may_start: Callable[[Request], bool] | None = None,
    ) -> list[Request]:
        """Returns who is to be tried, in order; `cells` tells what is cached of a request.

        Those who may not start take nobody's place.
        """
        chosen: dict[int, Request] = {}
        for request_id, since in self._since.items():
            if step - since < self._age_bound or len(chosen) == self._window:
                break
            request = self._requests.get(request_id)
            if request is not None and (may_start is None or may_start(request)):
                chosen[request_id] = request
        by_prefix = self._policy == "longest_prefix"
        count = max(self._window, _MATCHED) if by_prefix else self._window
        others = (request for request in self if request.id not in chosen)
        requests = list(islice(filter(may_start, others) if may_start else others, count))
        if by_prefix:
            requests.sort(key=lambda r: (not r.preemptions, -cells(r), r.id))
        return [*chosen.values(), *requests[: self._window]]


class Tenants:
    """What each tenant runs and spends. Each may run ahead of its rate by a second's worth.

    What a request computes of its prompt is spent when it starts, its output when it ends.
    """

    def __init__(self, max_running: int | None, tokens_per_s: float | None) -> None:
        self._max_running = max_running
        self._rate = tokens_per_s
        self._running: Counter[str] = Counter()
        self._allowance: dict[str, float] = {}

    @property
    def has_limits(self) -> bool:
        """Whether a tenant may ever be kept from starting."""
        return self._max_running is not None or self._rate is not None

    def carry_on(self, other: "Tenants") -> None:
        """Takes over what each tenant may spend; nobody runs."""
        self._allowance = other._allowance

    def may_start(self, request: Request) -> bool:
        """Whether the tenant of a request may run one more now."""
        tenant = request.params.tenant
        if self._max_running is not None and self._running[tenant] >= self._max_running:
            return False
        return self._rate is None or self._allowance.get(tenant, self._rate) > 0

    def start(self, request: Request, tokens: int) -> None:
        """Notes that a request runs, and what is computed of its prompt."""
        self._running[request.params.tenant] += 1
        self._spend(request.params.tenant, tokens)

    def stop(self, request: Request) -> None:
        """Notes that a request runs no more."""
        tenant = request.params.tenant
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def finish(self, request: Request) -> None:
        """Notes what a request has put out."""
        drawn = len(request.output_token_ids) - request.given_tokens
        self._spend(request.params.tenant, drawn)

    def refill(self, seconds: float) -> None:
        """Gives each tenant what it may spend in a time that has passed."""
        if self._rate is not None:
            for tenant, left in list(self._allowance.items()):
                left += seconds * self._rate
                self._allowance[tenant] = left
                if left >= self._rate:
                    del self._allowance[tenant]  # full, as those that were never seen

    def wait_s(self, request: Request) -> float | None:
        """Returns the seconds until a refill lets a request start; None if it waits for no such."""
        left = self._allowance.get(request.params.tenant)
        if self._rate is None or left is None or left > 0:
            return None
        return -left / self._rate

    def _spend(self, tenant: str, tokens: int) -> None:
        if self._rate is not None:
            self._allowance[tenant] = self._allowance.get(tenant, self._rate) - tokens

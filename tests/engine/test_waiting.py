# SPDX-License-Identifier: Apache-2.0
"""Who waits is tried in the order of a policy, nobody for ever; tenants keep to their limits."""

import random

import pytest

from engine.request import Status
from engine.waiting import POLICIES, Admission, QueueFull, Tenants, Waiting
from tests.engine.fake_device import Harness, Setup
from tests.engine.test_scheduler import prompt


def started(setup, requests):
    """Returns the ids in the order in which they first got a row."""
    harness, order = Harness(setup), []
    for request in requests:
        harness.add(request)
    while harness.scheduler.has_work:
        harness.step()
        order += [r.id for r in requests if r.admissions and r.id not in order]
    harness.check_results()
    return order


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", [0, 1, 2, 3]), ("priority", [2, 1, 3, 0]), ("shortest_first", [3, 1, 0, 2])],
)
def test_a_policy_orders_those_that_wait(policy, order):
    setup = Setup(policy=policy, max_num_seqs=1, num_pages=60)
    fields = [(9, 5, 1), (7, 4, 0), (20, 9, -1), (2, 1, 0)]  # prompt, output, priority
    requests = [
        setup.request(i, prompt(n, seed=i), most, priority=priority)
        for i, (n, most, priority) in enumerate(fields)
    ]
    assert started(setup, requests) == order


def test_the_longest_prefix_goes_first():
    setup = Setup(policy="longest_prefix", max_num_seqs=1, num_pages=60, prefix_cache=True)
    base = prompt(30)
    first = setup.request(0, base, 1)
    lengths = [0, 8, 28, 16]
    others = [setup.request(i, [*base[:n], 7, 7, i], 1) for i, n in enumerate(lengths, 1)]
    assert started(setup, [first, *others]) == [0, 3, 4, 2, 1]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_age_goes_before_any_policy(policy):
    """Others arrive for ever that the policy likes better: the old one still starts."""
    setup = Setup(policy=policy, age_bound=40, max_num_seqs=1, num_pages=60, prefix_cache=True)
    harness = Harness(setup)
    base, old = prompt(9, seed=5), setup.request(0, prompt(30), 20, priority=9)
    harness.add(old)
    for id in range(1, 200):
        harness.add(setup.request(id, [*base, id % 17], 2, priority=0))
        for _ in range(2):
            harness.step()
        if old.admissions:
            break
    assert old.admissions and harness.scheduler._step <= 40 + 10
    harness.run()
    harness.check_results()


def test_the_lowest_priority_gives_way_and_comes_back():
    setup = Setup(policy="priority", num_pages=9, page_size=4, budget=16)
    harness = Harness(setup)
    low = setup.request(0, prompt(6), 20, priority=5)
    high = setup.request(1, prompt(6, seed=1), 20, priority=1)
    for request in (low, high):
        harness.add(request)
    harness.run()
    harness.check_results()
    assert low.preemptions > 0 and high.preemptions == 0


def test_a_request_more_than_may_wait_is_refused_and_nothing_else_is_lost():
    setup = Setup(max_num_seqs=1, num_pages=60)
    harness = Harness(setup)
    harness.scheduler._admission = Admission(max_num_waiting=2)
    requests = [setup.request(i, prompt(4, seed=i), 2) for i in range(4)]
    harness.add(requests[0])
    harness.step()
    for request in requests[1:3]:
        harness.add(request)
    with pytest.raises(QueueFull, match="2 requests wait already and max_num_waiting=2; send it"):
        harness.add(requests[3])
    harness.run()
    harness.check_results()
    harness.add(requests[3])
    harness.run()
    harness.check_results()


def test_a_watermark_leaves_pages_for_those_that_run():
    counts = []
    for watermark in (0.0, 0.3):
        setup = Setup(num_pages=21, page_size=4, max_num_seqs=8, budget=64)
        harness = Harness(setup)
        harness.scheduler._admission = Admission(watermark=watermark)
        for id in range(12):
            harness.add(setup.request(id, prompt(8, seed=id), 16))
        harness.run()
        harness.check_results()
        counts.append(harness.scheduler.stats()["preemptions"])
    assert counts[1] < counts[0]


def test_a_tenant_runs_no_more_than_it_may():
    setup = Setup(max_num_seqs=4, num_pages=200, budget=64)
    harness = Harness(setup)
    harness.scheduler._tenants = Tenants(2, None)
    for id in range(10):
        harness.add(setup.request(id, prompt(5, seed=id), 4, tenant="ab"[id >= 6]))
    most = {"a": 0, "b": 0}
    while harness.scheduler.has_work:
        harness.step()
        for tenant in most:
            running = [r for r in harness.scheduler.running() if r.params.tenant == tenant]
            most[tenant] = max(most[tenant], len(running))
    harness.check_results()
    assert most == {"a": 2, "b": 2}


def test_a_tenant_spends_no_more_than_its_rate():
    """Time enters as an event: no clock is looked at."""
    setup = Setup(max_num_seqs=8, num_pages=200, budget=64)
    harness = Harness(setup)
    scheduler = harness.scheduler
    scheduler._tenants = Tenants(None, 10.0)
    requests = [setup.request(id, prompt(6, seed=id), 4, tenant="a") for id in range(6)]
    other = setup.request(6, prompt(6, seed=9), 4, tenant="b")
    for request in (*requests, other):
        harness.add(request)
    seconds, others_end = 0.0, None
    while scheduler.has_work:
        scheduler.refill(0.1)
        seconds += 0.1
        plan = scheduler.schedule()
        if plan is not None:
            scheduler.update(plan, harness.device.run(plan, scheduler.tables.copy()))
        if other.status is Status.FINISHED and others_end is None:
            others_end = seconds
        assert seconds < 60
    spent = sum(len(r.prompt_token_ids) + len(r.output_token_ids) for r in requests)
    assert spent / 10 - 2 <= seconds <= spent / 10 + 2
    assert others_end < 1.5, "who has a rate of its own waits for nobody"
    assert scheduler.wait_s() is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_queue_is_in_order_whatever_comes_and_goes(policy):
    rng = random.Random(0)
    setup, queue = Setup(), Waiting(policy, 10, 4)
    present = []
    for id in range(300):
        request = setup.request(id, prompt(rng.randint(1, 20)), rng.randint(0, 9))
        request.preemptions = rng.randint(0, 1)
        queue.add(request, id)
        present.append(request)
        while present and rng.random() < 0.45:
            queue.remove(gone := present.pop(rng.randrange(len(present))))
            queue.forget(gone)
        assert len(queue) == len(present)
        assert [r.id for r in queue] == [
            r.id for r in sorted(present, key=lambda r: (*POLICIES[policy](r), r.id))
        ]
        first = queue.first(id, lambda request: request.id % 3)
        aged = [r.id for r in present if id - r.id >= 10]
        assert [r.id for r in first][: min(4, len(aged))] == sorted(aged)[:4]
        assert len({r.id for r in first}) == len(first) <= 8


@pytest.mark.parametrize("limits", [(1, None), (None, 10.0)])
def test_one_tenants_queue_hides_nobody_behind_it(limits):
    """As many of `a` wait as there are rows, and more; who comes after them starts all the same."""
    setup = Setup(max_num_seqs=4, num_pages=200)
    harness = Harness(setup)
    harness.scheduler._tenants = Tenants(*limits)
    for id in range(40):
        harness.add(setup.request(id, prompt(30, seed=id), 8, tenant="a"))
    other = setup.request(40, prompt(8), 4, tenant="b")
    harness.add(other)
    for _ in range(20):
        harness.step() if limits[0] else try_step(harness)
    assert other.status is Status.FINISHED


def try_step(harness):
    """Runs a step if there is one; who waits for a refill is not stuck."""
    plan = harness.scheduler.schedule()
    if plan is not None:
        tokens = harness.device.run(plan, harness.scheduler.tables.copy())
        harness.scheduler.update(plan, tokens)


def test_a_tenant_that_has_nothing_left_is_forgotten():
    tenants = Tenants(1, 10.0)
    for id in range(1000):
        request = Setup().request(id, [1], 1, tenant=f"user {id}")
        tenants.start(request, 1)
        tenants.stop(request)
        tenants.finish(request)
    tenants.refill(100.0)
    assert not tenants._running and not tenants._allowance


def test_a_fork_pays_for_what_it_draws_itself():
    tenants = Tenants(None, 10.0)
    request = Setup().request(0, [1], 100, tenant="a")
    request.output_token_ids, request.given_tokens = [1] * 90, 88
    tenants.finish(request)
    assert tenants._allowance == {"a": 8.0}

# SPDX-License-Identifier: Apache-2.0
"""Whatever comes and goes, in whichever tier: every page is accounted for, tokens are one's own."""

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from engine.pages import PageGroup
from engine.request import Status
from engine.waiting import POLICIES
from tests.engine.fake_device import END, VOCABULARY, Harness, Setup

BASES = [[random.Random(seed).randrange(VOCABULARY) for _ in range(60)] for seed in range(3)]
SPACES = [None, None, None, ("salt", ()), ("sal", ())]


@st.composite
def setups(draw):
    """Draws a small engine with all tiers, too small for what comes."""
    window = draw(st.integers(1, 20))
    full, windowed = PageGroup(None), PageGroup(window)
    host = draw(st.sampled_from([0, 12, 30, 30]))
    page_size = draw(st.sampled_from([1, 2, 4, 8]))
    return Setup(
        groups=draw(st.sampled_from([(full,), (full,), (full, windowed), (windowed,)])),
        page_size=page_size,
        num_pages=draw(st.integers(6, 30)) * (4 if page_size < 4 else 1),
        max_num_seqs=draw(st.integers(1, 5)),
        budget=draw(st.sampled_from([2, 7, 16, 64])),
        max_model_len=70,
        patience=draw(st.sampled_from([0, 8])),
        lag=draw(st.integers(0, 2)),
        prefix_cache=True,
        host_pages=host,
        disk_pages=draw(st.sampled_from([0, 5, 200, 200])) if host else 0,
        preemption=draw(st.sampled_from(["recompute", "park"])),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        age_bound=draw(st.sampled_from([0, 20, 1024])),
        pinned=draw(st.integers(0, 7)) == 0,
    )


@st.composite
def prompts(draw):
    """Draws a prompt that is likely to begin as others do."""
    first, second = draw(st.sampled_from(BASES)), draw(st.sampled_from(BASES))
    return first[: draw(st.integers(1, 50))] + second[: draw(st.sampled_from([0, 0, 1, 3, 9]))]


class Histories(RuleBasedStateMachine):
    """Requests that share prefixes come, are aborted, and go on from each other's texts."""

    @initialize(setup=setups(), seed=st.integers(0, 99))
    def start(self, setup, seed):
        self.setup = setup
        self.harness = Harness(setup)
        self.harness.random.seed(seed)

    def arrive(self, ids, space, **fields):
        setup = self.setup
        ids = ids[: setup.max_model_len]
        if setup.least_pages(len(ids)) > setup.num_pages - 1:
            return
        if setup.pinned and self.harness.scheduler._rows.is_narrow(len(ids)):
            return
        number = len(self.harness.requests)
        self.harness.add(setup.request(number, ids, space=space, **fields))

    @rule(
        ids=prompts(),
        space=st.sampled_from(SPACES),
        max_tokens=st.integers(0, 20),
        ends=st.sampled_from([(), (END,)]),
        scored=st.sampled_from([None, None, None, 1]),
    )
    def new_request(self, ids, space, max_tokens, ends, scored):
        self.arrive(ids, space, max_tokens=max_tokens, end_ids=ends, prompt_logprobs=scored)

    @rule(seed=st.integers(0, 9999))
    def burst(self, seed):
        """Several requests that share beginnings, and steps between them."""
        rng = random.Random(seed)
        for _ in range(rng.randint(3, 8)):
            ids = rng.choice(BASES)[: rng.randint(1, 50)] + rng.choice(BASES)[: rng.choice([0, 2])]
            fields = {"max_tokens": rng.randint(0, 20), "priority": rng.randint(0, 2)}
            self.arrive(ids, rng.choice(SPACES), **fields)
            for _ in range(rng.randint(0, 5)):
                self.harness.step()

    @rule(data=st.data(), more=st.integers(1, 9))
    def next_turn(self, data, more):
        ended = [r for r in self.harness.requests if r.status is Status.FINISHED]
        if ended:
            last = data.draw(st.sampled_from(ended))
            ids = last.prompt_token_ids + last.output_token_ids + BASES[0][:more]
            self.arrive(ids, last.cache_space, max_tokens=more)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.harness.step()

    @rule(data=st.data())
    def abort(self, data):
        alive = [r for r in self.harness.requests if r.status is not Status.FINISHED]
        if alive:
            self.harness.scheduler.abort(data.draw(st.sampled_from(alive)).id)

    @rule(data=st.data(), steps=st.integers(0, 9))
    def fork(self, data, steps):
        """One more goes on from where another is, as `Engine.fork` has it, some steps later."""
        for _ in range(steps):
            self.harness.step()
        requests = self.harness.requests
        alive = [r for r in requests if r.status is not Status.FINISHED]
        alive = [r for r in alive if r.params.prompt_logprobs is None]
        if alive and not self.setup.pinned:
            # Of one with a text, if there is one: by chance there are too few.
            with_text = [request for request in alive if request.output_token_ids]
            original = data.draw(st.sampled_from(with_text or alive))
            self.harness.scheduler.show_tail(original)
            request = original.as_new(sample=len(requests))
            request.id = len(requests)
            request.output_token_ids = list(original.output_token_ids)
            self.harness.add(request)
            FORKED.append(len(request.output_token_ids))

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def change_policy(self, policy):
        self.harness.scheduler.set_policy(policy)

    @rule()
    def clear(self):
        if self.harness.random.random() < 0.2:
            self.harness.scheduler.cache.clear()

    @rule()
    def lose_a_file(self):
        """A segment could not be written, as on a full disk."""
        if self.harness.device.disk and self.setup.disk_pages:
            number = self.harness.random.choice(sorted(self.harness.device.disk))
            self.harness.scheduler.cache.tiers.lost({number})

    @invariant()
    def all_is_accounted_for(self):
        if hasattr(self, "harness"):
            self.harness.check_state()

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        self.harness.check_results()
        self.harness.check_state()
        scheduler = self.harness.scheduler
        free = scheduler._pool.num_free(0)
        assert free + scheduler._pool.counts(0, 0).cached <= self.setup.num_pages - 1
        scheduler.cache.kept.make_room(self.setup.num_pages - 1)  # all that is kept can go
        self.harness.device.move(scheduler.take_moves())
        self.harness.check_state()
        TOTALS.append(scheduler.stats())


TOTALS, FORKED = [], []
QUIET = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "phases": [Phase.generate],  # shrinking takes minutes
}


def play(count, part=0):
    """Plays so many histories; those of another `part` are others."""
    TOTALS.clear()
    FORKED.clear()
    machine = hypothesis.seed(part)(type("Histories", (Histories,), {}))
    options = settings(max_examples=count, stateful_step_count=40, **QUIET)
    run_state_machine_as_test(machine, settings=options)
    assert len(TOTALS) >= count
    done = {key: sum(stats["cache"][key] for stats in TOTALS) for key in WANTED}
    assert all(done.values()), f"the histories leave something out: {done}"
    assert sum(stats["preemptions"] for stats in TOTALS) > count // 10
    assert sum(map(bool, FORKED)) > count // 10, "hardly any fork was of a text"


WANTED = (
    "hit_tokens",
    "resumed_tokens",
    "copied_pages",
    "evicted_pages",
    "host_in_pages",
    "host_out_pages",
    "disk_in_pages",
    "disk_out_pages",
    "damaged_pages",
)


def test_any_history_keeps_account_of_every_page():
    play(100)


@pytest.mark.slow
@pytest.mark.long
def test_a_thousand_histories_keep_account_of_every_page():
    """In two processes, since they need no device."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert len(list(pool.map(play, [500, 500], [1, 2]))) == 2

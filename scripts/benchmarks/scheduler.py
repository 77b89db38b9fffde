# SPDX-License-Identifier: Apache-2.0
"""The suite scheduler: host time of a step, with programs of no work in the device's place.

The engine, its scheduler, packing, delivery and tokenizer are the real ones, and so is the tree of
the model's parameters, each of one number. The stand-ins take and return what a body and a head do.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import store
from checkpoints.tokenizer import Tokenizer
from engine.batch import BatchShape
from engine.buckets import Ladder
from engine.kv import kv_layout
from engine.loading import abstract_parameters, open_model
from engine.loop import Engine
from engine.models.tree import fuse
from engine.mover import Mover
from engine.pages import PagePool
from engine.params import SamplingParams
from engine.request import Request
from engine.scheduler import Scheduler
from engine.state import empty_state
from engine.step import Hidden
from engine.worker import Worker
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Figures, Run, medians, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.command_line import usage_errors
from sharding import RULES, make_mesh

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS = 16
STEPS = 200
# Results at the end, as `generate` gives them, or text at every token.
KINDS = {"whole": False, "streamed": True}
PAGE_SIZE = 16
BUDGET = 512
TOKEN = 1000  # what every row says; a word


@dataclasses.dataclass
class Clock:
    """Seconds inside jax: in calls of the stand-ins, and waiting for what they return."""

    calls_s: float = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call`, whose time counts."""

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            self.calls_s += time.perf_counter() - start
            return result

        return timed


class StandIns(Mapping):
    """Programs of no work under the keys of real ones: a body or a head of any size."""

    def __init__(self, clock: Clock, state: Any, hidden: Hidden) -> None:
        self.seconds: dict[str, float] = {}
        self._state, self._hidden, self._clock = state, hidden, clock
        # As a compiled step's, the state is donated and the rest is new.
        self._body = jax.jit(
            lambda params, state, packed: (state, jax.tree.map(jnp.zeros_like, hidden)),
            donate_argnums=1,
        )
        self._heads: dict[int, Callable[..., Any]] = {}

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        if key == "start":
            return lambda: jax.tree.map(jnp.copy, self._state)
        if isinstance(key, tuple) and isinstance(key[0], tuple):
            return self._clock.timed(self._body)
        return self._clock.timed(self.head(key.rows))

    def head(self, rows: int) -> Callable[..., Any]:
        """Returns the stand-in of a head of so many rows."""
        if rows not in self._heads:
            self._heads[rows] = jax.jit(
                lambda params, state, hidden: (state, (jnp.full((rows,), TOKEN, jnp.int32), None)),
                donate_argnums=1,
            )
        return self._heads[rows]

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclasses.dataclass
class Bench:
    """An engine of stand-ins, and what its calls are made of."""

    engine: Engine
    clock: Clock
    stand_ins: StandIns
    params: Any
    hidden: Hidden
    new_state: Callable[[], Any]
    shape: BatchShape
    ladder: Ladder


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the figures at each number of running rows."""
    with usage_errors():
        model = open_model(store.resolve(settings.model))
    benches = {rows: make_bench(model.config, model.tokenizer, rows) for rows in ROWS}
    runs: dict[str, Run] = {
        f"{rows} {name}": partial(run_steps, bench, streams)
        for rows, bench in benches.items()
        for name, streams in KINDS.items()
    }
    for run in runs.values():
        run()  # warms up
    rounds, void = quiet_rounds(runs, [os.getpid()], settings.repeats or 5, settings.most_void)
    rows = [
        {"rows": rows, "kind": name, **medians([r[f"{rows} {name}"] for r in rounds])}
        for name in KINDS
        for rows in ROWS
    ]
    growth = {name: most_growth(rounds, name) for name in KINDS}
    return {"scheduler": rows, "row_s": growth, "void": void, "rounds": rounds}


def most_growth(rounds: list[dict[str, Figures]], kind: str) -> float:
    """Returns the most host time that a row adds to a step, from 32 rows on: medians."""
    return max(
        statistics.median(
            (figures[f"{rows} {kind}"]["host_s"] - figures[f"32 {kind}"]["host_s"]) / (rows - 32)
            for figures in rounds
        )
        for rows in ROWS
        if rows > 32
    )


def make_bench(config: Any, tokenizer: Tokenizer | None, rows: int) -> Bench:
    """Returns an engine of `rows` rows over stand-ins, for the tree of a model's parameters."""
    mesh = make_mesh(jax.local_devices()[:1])
    dtype = np.dtype(np.float32)
    stacked = jax.default_backend() != "cpu"
    tree = abstract_parameters(config, mesh, RULES, dtype, stacked=stacked)
    tree = tree if stacked else fuse(tree)
    params = jax.tree.map(lambda leaf: jnp.zeros((1,) * len(leaf.shape), leaf.dtype), tree)
    layout = kv_layout(config, PAGE_SIZE, dtype)
    length = PROMPT_TOKENS + STEPS + 1
    budget = max(BUDGET, rows)
    ladder = Ladder(rows, budget)
    shape = BatchShape(len(layout.groups), -(-length // PAGE_SIZE), rows)
    pages = rows * shape.pages_per_row * len(layout.groups) + 1
    tiny = dataclasses.replace(layout, kv_heads=1, cell_width=2, values=(1, 2))
    state = empty_state(tiny, 2, rows + 1, 8, stacked=stacked)
    hidden = Hidden(
        sampled_SD=jnp.zeros((rows, 8)),
        row_S=jnp.zeros((rows,), jnp.int32),
        prompt_CD=None,
        broken_B=None,
    )
    clock = Clock()
    stand_ins = StandIns(clock, state, hidden)

    def make_scheduler() -> Scheduler:
        return Scheduler(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            page_size=PAGE_SIZE,
            max_model_len=length,
            groups=layout.groups,
            pool=PagePool(pages, 1, len(layout.groups)),
            ladder=ladder,
        )

    engine = Engine(
        worker=Worker(
            stand_ins,  # type: ignore[arg-type]  # what the engine asks of them, they have
            params,
            config,
            [Mover(stand_ins, None, None)],
        ),
        store=None,  # type: ignore[arg-type]  # only `stats` asks it
        make_schedulers=lambda: [make_scheduler()],
        ladder=ladder,
        shape=shape,
        tokenizer=tokenizer,
        overlap=True,
    )
    new_state = stand_ins["start"]
    return Bench(engine, clock, stand_ins, params, hidden, new_state, shape, ladder)


def run_steps(bench: Bench, streams: bool) -> Figures:
    """Returns the host's time of a step while all rows decode, and the stand-ins' call time."""
    engine, rows = bench.engine, bench.ladder.rows
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 1, ignore_eos=True)
    for _ in range(rows):
        request = Request(
            prompt_token_ids=[3] * PROMPT_TOKENS,
            params=params,
            limit=PROMPT_TOKENS + STEPS + 1,
            seed=0,
        )
        engine.add_request(request, streams=streams)
    while engine.scheduler.stats()["waiting"] or not all_decode(engine):
        engine.step()
    before, start = bench.clock.calls_s, time.perf_counter()
    steps = STEPS // 2
    for _ in range(steps):
        engine.step()
    whole_s = time.perf_counter() - start
    calls_s = bench.clock.calls_s - before
    while engine.has_work:
        engine.step()
    call_s = ready_call_s(bench)
    host_s = (whole_s - calls_s) / steps
    return {
        "step_s": whole_s / steps,
        "host_s": host_s,
        "token_s": host_s / rows,
        "call_s": call_s,
        "host_over_call": host_s / call_s,
    }


def all_decode(engine: Engine) -> bool:
    return not any(r.prefills for r in engine.scheduler.running())


def ready_call_s(bench: Bench) -> float:
    """Returns what a body and a head of no work take to call, with arguments that are there."""
    body = bench.ladder.bodies[0]
    packed = jax.device_put(np.zeros(bench.shape.size(body), np.int32))
    program, head = bench.stand_ins._body, bench.stand_ins.head(bench.ladder.rows)
    state = bench.new_state()
    head_params = {"embedding": bench.params["embedding"]}
    times = []
    for _ in range(100):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, hidden = program(bench.params, state, packed)
        state, _ = head(head_params, state, hidden)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def tables(figures: dict[str, Any]) -> list[Table]:
    rows = [
        [
            str(row["rows"]),
            row["kind"],
            shown(row["host_s"], ".0f", 1e6),
            shown(row["token_s"], ".1f", 1e6),
            shown(row["call_s"], ".0f", 1e6),
            shown(row["host_over_call"], ".2f"),
            shown(row["foreign_cores"], ".2f"),
            str(figures["void"]),
        ]
        for row in figures["scheduler"]
    ]
    heads = [
        "rows",
        "results",
        "host us a step",
        "us a token",
        "call us",
        "host/call",
        "foreign",
        "void",
    ]
    growth = ", ".join(f"{s * 1e6:.2f} us {name}" for name, s in figures["row_s"].items())
    title = f"Host: planning, packing, delivery. At most so much more a row from 32 on: {growth}"
    return [Table(title, heads, rows)]


def charts(figures: dict[str, Any]) -> list[Chart]:
    rows = figures["scheduler"]
    labels = [f"{rows} rows" for rows in ROWS]
    series = {
        f"host, {name}": [row["host_s"] * 1e6 for row in rows if row["kind"] == name]
        for name in KINDS
    }
    calls = [row["call_s"] * 1e6 for row in rows if row["kind"] == "whole"]
    series["stand-in's call"] = calls
    return [Chart("scheduler", "Host time of a step", "us", labels, series)]

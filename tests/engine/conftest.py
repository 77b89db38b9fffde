# SPDX-License-Identifier: Apache-2.0
"""One engine a model for all tests here, and engines of other sizes on its compiled programs.

Programs take most of a test's time. The pool that a scheduler hands out may be smaller than the
one the programs were compiled for, and so may its token budget: small pools and odd chunks need
no programs of their own.
"""

import concurrent.futures
import copy
import functools
import pathlib

import jax
import numpy as np
import pytest

from engine import LLM, SamplingParams, programs
from engine.buckets import Group
from engine.host_pages import page_places
from engine.loading import load_model
from engine.loop import Engine
from engine.models.oracle import forward_jit
from engine.mover import Mover
from engine.pages import PagePool
from engine.plan import Plan
from engine.request import Request
from engine.scheduler import Scheduler
from engine.worker import Worker
from sharding import RULES, make_mesh
from tests.fixtures import (
    byte_tokenizer,
    fallback_tokenizer,
    script_table,
    write_script,
    write_tiny,
)

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden"
TINY_OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "num_pages": 600}


@pytest.fixture(scope="session")
def tiny_folder(own_cache, tmp_path_factory) -> pathlib.Path:
    """The TINY llama (F2) with a byte-level tokenizer."""
    return write_tiny(tmp_path_factory.mktemp("tiny"), tokenizer=byte_tokenizer())


@pytest.fixture(scope="session")
def tiny(tiny_folder) -> LLM:
    """The TINY llama with 64 rows, 64 tokens a step, context 128."""
    return LLM(str(tiny_folder), **TINY_OPTIONS)


class OnDemand(programs.Executables):
    """Programs that are made when a test asks for them, and not before."""

    def __init__(self, store, made, progress, threads):
        super().__init__(store, made, lambda line: None, threads=0)

    def wait(self):
        pass


def open_on_demand(path, **options) -> LLM:
    """Returns an LLM that has compiled nothing yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "Executables", OnDemand)
        return LLM(str(path), **options)


@functools.lru_cache(maxsize=4)  # a process may have 65,530 mappings, and a program takes many
def golden(arch, **options) -> LLM:
    """The tiny checkpoint of a family that golden figures were made of, 64 tokens a step.

    Gemma 3 has windows of 16 beside full attention, so four page groups in one pool; it has rows
    for several requests. The others have two bodies, of a decode and of the widest chunks.
    """
    rows = 2 if arch == "gemma3" else 1
    path, sizes = GOLDEN / "tiny" / arch, {"max_num_seqs": rows, "max_num_batched_tokens": 64}
    llm = open_on_demand(path, **sizes, **options)
    if rows == 1:
        llm.built.ladder.bodies = (Group("decode", 1, 1),), (Group("chunk", 2, 32),)
    return llm


def make_together(calls):
    """Makes what tests will compile on two threads: while one traces, the other compiles."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda call: call(), calls))


def parameters(model):
    """Returns the parameters of an opened model in float32, a tree of unstacked layers."""
    mesh = make_mesh(jax.local_devices()[:1])
    return load_model(model, mesh, RULES, np.dtype(np.float32), stacked=False)


def same_parameters(one, other) -> None:
    """Asserts that two trees of parameters are equal, bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def engine_on(
    llm: LLM, *, num_pages=None, budget=None, overlap=True, static=False, prefix_cache=True
) -> Engine:
    """Returns a fresh engine on `llm`'s programs, with a pool or token budget of its own."""
    built = llm.built
    layout, shape = built.factory.cfg.layout, built.factory.cfg.shape
    budget = budget or llm.config.max_num_batched_tokens
    ladder = copy.copy(built.ladder)
    ladder.rows = min(ladder.rows, budget)  # each running row needs a token of the budget

    def make_scheduler():
        return Scheduler(
            max_num_seqs=shape.num_rows,
            max_num_batched_tokens=budget,
            page_size=layout.page_size,
            max_model_len=llm.built.max_model_len,
            groups=layout.groups,
            pool=PagePool(num_pages or built.factory.num_pages, 1, len(layout.groups)),
            ladder=ladder,
            static=static,
            pinned=llm.config.deterministic,
            decode_steps=llm.config.decode_steps,
            prefix_cache=prefix_cache,
        )

    cfg = built.factory.cfg
    [places] = page_places(cfg.mesh, cfg.rules, built.factory.slot())
    worker = built.engine.worker
    movers = [Mover(worker.programs, None, places)]
    return Engine(
        worker=Worker(worker.programs, worker.params, llm.model_config, movers),
        store=built.store,
        make_schedulers=lambda: [make_scheduler()],
        ladder=ladder,
        shape=shape,
        tokenizer=llm.tokenizer,
        overlap=overlap,
    )


def run(llm: LLM, engine: Engine, jobs, check=None, most_steps=5000):
    """Returns the outputs of `jobs` [(prompt ids, SamplingParams)] in order, all added at once."""
    requests = [llm.make_request(prompt, params)[0] for prompt, params in jobs]
    for request in requests:
        engine.add_request(request)
    outputs = {}
    for _ in range(most_steps):
        if not engine.has_work:
            break
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        if check is not None:
            check(engine)
    assert not engine.has_work, f"still at work after {most_steps} steps"
    return [outputs[request.id] for request in requests]


def watch_plans(engine: Engine) -> list[Plan]:
    """Returns a list that every plan of `engine` is added to."""
    plans, schedule = [], engine.partitions.schedule

    def watched():
        step = schedule()
        plans.extend(plan for _, plan in step.some) if step is not None else None
        return step

    engine.partitions.schedule = watched
    return plans


def greedy(max_tokens, **fields):
    """Returns greedy parameters that run to the end of their tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


class Oracle:
    """Full recomputation of every token, no cache and no batch, one compiled length."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.length = llm.max_model_len

    @functools.cache  # noqa: B019 - one oracle a session
    def logits(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Returns float32 [len(token_ids), V]; later padding cannot be seen."""
        padded = np.zeros(self.length, np.int32)
        padded[: len(token_ids)] = token_ids
        logits, _ = forward_jit(self.llm.engine.worker.params, self.llm.model_config, padded)
        return np.asarray(logits)[: len(token_ids)]

    def logprobs(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """Returns log-softmax of `logits` in float64."""
        logits = self.logits(token_ids).astype(np.float64)
        high = logits.max(axis=-1, keepdims=True)
        return logits - high - np.log(np.exp(logits - high).sum(axis=-1, keepdims=True))

    def check_greedy(self, prompt, output, *, margin=1e-3):
        """Asserts that `output` is the greedy continuation, up to the first margin under `margin`.

        Returns how many tokens were compared.
        """
        logits = self.logits((*prompt, *output))
        for place, token in enumerate(output):
            row = logits[len(prompt) + place - 1]
            second, first = np.partition(row, -2)[-2:]
            if first - second < margin:
                return place
            assert token == int(row.argmax()), f"token {place} of {output} after {prompt}"
        return len(output)


@pytest.fixture(scope="session")
def oracle(tiny) -> Oracle:
    return Oracle(tiny)


def make_prompts(rng, count, low=1, high=60, vocabulary=300) -> list[list[int]]:
    """Returns random prompts of `low` to `high` ids."""
    return [
        [int(i) for i in rng.integers(3, vocabulary, rng.integers(low, high + 1))]
        for _ in range(count)
    ]


def request_of(llm: LLM, prompt, params) -> Request:
    return llm.make_request(prompt, params)[0]


class Script:
    """A model whose next-token logits are any table (F1), one engine for all tests."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.width = llm.engine.worker.params["head"].shape[1]

    def show(self, table) -> None:
        """Makes the logits after token t the row t of `table`."""
        head = np.zeros((len(table), self.width), np.float32)
        head[:, : len(table)] = np.asarray(table, np.float64).T * np.sqrt(1 / self.width + 1e-5)
        params = self.llm.engine.worker.params
        params = {**params, "head": jax.numpy.asarray(head, params["head"].dtype)}
        self.llm.engine.worker.params = params

    def say(self, ids, then=2) -> None:
        """Makes it say `ids` after any prompt that is not among them, and then `then` for ever."""
        table = script_table(ids, then=then)
        table[then] = 0
        table[then, then] = 10.0
        self.show(table)

    def run(self, prompts=None, **fields):
        """Returns the first completion of each prompt; of one prompt [0], that completion."""
        fields = {"temperature": 0, "max_tokens": 40} | fields
        outputs = self.llm.generate(prompts or [[0]], SamplingParams(**fields))
        firsts = [output.outputs[0] for output in outputs]
        return firsts if prompts else firsts[0]


SCRIPT_OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_pages": 129}


@pytest.fixture(scope="session")
def script(own_cache, tmp_path_factory) -> Script:
    """A scripted model with a byte-level tokenizer (F3)."""
    folder = tmp_path_factory.mktemp("script")
    write_script(folder, script_table([5, 6, 7]), tokenizer=byte_tokenizer())
    return Script(open_on_demand(folder, **SCRIPT_OPTIONS))


@pytest.fixture(scope="session")
def fallback_script(own_cache, tmp_path_factory) -> Script:
    """A scripted model with a SentencePiece-style tokenizer (F3b)."""
    folder = tmp_path_factory.mktemp("fallback_script")
    write_script(folder, script_table([5, 6, 7]), tokenizer=fallback_tokenizer())
    return Script(open_on_demand(folder, **SCRIPT_OPTIONS))

# SPDX-License-Identifier: Apache-2.0
"""A device of cells: it runs plans by their tables alone, and notices every wrong cell.

Each cell remembers what was written: the group, whose tenant's it is, and all tokens up to its own,
which its keys and values are a function of. A sampled token is a function of the tokens that its
query finds through the page tables, group by group, within the windows; so a page that is missing,
freed early, stale or of another prefix is caught, and the tokens can be predicted.
"""

import dataclasses
import random
from collections import deque

from engine.buckets import Ladder
from engine.moves import Delete, Load, Save
from engine.pages import NULL_PAGE, FilePool, PageGroup, PagePool
from engine.params import SamplingParams
from engine.request import Request, Status
from engine.scheduler import Scheduler
from engine.waiting import Admission

VOCABULARY = 17
END = 3


def next_token(visible):
    """Returns the token that follows what each group sees: a fixed, well mixed function."""
    return hash(tuple(visible)) // 7 % VOCABULARY


def visible_tokens(tokens, groups):
    """Returns what the query at the last of `tokens` sees, by group."""
    last = len(tokens) - 1
    return [tuple(tokens[group.first_cell(last) :]) for group in groups]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A small engine."""

    groups: tuple[PageGroup, ...] = (PageGroup(None),)
    page_size: int = 4
    num_pages: int = 33
    max_num_seqs: int = 4
    budget: int = 16
    max_model_len: int = 64
    patience: int = 8
    policy: str = "fcfs"
    age_bound: int = 1024
    static: bool = False
    prefix_cache: bool = False
    pinned: bool = False
    host_pages: int = 0  # 0: no such tier
    disk_pages: int = 0
    preemption: str = "recompute"
    lag: int = 1  # steps planned before one is read; 0: no overlap

    def scheduler(self):
        return Scheduler(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            groups=self.groups,
            pool=PagePool(self.num_pages, 1, len(self.groups)),
            ladder=Ladder(self.max_num_seqs, self.budget, pinned=self.pinned),
            admission=Admission(
                patience=self.patience, policy=self.policy, age_bound=self.age_bound
            ),
            static=self.static,
            prefix_cache=self.prefix_cache,
            pinned=self.pinned,
            lower=self.lower_pools(),
            preemption=self.preemption,
        )

    def lower_pools(self):
        pools = [PagePool(self.host_pages, 1, len(self.groups))] if self.host_pages else []
        return [*pools, FilePool(self.disk_pages, len(self.groups))] if self.disk_pages else pools

    def request(self, id, prompt, max_tokens=8, end_ids=(), *, space=None, **fields):
        return Request(
            id=id,
            prompt_token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens, **fields),
            limit=min(len(prompt) + max_tokens, self.max_model_len),
            seed=0,
            end_ids=end_ids,
            cache_space=space,
        )

    def least_pages(self, length):
        """Returns the most pages held at once by a request alone as it stores `length` cells."""
        return max(
            sum(q // self.page_size + 1 - g.first_cell(q) // self.page_size for g in self.groups)
            for q in range(length)
        )

    def oracle(self, request):
        """Returns (output tokens, reason) of the request when it is alone."""
        tokens, output = list(request.prompt_token_ids), []
        limit = min(len(tokens) + request.params.max_tokens, self.max_model_len)
        while len(tokens) < limit:
            if output and self.least_pages(len(tokens)) > self.num_pages - 1:
                return output, "capacity"
            token = next_token(visible_tokens(tokens, self.groups))
            tokens.append(token)
            output.append(token)
            if token in request.end_ids:
                return output, "stop"
        return output, "length"


class FakeDevice:
    """Runs plans in order. Row state (last token, position) lives here, as on the real device."""

    def __init__(self, setup):
        self.setup = setup
        self.cells = {}  # (page, offset) -> (group, cache space, tokens up to its own)
        self.slots, self.disk = {}, {}  # number -> the cells of a page
        self.loads = []  # asked for from disk, not delivered yet
        self.last_token = {}  # row -> token
        self.position = {}  # row -> its position
        self.sequences = {}  # request id -> tokens, prompt and all sampled
        self.scored = {}  # request id -> prompt positions scored, in order

    def run(self, plan, tables):
        """Returns the tokens of `plan.sampled`."""
        self.move(plan.moves)
        for piece in plan.pieces:
            tokens = piece.request.tokens(piece.start, piece.stop)
            known = piece.request.tokens(0, piece.request.known)
            sequence = self.sequences.setdefault(piece.request.id, known)
            assert sequence[: len(known)] == known
            if self.setup.pinned:  # what was drawn before is drawn again
                del sequence[len(known) :]
            assert len(sequence) == len(known), "chunks run only when all tokens are read"
            for position, token in enumerate(tokens, piece.start):
                self.write(tables, piece.row, piece.request, position, token)
            self.position[piece.row] = piece.stop
            if piece.scores is not None:
                assert piece.start <= piece.scores[0] < piece.scores[1] <= piece.stop
                self.scored.setdefault(piece.request.id, []).extend(range(*piece.scores))
        assert plan.rows == tuple(request.row for request in plan.sampled)
        for request in plan.decodes:
            row = request.row
            self.write(tables, row, request, self.position[row], self.last_token[row])
            self.position[row] += 1
        for piece in plan.pieces:  # every query of a piece sees what it should
            for query in range(piece.start, piece.stop):
                self.read(tables, piece.row, piece.request, query)
        drawn = []
        for request, row in zip(plan.sampled, plan.rows, strict=True):
            query = self.position[row] - 1
            token = next_token(self.read(tables, row, request, query))
            assert query == len(self.sequences[request.id]) - 1, "a token is drawn once"
            self.sequences[request.id].append(token)
            self.last_token[row] = token
            drawn.append(token)
        return drawn

    def page(self, number):
        return [self.cells.get((number, offset)) for offset in range(self.setup.page_size)]

    def move(self, moves):
        """Moves pages between device, slots and disk, in order."""
        for move in moves:
            if isinstance(move, Load):
                self.loads.append((move, [self.disk[number] for number in move.numbers]))
            elif isinstance(move, Delete):
                for number in move.numbers:
                    del self.disk[number]
            elif isinstance(move, Save):
                for _, _, slot, number in move.entries:
                    self.disk[number] = self.slots[slot]
            elif move.kind == "park":
                self.slots[move.target] = self.page(move.source)
            else:
                page = self.slots[move.source] if move.kind == "restore" else self.page(move.source)
                self.cells |= {(move.target, offset): cell for offset, cell in enumerate(page)}

    def deliver(self, load, pages):
        self.slots |= dict(zip(load.slots, pages, strict=True))

    def write(self, tables, row, request, position, token):
        place, offset = divmod(position, self.setup.page_size)
        for group in range(len(self.setup.groups)):
            page = int(tables[group, row, place])
            assert page != NULL_PAGE, f"position {position} of {request.id} has no page"
            tokens = self.sequences[request.id][:position]
            self.cells[page, offset] = (group, request.cache_space, (*tokens, token))

    def read(self, tables, row, request, query):
        """Returns the tokens that `query` sees, by group; fails on a cell of anybody else."""
        sequence = self.sequences[request.id]
        seen = []
        for group, kind in enumerate(self.setup.groups):
            tokens = []
            for position in range(kind.first_cell(query), query + 1):
                place, offset = divmod(position, self.setup.page_size)
                page = int(tables[group, row, place])
                assert page != NULL_PAGE, f"query {query} of {request.id} sees a freed page"
                cell = self.cells.get((page, offset))
                assert cell == (group, request.cache_space, tuple(sequence[: position + 1]))
                tokens.append(cell[2][-1])
            seen.append(tuple(tokens))
        return seen


class Harness:
    """The engine's loop around a scheduler and the fake device, with every check after each step.

    `step` plans and runs one step, and reads the one `lag` steps before it.
    """

    def __init__(self, setup):
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.device = FakeDevice(setup)
        self.unread = deque()
        self.requests = []
        self.plans = 0
        self.random = random.Random(0)

    def add(self, request):
        self.scheduler.add(request)
        self.requests.append(request)

    def step(self):
        """Returns the plan that ran, or None."""
        plan = self.scheduler.schedule()
        ended = self.scheduler.drain()
        if plan is not None:
            self.plans += 1
            self.check_plan(plan)
            tokens = self.device.run(plan, self.scheduler.tables.copy())
            self.unread.append((plan, tokens))
        else:
            moves = self.scheduler.take_moves()
            self.device.move(moves)
            if not (self.unread or self.device.loads or moves or ended):
                assert not self.scheduler.has_work, "nothing runs, nothing is read: stuck"
        self.check_state()
        self.finish_loads(all=plan is None)
        while self.unread and (len(self.unread) > self.setup.lag or plan is None):
            self.scheduler.update(*self.unread.popleft())
            self.check_state()
        return plan

    def finish_loads(self, all=False):
        """Delivers what was asked for from disk: some of it, whole or damaged, or all."""
        while self.device.loads and (all or self.random.random() < 0.5):
            load, pages = self.device.loads.pop(0)
            is_whole = self.random.random() < 0.9
            if is_whole:
                self.device.deliver(load, pages)
            self.scheduler.cache.tiers.loaded(load.ticket, is_whole)
            self.check_state()

    def run(self, max_steps=5000):
        while self.scheduler.has_work:
            self.step()
            assert self.plans < max_steps, "no end in sight"

    def check_plan(self, plan):
        setup = self.setup
        ladder = Ladder(setup.max_num_seqs, setup.budget, pinned=setup.pinned)
        tokens = sum(p.stop - p.start for p in plan.pieces) + len(plan.decodes)
        assert 0 < tokens <= setup.budget
        assert len(plan.pieces) <= ladder.pieces
        assert plan.body in ladder.bodies
        rows = {group.kind: group for group in plan.body}
        if plan.decodes:
            assert rows["decode"].rows >= len(plan.decodes)
        if plan.pieces:
            assert rows["chunk"].rows >= len(plan.pieces)
            assert rows["chunk"].width >= max(p.stop - p.start for p in plan.pieces)
        chunked = {piece.row: piece.request.id for piece in plan.pieces}
        decoding = {request.row: request.id for request in plan.decodes}
        assert len(decoding) == len(plan.decodes)
        assert not chunked.keys() & decoding.keys()
        ids = [*chunked.values(), *decoding.values()]
        assert len(set(ids)) == len(ids), "one row a request"
        for piece in plan.pieces:
            assert not piece.samples or piece.stop == piece.request.target

    def check_state(self):
        scheduler, setup = self.scheduler, self.setup
        scheduler._pool.check()
        scheduler.cache.check()
        running = [r for r in self.requests if r.status is Status.RUNNING]
        for request in self.requests:
            assert request.computed <= request.length <= request.limit or (
                request.status is Status.FINISHED
            )
            if request.status is not Status.RUNNING:
                assert request.row is None and not any(request.pages)
        rows = {request.row: request for request in running}
        assert len(rows) == len(running) <= setup.max_num_seqs
        for row in range(setup.max_num_seqs + 1):
            request = rows.get(row)
            computed = request.computed if request else 0
            assert (scheduler.lengths[:, row] == computed).all()
            for group in range(len(setup.groups)):
                pages = request.pages[group] if request else []
                table = scheduler.tables[group, row]
                assert table[: len(pages)].tolist() == pages
                assert not table[len(pages) :].any()
        for group, counts in enumerate(scheduler.stats()["pages"]):
            held = [p for r in running for p in r.pages[group] if p != NULL_PAGE]
            assert counts["held"] == len(set(held))
            assert setup.prefix_cache or (len(set(held)), counts["cached"]) == (len(held), 0)

    def check_results(self):
        """Every request has the tokens and the reason that it has alone."""
        for request in self.requests:
            tokens, reason = self.setup.oracle(request)
            if request.finish_reason == "abort":
                assert request.output_token_ids == tokens[: len(request.output_token_ids)]
                continue
            assert (request.output_token_ids, request.finish_reason) == (tokens, reason)
            if reason == "stop":
                assert request.stop_reason == tokens[-1]
            if request.params.prompt_logprobs is not None:
                prompt = len(request.prompt_token_ids)
                assert self.device.scored.get(request.id, []) == list(range(prompt - 1))

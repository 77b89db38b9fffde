# SPDX-License-Identifier: Apache-2.0
"""What is asked of the engine, the host's record of it while it runs, and what comes back."""

import dataclasses
import enum
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from engine.radix import Tip

from engine.params import HEADS, SamplingParams


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """One generation, host side. The scheduler owns the fields from `computed` on.

        0 ........ prompt ......|..... output, read .....|.. in flight ..|........ limit
                                                       known           length
        0 ................. computed (KV stored or planned) ...........|

    Invariants: computed <= length <= limit; once its chunks are planned, a request that is not only
    scored has computed == length - 1; one that runs chunks has computed < target == known and
    nothing in flight.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    limit: int  # prompt and output tokens never exceed it
    seed: int
    id: int = -1  # the engine gives it when the request is added
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that may not follow each other
    sample: int = 0  # which of the outputs of one prompt
    scored_from: int = 0  # the first prompt position whose next token's log-probability is wanted
    wants_hidden: bool = False  # the prompt's hidden states are part of the result
    wants_scores: bool = False  # of prompt positions only the token's own log-probability is kept
    cache_space: Hashable = None  # requests share pages only with others of an equal one
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    given_tokens: int = 0  # of the output, that it came with, since it is a fork

    computed: int = 0
    in_flight: int = 0  # tokens sampled by planned steps and not read yet
    target: int = 0  # tokens that run as chunks before the row decodes: `known` at admission
    scored: int = 0  # prompt positions whose log-probabilities are planned; kept on preemption
    quiet_cells: int = 0  # up to so many cells, decodes take no page and leave none
    opened: int = 0  # cells that the cache had when the row was opened
    stored: int = 0  # cells stored by chunks of this row that were read
    sealed: int = 0  # pages of this row that the cache knows
    seal_at: int = 0  # output tokens at which the next page is full and read
    # The running request whose pages it waits for, which row of it, and how many cells it has then.
    leader: "tuple[Request, int, int] | None" = None
    admissions: int = 0  # how often it got a row
    cached_tokens: int | None = None  # of the prompt, that the cache had when it first got a row
    tip: "Tip | None" = None  # its place in the tree of prefixes
    page_keys: list[bytes] = dataclasses.field(default_factory=list)  # of whole pages of tokens
    row: int | None = None
    pages: list[list[int]] = dataclasses.field(default_factory=list)  # [group][place]; 0: freed
    status: Status = Status.WAITING
    limit_reason: str = "length"  # why reaching `limit` ends it; "capacity" once pages ran out
    finish_reason: str | None = None  # stop, length, abort, capacity, error
    stop_reason: int | str | None = None  # the end token, or the stop text
    preemptions: int = 0
    blocked_since: int | None = None  # step at which it first did not fit; None: never tried

    arrival_s: float = 0.0  # the engine's loop keeps the times
    first_scheduled_s: float | None = None
    finished_s: float | None = None
    token_times: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.head = HEADS.index(self.params.head)
        self.scored = self.scored_from

    @property
    def running_row(self) -> int:
        """The row of a running request."""
        assert self.row is not None, f"request {self.id} is {self.status.value}, it has no row"
        return self.row

    @property
    def known(self) -> int:
        """Tokens whose values the host has read."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def length(self) -> int:
        """Tokens read or on their way."""
        return self.known + self.in_flight

    @property
    def most_output(self) -> int:
        """Output tokens it has at the most."""
        return self.limit - len(self.prompt_token_ids)

    @property
    def scores_only(self) -> bool:
        """Whether the prompt leaves no room for an output token."""
        return len(self.prompt_token_ids) >= self.limit

    @property
    def most_cells(self) -> int:
        """Cells it can ever need: the last token of a generation is never fed back."""
        return self.limit if self.scores_only else self.limit - 1

    @property
    def most_cached(self) -> int:
        """Tokens that need not be computed for it, if the cache has them."""
        if self.wants_hidden:
            return 0
        most = self.known - 1  # the last token's logits are wanted
        return most if self.params.prompt_logprobs is None else min(most, self.scored)

    @property
    def repeats(self) -> bool:
        """Whether nothing that the host reads between two tokens can change what is next."""
        return self.head < HEADS.index("logprobs") and not self.params.stop

    @property
    def prefills(self) -> bool:
        """Whether chunks are left to plan."""
        return self.computed < self.target

    @property
    def decodes(self) -> bool:
        """Whether its next step is a decode."""
        return self.target <= self.computed < self.limit - 1

    def as_new(self, sample: int) -> "Request":
        """Returns a request for another output of the same, which has not run."""
        return Request(
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            limit=self.limit,
            seed=self.seed,
            end_ids=self.end_ids,
            bad_words=self.bad_words,
            sample=sample,
            cache_space=self.cache_space,
            limit_reason=self.limit_reason,
        )

    def restart(self, num_tokens: int) -> None:
        """Goes back to waiting with its first `num_tokens` output tokens; nothing is computed."""
        del self.output_token_ids[num_tokens:]
        self.page_keys.clear()
        self.tip = None
        self.computed = self.in_flight = self.target = self.quiet_cells = 0
        self.scored = self.scored_from
        self.row, self.pages, self.status = None, [], Status.WAITING
        self.finish_reason = self.stop_reason = self.blocked_since = None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns the known tokens at positions [start, stop), prompt and output."""
        assert 0 <= start <= stop <= self.known, "only tokens that were read can be asked for"
        prompt = len(self.prompt_token_ids)
        output = self.output_token_ids[max(start - prompt, 0) : max(stop - prompt, 0)]
        return self.prompt_token_ids[start:stop] + output


class Logprob(NamedTuple):
    """One token's log-probability at one position; `rank` 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of one request in seconds; None where there was no such event."""

    queue_s: float | None  # arrival to first step
    ttft_s: float | None  # arrival to first token
    tpot_s: float | None  # mean time of the tokens after the first; None for one token
    itl_s: list[float]  # the gaps between tokens
    e2e_s: float | None  # arrival to last token, or to the end where there was none
    cached_tokens: int
    preemptions: int


@dataclasses.dataclass
class CompletionOutput:
    """One generated text. `logprobs` has one dict a token, token id -> Logprob."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclasses.dataclass
class RequestOutput:
    """What one request gave. `prompt_logprobs` is as long as the prompt, its first entry None.

    `seed` gives the same output again, in a request that names it.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics | None
    finished: bool
    seed: int
    hidden_states: "np.ndarray | None" = None  # float32 [T, width], of `llm.encode`
    scores: "list[ScoredToken] | None" = None  # of `llm.score`


class ScoredToken(NamedTuple):
    """A prompt token's log-probability, and whether greedy decoding would have said it."""

    logprob: float
    is_greedy: bool

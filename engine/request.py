# SPDX-License-Identifier: Apache-2.0
"""What is asked of the engine, the host's record of it while it runs, and what comes back."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.config import MAX_SEED, check_float, check_int

MAX_LOGPROBS = 20
MAX_TEMPERATURE = 1e38  # it travels as a float32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    temperature: 0 is greedy.
    top_k: keep the k likeliest tokens; 0, -1 or a k of the vocabulary's size or more is off.
    top_p: keep the least set of likeliest tokens with this share; 1 is off.
    seed: same seed, same output; None: the engine draws one.
    max_tokens: most output tokens; None: up to the context limit; 0: only score the prompt.
    ignore_eos: go on past the model's end tokens.
    logprobs, prompt_logprobs: how many of the likeliest tokens to report at each output or
        prompt position, beside the token itself; None: none at all.
    Raises ValueError, naming the field, when one of them cannot be.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        check_float("temperature", self.temperature, limits="from 0", remedy="0 is greedy")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature!r} must be from 0 to {MAX_TEMPERATURE}; 0 is greedy"
            )
        check_int("top_k", self.top_k, low=-1, remedy="0 or -1 turns it off")
        check_float("top_p", self.top_p, limits="above 0, at most 1", remedy="1 turns it off")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} must be above 0, at most 1; 1 turns it off")
        if self.seed is not None:
            check_int("seed", self.seed, low=0, high=MAX_SEED, remedy="use None for a fresh one")
        if self.max_tokens is not None:
            remedy = "None runs to the context limit, 0 only scores the prompt"
            check_int("max_tokens", self.max_tokens, low=0, remedy=remedy)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, low=0, high=MAX_LOGPROBS, remedy="None turns it off")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "SamplingParams":
        """Returns the parameters that `fields` spells; an unknown field is a ValueError."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ValueError(
                    f"{name!r} is not a sampling field; the fields are {', '.join(known)}"
                )
        return cls(**fields)


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

    Invariants: computed <= length <= limit; a request that decodes has computed == length - 1;
    one that runs chunks has computed < target == known and nothing in flight.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    limit: int  # prompt and output tokens never exceed it
    seed: int
    id: int = -1  # the engine gives it when the request is added
    end_ids: tuple[int, ...] = ()
    output_token_ids: list[int] = dataclasses.field(default_factory=list)

    computed: int = 0
    in_flight: int = 0  # tokens sampled by planned steps and not read yet
    target: int = 0  # tokens that run as chunks before the row decodes: `known` at admission
    scored: int = 0  # prompt positions whose log-probabilities are planned; kept on preemption
    row: int | None = None
    pages: list[list[int]] = dataclasses.field(default_factory=list)  # [group][place]; 0: freed
    status: Status = Status.WAITING
    limit_reason: str = "length"  # why reaching `limit` ends it; "capacity" once pages ran out
    finish_reason: str | None = None  # stop, length, abort, capacity, error
    stop_reason: int | str | None = None  # the end token
    preemptions: int = 0
    blocked_since: int | None = None  # step at which it first did not fit; None: never tried

    arrival_s: float = 0.0  # the engine's loop keeps the times
    first_scheduled_s: float | None = None
    finished_s: float | None = None
    token_times: list[float] = dataclasses.field(default_factory=list)

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
    def scores_only(self) -> bool:
        """Whether the prompt leaves no room for an output token."""
        return len(self.prompt_token_ids) >= self.limit

    @property
    def most_cells(self) -> int:
        """Cells it can ever need: the last token of a generation is never fed back."""
        return self.limit if self.scores_only else self.limit - 1

    @property
    def prefills(self) -> bool:
        """Whether chunks are left to plan."""
        return self.computed < self.target

    @property
    def decodes(self) -> bool:
        """Whether its next step is a decode."""
        return self.computed >= self.target and self.length < self.limit

    def restart(self, num_tokens: int) -> None:
        """Goes back to waiting with its first `num_tokens` output tokens; nothing is computed."""
        del self.output_token_ids[num_tokens:]
        self.computed = self.in_flight = self.target = self.scored = 0
        self.row, self.pages, self.status = None, [], Status.WAITING
        self.finish_reason = self.stop_reason = self.blocked_since = None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns the known tokens at positions [start, stop), prompt and output."""
        assert 0 <= start <= stop <= self.known, "only tokens that were read can be asked for"
        prompt = len(self.prompt_token_ids)
        output = self.output_token_ids[max(start - prompt, 0) : max(stop - prompt, 0)]
        return self.prompt_token_ids[start:stop] + output


class Logprob(NamedTuple):
    """One token's raw log-probability at one position; `rank` 1 is the likeliest."""

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
    """What one request gave. `prompt_logprobs` is as long as the prompt, its first entry None."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics | None
    finished: bool

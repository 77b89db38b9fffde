# SPDX-License-Identifier: Apache-2.0
"""What requests have given so far: text, log-probabilities, and the results they end in."""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from checkpoints.tokenizer import Tokenizer
from engine.metrics import request_metrics
from engine.request import CompletionOutput, Logprob, Request, RequestOutput, ScoredToken
from engine.sampling import Logprobs
from engine.text import OutputText


@dataclasses.dataclass(slots=True)
class Delta:
    """What a step added to one output. `output` is the whole result, once it is finished.

    A request that does not stream has one delta, its last, and that has the whole text.
    """

    request_id: int
    index: int  # of the outputs of one prompt
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    output: RequestOutput | None


@dataclasses.dataclass(slots=True)
class Record:
    """What the host keeps of a request beside the scheduler's part, until it is finished."""

    request: Request
    prompt: str | None
    streams: bool
    text: OutputText | None  # none where it is not looked at before the end
    logprobs: list[dict[int, Logprob]] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    hidden_TD: np.ndarray | None  # of the prompt, as far as it was read
    scores: dict[int, ScoredToken]  # by prompt position, where only they are wanted
    num_tokens: int = 0  # output tokens delivered
    is_quiet: bool = dataclasses.field(init=False)  # nobody looks at its tokens before the last

    def __post_init__(self) -> None:
        self.is_quiet = not self.streams and self.text is None and self.logprobs is None


class Results:
    """The records of the requests that are not finished, and the deltas not returned yet."""

    def __init__(self, tokenizer: Tokenizer | None, width: int) -> None:
        self._tokenizer = tokenizer
        self._width = width
        self._records: dict[int, Record] = {}
        # The record of a request that is not finished, by id. Bound: it is asked at every token.
        self.get = self._records.get
        self._ready: list[Delta] = []
        self._decoded = token_decoder(tokenizer)

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished, or a delta not taken."""
        return bool(self._records or self._ready)

    def open(self, request: Request, prompt: str | None, streams: bool) -> None:
        """Begins the record of a request."""
        params, length = request.params, len(request.prompt_token_ids)
        looked_at = self._tokenizer if streams or params.stop else None
        self._records[request.id] = Record(
            request,
            prompt,
            streams,
            OutputText(looked_at, params) if looked_at else None,
            None if params.logprobs is None else [],
            None if params.prompt_logprobs is None or request.wants_scores else [None] * length,
            np.full((length, self._width), np.nan, np.float32) if request.wants_hidden else None,
            {},
        )

    def copy(self, record: Record, request: Request) -> None:
        """Gives a request that has just been opened what another one's record has of its tokens."""
        new = self._records[request.id]
        if record.logprobs is not None:
            new.logprobs = record.logprobs[: record.num_tokens]
        if record.prompt_logprobs is not None:
            new.prompt_logprobs = list(record.prompt_logprobs)
        self.deliver(new, list(request.output_token_ids))

    def records(self) -> list[Record]:
        """Returns all records, in order of arrival."""
        return list(self._records.values())

    def take(self) -> list[Delta]:
        """Returns, once, what is ready."""
        deltas, self._ready = self._ready, []
        return deltas

    def entry(
        self, logprobs: Logprobs, index: int, token: int, count: int | None
    ) -> dict[int, Logprob]:
        """Returns one position's log-probabilities: the token's own, and the `count` top ones."""
        rank = int(logprobs.rank_B[index])
        entry = {token: Logprob(float(logprobs.logprob_B[index]), rank, self._decoded(token))}
        ids = logprobs.top_id_BC[index, : count or 0].tolist()
        values = logprobs.top_logprob_BC[index, : count or 0].tolist()
        for place, (top, value) in enumerate(zip(ids, values, strict=True)):
            if value > -math.inf:  # else there are not so many that can be sampled
                entry.setdefault(top, Logprob(value, place + 1, self._decoded(top)))
        return entry

    def deliver(
        self, record: Record, tokens: list[int], entry: dict[int, Logprob] | None = None
    ) -> bool:
        """Makes ready what the tokens add to a request; a finished one leaves the records.

        Returns whether a stop text has just ended it, so that its row is to be closed.
        """
        request = record.request
        if entry is not None and record.logprobs is not None:
            record.logprobs.append(entry)
        went_on = request.finish_reason is None
        text = self._add_text(record, tokens) if record.text is not None else ""
        record.num_tokens += len(tokens)
        reason = request.finish_reason
        if not record.streams and reason is None:
            return False
        output = None
        if reason is not None:
            request.finished_s = time.monotonic()
            del self._records[request.id]
            output = self._output(record)
        entries = None if entry is None else [entry]
        if not record.streams and output is not None:
            [whole] = output.outputs
            text, tokens, entries = whole.text, whole.token_ids, whole.logprobs
        delta = Delta(request.id, request.sample, text, tokens, entries, reason, output)
        self._ready.append(delta)
        return went_on and reason is not None

    def _add_text(self, record: Record, tokens: list[int]) -> str:
        """Returns what the tokens add to the text, which may end with a stop."""
        request, text = record.request, record.text
        assert text is not None
        new = ""
        for token in tokens[:-1] if hides_last(request) else tokens:
            new += text.push(token)
        if request.finish_reason is not None and text.stop is None:
            new += text.finish()
        if text.stop is not None:
            request.finish_reason, request.stop_reason = "stop", text.stop
            del request.output_token_ids[text.num_tokens :]
            if record.logprobs is not None:
                del record.logprobs[text.num_tokens :]
        return new

    def _text(self, request: Request) -> str:
        """Returns the text of all output tokens, for who did not ask for it before."""
        if self._tokenizer is None:
            return ""
        ids = request.output_token_ids
        spoken = ids[:-1] if hides_last(request) else ids
        return self._tokenizer.decode(spoken, request.params.skip_special_tokens)

    def _output(self, record: Record) -> RequestOutput:
        request = record.request
        completion = CompletionOutput(
            index=request.sample,
            text=record.text.text if record.text else self._text(request),
            token_ids=list(request.output_token_ids),
            logprobs=record.logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.id,
            prompt=record.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=record.prompt_logprobs,
            outputs=[completion],
            metrics=request_metrics(request),
            finished=True,
            seed=request.seed,
            hidden_states=record.hidden_TD,
            scores=list(record.scores.values()) if request.wants_scores else None,
        )


def hides_last(request: Request) -> bool:
    """Returns whether its last token is an end that is no text."""
    return request.finish_reason == "stop" and not request.params.include_stop_str_in_output


def token_decoder(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """Returns a function from an id to its text, which remembers; all empty without a tokenizer."""

    @lru_cache(maxsize=65536)
    def decoded(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False) if tokenizer else ""

    return decoded

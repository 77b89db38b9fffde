# SPDX-License-Identifier: Apache-2.0
"""The Python API: a model, loaded and ready to generate."""

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.batch import MAX_END_IDS
from engine.build import build_engine
from engine.config import EngineConfig
from engine.loop import Delta
from engine.models.oracle import forward_jit
from engine.request import Request, RequestOutput, SamplingParams

Prompt = str | Sequence[int]


class LLM:
    """A language model ready to generate. Calls may not overlap in time.

    model: a GGUF file, a Hugging Face folder, a known name or a hub name. The options are those of
    `EngineConfig`, where their meanings stand. Building one loads the weights and compiles every
    program (a later start loads them); nothing is compiled after that.

    Raises ValueError or OSError (FileNotFoundError where nothing is there), naming the input and
    the remedy.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """`options` are the fields of EngineConfig; an unknown one is a TypeError."""
        self.config = EngineConfig(model=model, **options)
        self.built = built = build_engine(self.config)
        self.engine = built.engine
        self.tokenizer = built.model.tokenizer
        self.model_config = built.model.config
        self.max_model_len = built.max_model_len
        self._random = random.Random(self.config.seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Returns one RequestOutput a prompt, in order.

        prompts: a text, token ids, or a list of either. params: one for all, or one each;
        `SamplingParams()` if not given. All are checked before any work starts: ValueError names
        the index and the field. Interrupted, it aborts what is running and raises.
        """
        requests = self._requests(prompts, params)
        waiting: set[int] = set()
        outputs: dict[int, RequestOutput] = {}
        try:
            self._submit(requests, waiting)
            while len(outputs) < len(waiting):
                for delta in self.engine.step():
                    if delta.output is not None and delta.request_id in waiting:
                        outputs[delta.request_id] = delta.output
                        if progress:
                            sys.stderr.write(f"\r{len(outputs)}/{len(waiting)} requests")
        finally:
            for request_id in waiting - set(outputs):
                self.engine.abort(request_id)
            if progress:
                sys.stderr.write("\n")
        return [outputs[request.id] for request, _ in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yields what each step adds to the output; the last delta carries the whole result."""
        [(request, text)] = self._requests([prompt], params)
        request_id = self.engine.add_request(request, text)
        done = False
        try:
            while not done:
                if not self.engine.is_running(request_id):
                    raise RuntimeError("another call took this stream's end; finish it first")
                for delta in self.engine.step():
                    if delta.request_id == request_id:
                        done = delta.output is not None
                        yield delta
        finally:
            if not done:
                self.engine.abort(request_id)

    def forward(self, prompt: Prompt, hidden_states: bool = False) -> Any:
        """Returns the logits of a whole sequence, float32 [T, vocabulary], without the engine.

        With `hidden_states`, returns (logits, hidden [layers + 1, T, width]): the embeddings and
        every layer's output, before the final norm. A plain pass for research and tests; it
        compiles for every power of two that a length is rounded up to.
        """
        [(request, _)] = self._requests([prompt], SamplingParams(max_tokens=0))
        count = len(request.prompt_token_ids)
        padded_T = np.zeros(max(16, 1 << (count - 1).bit_length()), np.int32)
        padded_T[:count] = request.prompt_token_ids  # no token sees the padding behind it
        logits_TV, hidden_LTD = forward_jit(self.engine.params, self.model_config, padded_T)
        if hidden_states:
            return np.asarray(logits_TV)[:count], np.asarray(hidden_LTD)[:, :count]
        return np.asarray(logits_TV)[:count]

    def _submit(self, requests: list[tuple[Request, str | None]], added: set[int]) -> None:
        """Queues the requests and puts their ids into `added`; raises naming the index."""
        for index, (request, text) in enumerate(requests):
            try:
                added.add(self.engine.add_request(request, text))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from None

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[Request, str | None]]:
        """Returns a checked Request and its text for each prompt; raises naming the index."""
        listed = as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = list(params)
            if len(each) != len(listed):
                raise ValueError(
                    f"{len(listed)} prompts came with {len(each)} params; give one, or one each"
                )
        requests = []
        for index, (prompt, one) in enumerate(zip(listed, each, strict=True)):
            try:
                requests.append(self.make_request(prompt, one))
            except (TypeError, ValueError) as error:
                raise ValueError(f"prompt {index}: {error}") from None
        return requests

    def make_request(self, prompt: Prompt, params: SamplingParams) -> tuple[Request, str | None]:
        """Returns the Request of a prompt, for `engine.add_request`, and its text if it had one."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.token_ids(prompt)
        limit = self.max_model_len
        if len(token_ids) > limit:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {limit}; "
                "shorten it or raise max_model_len"
            )
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + params.max_tokens)
        end_ids = () if params.ignore_eos else self.built.model.eos_ids
        if len(end_ids) > MAX_END_IDS:
            raise ValueError(f"the model has {len(end_ids)} end tokens, at most {MAX_END_IDS} fit")
        seed = self._random.getrandbits(32) if params.seed is None else params.seed
        return Request(
            prompt_token_ids=token_ids,
            params=params,
            limit=limit,
            seed=seed,
            end_ids=end_ids,
        ), text

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Returns the ids of a prompt, checked against the vocabulary.

        An empty prompt starts from BOS where the model has one. Raises ValueError otherwise.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the model has no tokenizer; give token ids instead of text")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = checked_ids(prompt, self.model_config.vocab_size)
        if ids:
            return ids
        bos = self.tokenizer.bos_id if self.tokenizer is not None else self.model_config.bos_id
        if bos is None:
            raise ValueError("the prompt is empty and the model has no BOS token; give some text")
        return [bos]


def checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Returns the ids as plain integers; raises naming the first that is none or out of range."""
    checked = []
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"token {place} of the prompt is {token!r}; ids are whole numbers")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token {place} of the prompt is {token}; ids are from 0 to {vocab_size - 1}"
            )
        checked.append(int(token))
    return checked


def as_list(prompts: Any) -> list[Prompt]:
    """Returns the prompts as a list: one text or one list of ids is a single prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence | np.ndarray):
        raise TypeError(f"prompts must be text, token ids or a list, not {type(prompts).__name__}")
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], int | np.integer):
        return [prompts]
    return prompts

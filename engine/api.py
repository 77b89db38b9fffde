# SPDX-License-Identifier: Apache-2.0
"""The Python API: a model, loaded and ready to generate."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from engine.build import build_engine
from engine.cache_control import CacheControl
from engine.chat import ChatEncoder, Conversation, as_conversations
from engine.company import follow
from engine.config import EngineConfig
from engine.models.oracle import forward_jit
from engine.params import SamplingParams
from engine.prompts import Prompt, RequestMaker, as_list, paired
from engine.request import Request, RequestOutput
from engine.results import Delta
from engine.strict import no_warnings
from engine.waiting import QueueFull

# The requests of one prompt, one for each output, and its text if it had one.
Samples = tuple[list[Request], str | None]

POOLINGS = {
    "mean": lambda hidden_TD: hidden_TD.mean(axis=0, dtype=np.float64),
    "last": lambda hidden_TD: hidden_TD[-1].astype(np.float64),
}


@dataclasses.dataclass(frozen=True)
class Score:
    """How likely a continuation is: natural logarithms, and whether greedy would have said it."""

    token_ids: list[int]
    token_logprobs: list[float]
    sum_logprob: float
    is_greedy: bool


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
        with no_warnings(self.config.strict):
            self.built = built = build_engine(self.config)
        self.engine = built.engine
        self.tokenizer = built.model.tokenizer
        self.model_config = built.model.config
        self.max_model_len = built.max_model_len
        self.maker = RequestMaker(
            tokenizer=self.tokenizer,
            model_config=self.model_config,
            max_model_len=self.max_model_len,
            eos_ids=built.model.eos_ids,
            seed=self.config.seed,
        )
        self.cache = CacheControl(self.engine, built.fingerprint, built.page)
        self.chats = ChatEncoder(self.tokenizer)
        self.default_params = built.default_params

    @property
    def follows(self) -> bool:
        """Whether another process takes the requests, and this one is to call `follow`."""
        channel = self.built.channel
        return channel is not None and channel.group.rank > 0

    def follow(self) -> None:
        """Does this process's share of what the leader runs, until the leader ends.

        Raises LostProcess when a process is lost, RuntimeError in one that leads.
        """
        if not self.follows:
            raise RuntimeError("this process leads; give it requests")
        assert self.built.channel is not None, "who follows has a leader"
        follow(self.engine.worker, self.built.channel)

    def close(self) -> None:
        """Ends the engine; with `disk_cache_dir`, all that is kept is there for the next start.

        So does leaving a `with` statement on the LLM.
        """
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Returns one RequestOutput a prompt, in order, each with `n` outputs.

        prompts: a text, token ids, or a list of either. params: one for all, or one each;
        `default_params` if not given. All are checked before any work starts: ValueError names
        the index and the field. Interrupted, it aborts what is running and raises.
        """
        return self._run(self._requests(as_list(prompts), params), progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Returns `generate`'s outputs for one conversation, or several: lists of messages.

        A message is {"role": ..., "content": ...} and what else the model's own template reads.
        `template` may have `tools`, `documents`, `add_generation_prompt` (true unless said
        otherwise), `continue_final_message`, and any variable of the template. Spellings of special
        tokens in the messages stay text unless `params.parse_special_in_messages`.
        """
        pairs = list(paired(as_conversations(messages), params, self.default_params))
        requests = []
        for index, (conversation, one) in enumerate(pairs):
            with naming(f"conversation {index}"):
                requests.append(self.prepare_chat(conversation, one, template))
        return self._run(requests, progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yields what each step adds to the outputs; the last delta carries the whole result."""
        [(requests, text)] = self._requests([prompt], params)
        running = [self.engine.add_request(request, text) for request in requests]
        ended: list[RequestOutput] = []
        try:
            while len(ended) < len(requests):
                if not any(self.engine.is_running(request_id) for request_id in running):
                    raise RuntimeError("another call took this stream's end; finish it first")
                for delta in self.engine.step():
                    if delta.request_id not in running:
                        continue
                    if delta.output is not None:
                        ended.append(delta.output)
                        last = len(ended) == len(requests)
                        delta.output = merge_samples(ended) if last else None
                    yield delta
        finally:
            for request_id in running:
                self.engine.abort(request_id)

    def score(self, pairs: Sequence[tuple[Prompt, Prompt]], progress: bool = False) -> list[Score]:
        """Returns how likely each continuation is after its context, in order.

        pairs: (context, continuation), each text or ids; ids are scored as they are. Of texts,
        spaces that end the context belong to the continuation, and where a token would span the
        two they are encoded apart. Raises ValueError naming the pair, before any work starts.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        requests: list[Samples] = []
        for index, (context, continuation) in enumerate(pairs):
            with naming(f"pair {index}"):
                before, after = self.maker.pair_ids(context, continuation)
                [request] = self.maker.make(before + after, params)
                request.scored_from = request.scored = len(before) - 1
                request.wants_scores = True
                requests.append(([request], None))
        outputs = self._run(requests, progress)
        for index, output in enumerate(outputs):
            if output.outputs[0].finish_reason == "error":
                raise ValueError(f"pair {index}: {output.outputs[0].stop_reason}")
        return [score_of(output) for output in outputs]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], progress: bool = False
    ) -> list[np.ndarray]:
        """Returns the hidden states of each prompt, float32 [T, width], after the final norm."""
        requests = self._requests(as_list(prompts), SamplingParams(max_tokens=0))
        for [request], _ in requests:
            request.wants_hidden = True
        outputs = self._run(requests, progress)
        for index, output in enumerate(outputs):
            if output.outputs[0].finish_reason == "error":
                raise ValueError(f"prompt {index}: {output.outputs[0].stop_reason}")
        return [np.asarray(output.hidden_states) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "mean",
        normalize: bool = False,
        progress: bool = False,
    ) -> np.ndarray:
        """Returns one vector a prompt, float32 [n, width].

        pooling: "mean" or "last", of the hidden states after the final norm. With `normalize`, each
        has length 1.
        """
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is not known; use one of {', '.join(POOLINGS)}")
        vectors = np.zeros((0, self.model_config.width), np.float32)
        states = self.encode(prompts, progress)
        if states:
            vectors = np.stack([POOLINGS[pooling](state_TD) for state_TD in states])
        if normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors.astype(np.float32)

    def forward(self, prompt: Prompt, hidden_states: bool = False) -> Any:
        """Returns the logits of a whole sequence, float32 [T, vocabulary], without the engine.

        With `hidden_states`, returns (logits, hidden [layers + 1, T, width]): the embeddings and
        every layer's output, before the final norm. A plain pass for research and tests; it
        compiles for every power of two that a length is rounded up to.
        """
        if self.built.channel is not None:
            raise ValueError("forward needs an engine of one process")
        request, _ = self.make_request(prompt, SamplingParams(max_tokens=0))
        count = len(request.prompt_token_ids)
        padded_T = np.zeros(max(16, 1 << (count - 1).bit_length()), np.int32)
        padded_T[:count] = request.prompt_token_ids  # no token sees the padding behind it
        logits_TV, hidden_LTD = forward_jit(
            self.engine.worker.params,
            self.engine.worker.model_config,
            padded_T,
            length=np.int32(count),
        )
        logits_TV = np.asarray(logits_TV)[:count, : self.model_config.vocab_size]
        if hidden_states:
            return logits_TV, np.asarray(hidden_LTD)[:, :count]
        return logits_TV

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Samples:
        """Returns the checked requests of a prompt, for `engine.add_request`, and its text."""
        with no_warnings(self.config.strict):
            return self.maker.make(prompt, params), prompt if isinstance(prompt, str) else None

    def prepare_chat(
        self, conversation: Conversation, params: SamplingParams, template: Mapping[str, Any]
    ) -> Samples:
        """Returns the checked requests of a conversation, as `prepare` does."""
        special = params.parse_special_in_messages
        ids = self.chats.token_ids(conversation, template, parse_special=special)
        return self.prepare(ids, params)

    def make_request(self, prompt: Prompt, params: SamplingParams) -> tuple[Request, str | None]:
        """Returns `prepare`'s one request, of parameters with n=1, and the prompt's text."""
        [request], text = self.prepare(prompt, params)
        return request, text

    def _requests(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Samples]:
        """Returns the checked requests of each prompt; raises naming the index."""
        requests = []
        for index, (prompt, one) in enumerate(paired(prompts, params, self.default_params)):
            with naming(f"prompt {index}"):
                requests.append(self.prepare(prompt, one))
        return requests

    def _run(self, requests: list[Samples], progress: bool) -> list[RequestOutput]:
        """Runs the requests to their ends; returns the outputs of each prompt together."""
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
        return [merge_samples([outputs[one.id] for one in samples]) for samples, _ in requests]

    def _submit(self, requests: list[Samples], added: set[int]) -> None:
        """Queues the requests and puts their ids into `added`; raises naming the index."""
        for index, (samples, text) in enumerate(requests):
            for request in samples:
                with naming(f"prompt {index}"):
                    added.add(self.engine.add_request(request, text, streams=False))


def merge_samples(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Returns the outputs of one prompt as one: times are of the one that ended last."""
    ordered = sorted(outputs, key=lambda output: output.outputs[0].index)
    last = max(outputs, key=lambda output: (output.metrics and output.metrics.e2e_s) or 0.0)
    completions = [completion for output in ordered for completion in output.outputs]
    return dataclasses.replace(ordered[0], outputs=completions, metrics=last.metrics)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Turns the refusal of an input into a ValueError that begins with its name."""
    try:
        yield
    except QueueFull as error:
        raise QueueFull(f"{what}: {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from None


def score_of(output: RequestOutput) -> Score:
    """Returns the score of the tokens that were asked for."""
    scores = output.scores or []
    values = [score.logprob for score in scores]
    token_ids = output.prompt_token_ids[len(output.prompt_token_ids) - len(scores) :]
    return Score(token_ids, values, sum(values), all(score.is_greedy for score in scores))

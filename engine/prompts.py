# SPDX-License-Identifier: Apache-2.0
"""From a prompt and its parameters to Requests, checked against the model and its tokenizer."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from checkpoints.tokenizer import Tokenizer
from engine.batch import MAX_END_IDS
from engine.log import logger
from engine.models.config import ModelConfig
from engine.params import SamplingParams
from engine.request import Request
from engine.settings import BAD_WORD_TOKENS, BAD_WORDS

Prompt = str | Sequence[int]


class RequestMaker:
    """Makes the Requests of prompts for one model. Errors are ValueError or TypeError, one line."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        model_config: ModelConfig,
        max_model_len: int,
        eos_ids: tuple[int, ...],
        seed: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = model_config.vocab_size
        self._bos_id = model_config.bos_id
        self._ropes = model_config.ropes
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._random = random.Random(seed)
        self._warned = False

    def make(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Returns the requests of a prompt, one for each of `params.n` outputs."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        token_ids = self.token_ids(prompt, params.add_special_tokens)
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        limit = self._max_model_len
        if len(token_ids) > limit:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {limit}; "
                "shorten it, set truncate_prompt_tokens, or raise max_model_len"
            )
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + params.max_tokens)
        self._check_ids(params)
        end_ids, bad_words = self._end_ids(params), self._bad_words(params)
        seed = self._random.getrandbits(32) if params.seed is None else params.seed
        variant = tuple(rope.variant(limit) for rope in self._ropes)
        return [
            Request(
                prompt_token_ids=token_ids,
                params=params,
                limit=limit,
                seed=seed,
                end_ids=end_ids,
                bad_words=bad_words,
                sample=sample,
                cache_space=(params.cache_salt, variant),
            )
            for sample in range(params.n)
        ]

    def token_ids(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a prompt, checked against the vocabulary.

        Ids are never changed. An empty prompt starts from BOS where the model has one.
        """
        tokenizer = self._tokenizer
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("the model has no tokenizer; give token ids instead of text")
            ids = tokenizer.encode(prompt, add_special_tokens)
            if tokenizer.bos_id is not None and ids[:2] == [tokenizer.bos_id] * 2:
                self._warn_of_two_bos()
        else:
            ids = list(prompt)
        if ids:  # of a text too: a tokenizer may have more entries than the model
            return checked_ids(ids, self._vocab_size)
        bos = tokenizer.bos_id if tokenizer is not None else self._bos_id
        if bos is None:
            raise ValueError("the prompt is empty and the model has no BOS token; give some text")
        return [bos]

    def pair_ids(self, context: Prompt, continuation: Prompt) -> tuple[list[int], list[int]]:
        """Returns the ids of a context, from BOS if it is empty, and of what follows it."""
        if isinstance(context, str) and isinstance(continuation, str):
            return self._pair_of_texts(context, continuation)
        if isinstance(context, str) or isinstance(continuation, str):
            raise TypeError("context and continuation must both be text or both be token ids")
        return self.token_ids(context), some(checked_ids(continuation, self._vocab_size))

    def _pair_of_texts(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before = self.token_ids(context)
        whole = self.token_ids(context + continuation)
        if whole[: len(before)] == before:
            return before, some(whole[len(before) :])
        assert self._tokenizer is not None, "there was one for the context"
        ids = self._tokenizer.encode(continuation, add_special_tokens=False)
        return before, some(checked_ids(ids, self._vocab_size))

    def _warn_of_two_bos(self) -> None:
        if not self._warned:
            self._warned = True
            logger().warning(
                "a prompt begins with two BOS tokens, its own and the tokenizer's; "
                "add_special_tokens=False leaves it as it is written"
            )

    def _check_ids(self, params: SamplingParams) -> None:
        """Raises ValueError for an id in `params` that the model does not have."""
        size = self._vocab_size
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(params, name) or ():
                if token >= size:
                    raise ValueError(f"{name} has the token id {token}; ids are below {size}")

    def _end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self._eos_ids
        end_ids = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
        if len(end_ids) > MAX_END_IDS:
            raise ValueError(
                f"stop_token_ids and the model's end tokens are {len(end_ids)} ids; "
                f"at most {MAX_END_IDS} fit"
            )
        return end_ids

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of each bad word, alone and after a space."""
        if not params.bad_words and not params.stop:
            return ()
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer; stop and bad_words need one")
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip(" ")):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if len(ids) > BAD_WORD_TOKENS:
                    raise ValueError(
                        f"bad_words has {word!r}, which is {len(ids)} tokens; "
                        f"at most {BAD_WORD_TOKENS} can be forbidden together"
                    )
                if ids and max(ids) < self._vocab_size:  # others are never said
                    words[ids] = None
        several = sum(len(ids) > 1 for ids in words)
        if several > BAD_WORDS:
            raise ValueError(
                f"bad_words are {several} runs of several tokens, alone and after a space; "
                f"at most {BAD_WORDS} fit"
            )
        return tuple(words)


def some(continuation: list[int]) -> list[int]:
    """Returns the ids; raises ValueError where there are none."""
    if not continuation:
        raise ValueError("the continuation has no tokens; there is nothing to score")
    return continuation


def checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Returns the ids as plain integers; raises naming the first that is none or out of range."""
    # Nearly always they are: the whole list is looked at before its items.
    if type(ids) is list and set(map(type, ids)) <= {int}:
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            return list(ids)
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


def paired(prompts: list[Any], params: Any, default: SamplingParams) -> Iterator[tuple[Any, Any]]:
    """Returns each prompt with its parameters: one for all, or one each."""
    if params is None or isinstance(params, SamplingParams):
        each = [params or default] * len(prompts)
    else:
        each = list(params)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts came with {len(each)} params; give one, or one each"
            )
    return zip(prompts, each, strict=True)

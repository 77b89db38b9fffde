# SPDX-License-Identifier: Apache-2.0
"""How the tokens of one request are chosen, and when it ends: every field a user may set."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config import MAX_SEED, check_float, check_int

NO_TOKEN = -1  # what the device draws for a row whose logits are not finite
NOT_FINITE = "the model's numbers are not finite"  # the stop reason of such an error
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 1e38  # it travels as a float32
MAX_SAMPLES = 1024
MAX_STOPS = 64
LOGPROBS_MODES = ("raw", "processed")
# Kinds of heads: each does what those before it do.
HEADS = ("greedy", "sample", "logprobs")
FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "add_special_tokens",
    "parse_special_in_messages",
)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Which token, in this order; a row of temperature 0 takes the likeliest after the first line:

    logit_bias: {id: number} added to logits.   allowed_token_ids: no other id is sampled.
    bad_words: texts that the output never has, as these tokens, with or without a space before.
    repetition_penalty: above 1 makes less likely what the prompt or the output has; 1 is off.
    presence_penalty, frequency_penalty: taken from the logits of what the output has, once, and
        for each time.
    temperature: 0 is greedy.   min_p: keep tokens of this share of the likeliest's probability.
    top_k: keep the k likeliest tokens; 0, -1 or a k of the vocabulary's size or more is off.
    top_p: keep the least set of likeliest tokens with this share of what is left; 1 is off.
    seed: same seed, same output; None: the engine draws one.   n: outputs, each with its own noise.

    When it ends:

    max_tokens: most output tokens; None: up to the context limit; 0: only score the prompt.
    min_tokens: no end token, stop id or stop text counts before so many output tokens.
    stop: a text, or several, that end the output where the earliest of them begins.
    include_stop_str_in_output: the text keeps the stop that ended it.
    stop_token_ids: ids that end the output, as the model's own end tokens do.
    ignore_eos: go on past the model's end tokens; `stop_token_ids` still end it.

    What is reported, and how text is read:

    logprobs, prompt_logprobs: how many of the likeliest tokens to report at each output or
        prompt position, beside the token itself; None: none at all.
    logprobs_mode: "raw", of the model's own logits, or "processed", of what a token is drawn from;
        prompts are always raw.
    skip_special_tokens: special tokens have no text in the output.
    add_special_tokens: a prompt given as text starts with BOS where the tokenizer says so.
    truncate_prompt_tokens: keep so many tokens of the prompt's end; None: keep all.
    parse_special_in_messages: spellings of special tokens in a chat's messages become them.

    Who it is for:

    cache_salt: only requests with the same text here share what the cache has; None is one, too.
    priority: lower ones first, where the engine's policy is "priority".
    tenant: whose limits it counts for, where the engine has such.

    Raises ValueError, naming the field, when one of them cannot be.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    parse_special_in_messages: bool = False
    cache_salt: str | None = None
    priority: int = 0
    tenant: str = ""

    def __post_init__(self):
        self._check_choice()
        self._check_end()
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, low=0, high=MAX_LOGPROBS, remedy="None turns it off")
        if self.logprobs_mode not in LOGPROBS_MODES:
            known = ", ".join(LOGPROBS_MODES)
            raise ValueError(f"logprobs_mode={self.logprobs_mode!r} is not known; use {known}")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt={self.cache_salt!r} must be a text, or None")
        remedy = "the default is 0, lower goes first"
        check_int("priority", self.priority, low=-(2**31), high=2**31 - 1, remedy=remedy)
        if not isinstance(self.tenant, str):
            raise ValueError(f"tenant={self.tenant!r} must be a text")
        if self.truncate_prompt_tokens is not None:
            remedy = "None keeps the whole prompt"
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, low=1, remedy=remedy)

    def _check_choice(self) -> None:
        limits = f"from 0 to {MAX_TEMPERATURE}"
        _check_range("temperature", self.temperature, 0, MAX_TEMPERATURE, limits, "0 is greedy")
        check_int("top_k", self.top_k, low=-1, remedy="0 or -1 turns it off")
        _check_above("top_p", self.top_p, 1, "1 turns it off")
        _check_range("min_p", self.min_p, 0, 1, "from 0 to 1", "0 turns it off")
        _check_above("repetition_penalty", self.repetition_penalty, 1e38, "1 turns it off")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_range(name, getattr(self, name), -2, 2, "from -2 to 2", "0 turns it off")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _checked_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids=() allows nothing; use None to allow all")
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _checked_texts("bad_words", self.bad_words))
        if self.seed is not None:
            check_int("seed", self.seed, low=0, high=MAX_SEED, remedy="use None for a fresh one")
        check_int("n", self.n, low=1, high=MAX_SAMPLES, remedy="it counts the outputs")

    def _check_end(self) -> None:
        check_int("min_tokens", self.min_tokens, low=0, remedy="0 turns it off")
        if self.max_tokens is not None:
            remedy = "None runs to the context limit, 0 only scores the prompt"
            check_int("max_tokens", self.max_tokens, low=0, remedy=remedy)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}"
                )
        stops = _checked_texts("stop", self.stop)
        if len(stops) > MAX_STOPS:
            raise ValueError(f"stop has {len(stops)} texts; give at most {MAX_STOPS}")
        object.__setattr__(self, "stop", stops)
        ids = _checked_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of all fields."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "SamplingParams":
        """Returns the parameters that `fields` spells; an unknown field is a ValueError."""
        check_names(fields)
        return cls(**fields)

    def replace(self, fields: Mapping[str, Any]) -> "SamplingParams":
        """Returns these parameters with some fields changed; an unknown one is a ValueError."""
        check_names(fields)
        return dataclasses.replace(self, **fields)

    @property
    def head(self) -> str:
        """The least of the kinds of heads that does what is asked; see HEADS."""
        if self.logprobs is not None:
            return "logprobs"
        if self.temperature > 0 or self.min_tokens > 0 or self.changes_logits:
            return "sample"
        return "greedy"

    @property
    def changes_logits(self) -> bool:
        """Whether a token's logit depends on more than the model."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
        )


def check_names(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is no sampling field."""
    known = SamplingParams.names()
    for name in fields:
        if name not in known:
            raise ValueError(f"{name!r} is not a sampling field; the fields are {', '.join(known)}")


def _check_range(name: str, value: Any, low: float, high: float, limits: str, remedy: str) -> None:
    check_float(name, value, limits=limits, remedy=remedy)
    if not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be {limits}; {remedy}")


def _check_above(name: str, value: Any, high: float, remedy: str) -> None:
    """Raises unless `value` is above 0, and at most `high`."""
    check_float(name, value, limits=f"above 0, at most {high}", remedy=remedy)
    if not 0 < value <= high:
        raise ValueError(f"{name}={value!r} must be above 0, at most {high}; {remedy}")


def _checked_ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Sequence):
        raise ValueError(f"{name}={ids!r} must be a list of token ids")
    for place, token in enumerate(ids):
        check_int(f"{name}[{place}]", token, low=0, remedy="it is a token id")
    return tuple(dict.fromkeys(int(token) for token in ids))


def _checked_texts(name: str, texts: Any) -> tuple[str, ...]:
    """Returns a text, or a list of them, as a tuple; None is none."""
    listed = () if texts is None else (texts,) if isinstance(texts, str) else texts
    if isinstance(listed, bytes | Mapping) or not isinstance(listed, Sequence):
        raise ValueError(f"{name}={texts!r} must be a text or a list of texts")
    for place, text in enumerate(listed):
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name}[{place}]={text!r} must be a text that is not empty")
    return tuple(dict.fromkeys(listed))


def _checked_bias(bias: Any) -> dict[int, float]:
    """Returns {id: bias}; JSON spells the ids as text."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias={bias!r} must map token ids to numbers")
    checked = {}
    for token, value in bias.items():
        number = (
            int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token
        )
        if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 0:
            raise ValueError(f"logit_bias has {token!r}, which is not a token id")
        check_float(f"logit_bias[{token}]", value, limits="", remedy="100 forces, -100 forbids")
        if abs(value) > 1e30:
            raise ValueError(f"logit_bias[{token}]={value!r} must be from -1e30 to 1e30")
        if int(number) in checked:
            raise ValueError(f"logit_bias has the token id {number} twice")
        checked[int(number)] = float(value)
    return checked

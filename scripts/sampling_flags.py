# SPDX-License-Identifier: Apache-2.0
"""The fields of SamplingParams as flags of a command, one flag a field."""

from typing import Any

from absl import flags

from scripts.command_line import UsageError

NUMBERS = {
    "temperature": "0 is greedy; the default is 1.",
    "top_p": "Keep the likeliest tokens with this share; 1 is off.",
    "min_p": "Keep tokens of this share of the likeliest's probability; 0 is off.",
    "repetition_penalty": "Above 1: less of what the prompt or the output has.",
    "presence_penalty": "Taken from the logits of tokens that the output has.",
    "frequency_penalty": "Taken for each time that the output has a token.",
}
INTEGERS = {
    "top_k": "Keep the k likeliest tokens; 0 or -1 is off.",
    "seed": "Seed of the sampling.",
    "n": "Outputs of each prompt.",
    "max_tokens": "Most tokens of an output; 0 only scores the prompt.",
    "min_tokens": "No end counts before so many tokens.",
    "logprobs": "Likeliest tokens to report at each output position.",
    "prompt_logprobs": "Likeliest tokens to report at each prompt position.",
    "priority": "Lower goes first, with --policy=priority.",
    "truncate_prompt_tokens": "Keep so many tokens of a prompt's end.",
}
SWITCHES = {
    "ignore_eos": "Go on past the model's end.",
    "include_stop_str_in_output": "Keep the stop that ended an output in its text.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "add_special_tokens": "Start a text prompt with BOS where the tokenizer does.",
    "parse_special_in_messages": "Let messages of a chat spell special tokens.",
}
TEXTS = {
    "stop": "A text that ends an output; may be repeated.",
    "bad_words": "A text that no output has; may be repeated.",
    "logit_bias": "ID:NUMBER, added to the logit of a token; may be repeated.",
}
LISTS = {
    "stop_token_ids": "A token id that ends an output; may be repeated.",
    "allowed_token_ids": "A token id that may be sampled, no other; may be repeated.",
}
MODES = {
    "logprobs_mode": "raw, or processed: of what tokens are drawn from.",
    "cache_salt": "Only requests with the same salt share what is kept.",
    "tenant": "Whose limits a request counts for.",
}
FIELDS = (*NUMBERS, *INTEGERS, *SWITCHES, *TEXTS, *LISTS, *MODES)


def define_sampling_flags(values: flags.FlagValues, **defaults: Any) -> None:
    """Defines a flag for each field; one that is not given, or in `defaults`, is None."""
    for kinds, define in (
        (NUMBERS, flags.DEFINE_float),
        (INTEGERS, flags.DEFINE_integer),
        (SWITCHES, flags.DEFINE_bool),
        (TEXTS, flags.DEFINE_multi_string),
        (LISTS, flags.DEFINE_multi_integer),
        (MODES, flags.DEFINE_string),
    ):
        for name, meaning in kinds.items():
            define(name, defaults.get(name), meaning, flag_values=values)


def given_fields(values: flags.FlagValues) -> dict[str, Any]:
    """Returns the fields that the flags give; raises UsageError for a bias that is none."""
    fields: dict[str, Any] = {
        name: values[name].value for name in FIELDS if values[name].value is not None
    }
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(parse_bias(text) for text in fields["logit_bias"])
    return fields


def parse_bias(text: str) -> tuple[str, float]:
    token, colon, number = text.partition(":")
    try:
        return token, float(number if colon else "")
    except ValueError:
        raise UsageError(f"--logit_bias={text} must be ID:NUMBER, as 42:-100") from None

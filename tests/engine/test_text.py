# SPDX-License-Identifier: Apache-2.0
"""Scripted outputs through the whole engine: what the user reads is what the ids say (D-01)."""

import pytest

from engine import SamplingParams
from tests.fixtures import NOTE

TEXTS = [
    "été 漢字 😀",
    "👩\u200d👩\u200d👧",
    "漢😀",
    "the mill",
    "a  b",
    "a     b",
    " the wheel",
    f"the {NOTE} mill",
    "\N{REPLACEMENT CHARACTER}!",
]


@pytest.fixture(params=["bytes", "fallback"])
def speaker(request, script, fallback_script):
    return {"bytes": script, "fallback": fallback_script}[request.param]


def sayable(speaker, text):
    """Returns the ids of a text, each once: a script has one successor for each."""
    return list(dict.fromkeys(speaker.llm.tokenizer.encode(text, add_special_tokens=False)))


def streamed(speaker, **fields):
    """Returns the result of a greedy stream, whose joined text is checked."""
    params = SamplingParams(temperature=0, max_tokens=60, **fields)
    deltas = list(speaker.llm.stream([0], params))
    completion = deltas[-1].output.outputs[0]
    assert completion.text == "".join(delta.text for delta in deltas)
    [whole] = speaker.llm.generate([[0]], params)
    assert completion == whole.outputs[0], "streamed or not"
    return completion


@pytest.mark.parametrize("text", TEXTS)
def test_the_joined_stream_is_the_text(speaker, text):
    decode, ids = speaker.llm.tokenizer.decode, sayable(speaker, text)
    speaker.say(ids)
    completion = streamed(speaker)
    assert completion.token_ids == [*ids, 2]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 2)
    assert completion.text == decode(ids)
    for cut in range(1, len(ids)):  # also half way through a character
        completion = speaker.run(max_tokens=cut)
        assert completion.token_ids == ids[:cut]
        assert completion.text == decode(ids[:cut])


def test_a_special_token_between_two_words_is_skipped(speaker):
    decode = speaker.llm.tokenizer.decode
    mill, wheel = sayable(speaker, "mill")[0], sayable(speaker, "wheel")[-1]
    ids = [mill, 1, wheel]
    speaker.say(ids)
    assert streamed(speaker).text == decode(ids) == decode([mill, wheel])
    shown = streamed(speaker, skip_special_tokens=False).text
    assert shown == decode([*ids], skip_special_tokens=False) and "<s>" in shown


@pytest.mark.parametrize("text", TEXTS)
def test_a_stop_text_anywhere_ends_it_there(speaker, text):
    """The token that completes the stop is the last one; later text is never shown."""
    decode, ids = speaker.llm.tokenizer.decode, sayable(speaker, text)
    speaker.say(ids)
    whole = decode(ids)
    for place, stop in enumerate(whole):
        if stop == "\N{REPLACEMENT CHARACTER}" or whole.index(stop) < place:
            continue  # what replaces a broken character is no stop until all bytes are there
        completion = streamed(speaker, stop=[stop, "never"])
        assert completion.text == whole[:place]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        count = len(completion.token_ids)
        assert completion.token_ids == ids[:count]
        assert stop in decode(ids[:count]) and stop not in decode(ids[: count - 1])
        kept = streamed(speaker, stop=[stop], include_stop_str_in_output=True)
        assert kept.text == whole[: place + 1]

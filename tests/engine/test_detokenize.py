# SPDX-License-Identifier: Apache-2.0
"""CASES D-01: the joined stream is the one-shot text, whole characters, at a constant cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.tokenizer import build_tokenizer
from engine.detokenize import Detokenizer
from tests import fixtures

BACKENDS = {"byte level": fixtures.byte_tokenizer, "byte fallback": fixtures.fallback_tokenizer}
EMOJI = "😀👩\u200d👩\u200d👧"
TEXTS = {
    "many scripts": f"été 漢字 {EMOJI}",
    "a run of spaces": "the      wheel",
    "spaces only": "     ",
    "a leading space": " the wheel",
    "an added token": f"the {fixtures.NOTE} wheel{fixtures.NOTE}é",
    "special tokens": "the</s> wheel</s></s> é</s>",
    "a genuine U+FFFD": "a\ufffdb\ufffd\ufffd c",
}


def open_tokenizer(kind):
    backend = BACKENDS[kind]()
    return build_tokenizer(backend, bos_id=1, eos_ids=[2], add_bos=None, chat_template=None)


def stream(tokenizer, token_ids, *, skip_special_tokens=True):
    """Returns the chunks that pushing the ids gives, the tail last."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    chunks = []
    for token_id in token_ids:
        chunks.append(detokenizer.push(token_id))
        assert detokenizer.text == "".join(chunks)
    chunks.append(detokenizer.finish())
    assert detokenizer.text == "".join(chunks)
    return chunks


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_stream_is_the_one_shot_text(kind, text, skip_special_tokens):
    tokenizer = open_tokenizer(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    chunks = stream(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
    assert "".join(chunks) == tokenizer.decode(token_ids, skip_special_tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize("kind", BACKENDS)
@given(token_ids=st.lists(st.integers(0, fixtures.VOCABULARY + 3), max_size=40), data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_ids_stream_to_their_one_shot_text(kind, token_ids, data):
    tokenizer = open_tokenizer(kind)
    skip = data.draw(st.booleans())
    chunks = stream(tokenizer, token_ids, skip_special_tokens=skip)
    assert "".join(chunks) == tokenizer.decode(token_ids, skip)


@pytest.mark.parametrize("kind", BACKENDS)
@given(text=st.text(max_size=20), data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_text_cut_anywhere_streams_to_its_one_shot_text(kind, text, data):
    tokenizer = open_tokenizer(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    start = data.draw(st.integers(0, len(token_ids)))
    stop = data.draw(st.integers(start, len(token_ids)))
    chunks = stream(tokenizer, token_ids[start:stop])
    assert "".join(chunks) == tokenizer.decode(token_ids[start:stop])


def test_a_byte_level_character_comes_with_its_last_byte():
    tokenizer = open_tokenizer("byte level")
    chunks = stream(tokenizer, tokenizer.encode("é漢😀a"))
    assert chunks == ["", "é", "", "", "漢", "", "", "", "😀", "a", ""]


def test_a_fallback_run_comes_when_it_ends():
    # The decoder replaces the whole run if a later byte spoils it, so it cannot be given before.
    tokenizer = open_tokenizer("byte fallback")
    chunks = stream(tokenizer, tokenizer.encode("the é the", add_special_tokens=False))
    assert chunks == ["the", " ", "", "", "é the", ""]


@pytest.mark.parametrize("kind", BACKENDS)
def test_an_unfinished_tail_is_given_once_as_replacement_text(kind):
    tokenizer = open_tokenizer(kind)
    token_ids = tokenizer.encode("the a" + EMOJI, add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    before = "".join(detokenizer.push(i) for i in token_ids)
    assert "\ufffd" not in before
    tail = detokenizer.finish()
    assert tail.endswith("\ufffd")
    assert before + tail == tokenizer.decode(token_ids)
    assert detokenizer.finish() == ""


def test_a_genuine_replacement_character_does_not_stall():
    tokenizer = open_tokenizer("byte level")
    chunks = stream(tokenizer, tokenizer.encode("\ufffd\ufffda"))
    assert chunks == ["", "", "\ufffd", "", "", "\ufffd", "a", ""]
    tokenizer = open_tokenizer("byte fallback")
    chunks = stream(tokenizer, tokenizer.encode("a\ufffd the sea", add_special_tokens=False))
    assert "\ufffd the" in chunks


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_prompt_that_ends_inside_a_character_lends_it_no_bytes(kind):
    tokenizer = open_tokenizer(kind)
    token_ids = tokenizer.encode("é the", add_special_tokens=False)
    output = token_ids[-2:]
    assert "".join(stream(tokenizer, output)) == tokenizer.decode(output) == "\ufffd the"


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("text", ["the wheel é ", EMOJI, "    ", "</s>"])
def test_the_cost_of_a_token_does_not_grow(kind, text, monkeypatch):
    tokenizer = open_tokenizer(kind)
    decoded = []
    original = type(tokenizer).decode

    def counted(self, token_ids, skip_special_tokens=True):
        decoded.append(len(token_ids))
        return original(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    token_ids = tokenizer.encode(text, add_special_tokens=False) * 200
    chunks = stream(tokenizer, token_ids)
    assert sum(decoded) <= 6 * len(token_ids)
    assert "".join(chunks) == original(tokenizer, token_ids)

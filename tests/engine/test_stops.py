# SPDX-License-Identifier: Apache-2.0
"""Where an output ends: stop texts across tokens, stop ids, min_tokens (CASES S-01)."""

import numpy as np
import pytest

from engine import SamplingParams
from engine.text import OutputText
from tests.fixtures import byte_tokenizer, fallback_tokenizer


class Pieces:
    """A tokenizer of given pieces: id i spells pieces[i]. What OutputText asks of one, it has."""

    special_ids = frozenset()

    class Backend:
        decoder = None

        def __init__(self, pieces):
            self.pieces = pieces

        def id_to_token(self, token):
            return self.pieces[token]

    def __init__(self, pieces):
        self.backend = self.Backend(pieces)

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.backend.pieces[i] for i in ids)


PIECES = ["al", "pha", "<st", "op>", "tail"]


def read(pieces, **fields):
    """Returns (chunks, OutputText) after the pieces, as far as a stop lets them."""
    text = OutputText(Pieces(pieces), SamplingParams(**fields))
    chunks = []
    for token in range(len(pieces)):
        chunks.append(text.push(token))
        if text.stop is not None:
            break
    if text.stop is None:
        chunks.append(text.finish())
    return chunks, text


@pytest.mark.parametrize(
    "fields, expected, stop, tokens",
    [
        ({"stop": "<stop>"}, "alpha", "<stop>", 4),
        ({"stop": "<stop>", "include_stop_str_in_output": True}, "alpha<stop>", "<stop>", 4),
        ({"stop": "pha<"}, "al", "pha<", 3),
        ({"stop": "pha<", "include_stop_str_in_output": True}, "alpha<", "pha<", 3),
        # Two that one token completes: the earliest wins, then the first of the list.
        ({"stop": ["op>", "<stop>"]}, "alpha", "<stop>", 4),
        ({"stop": ["top>", "stop>"]}, "alpha<", "stop>", 4),
        ({"stop": ["<st", "<s"]}, "alpha", "<st", 3),
        ({"stop": ["<s", "<st"]}, "alpha", "<s", 3),
        ({"stop": "<stopX>"}, "alpha<stop>tail", None, 5),
        ({"stop": "tailor"}, "alpha<stop>tail", None, 5),
        # Wholly in the first tokens it does not count; completed later it does.
        ({"stop": "pha", "min_tokens": 2}, "alpha<stop>tail", None, 5),
        ({"stop": "pha<", "min_tokens": 2}, "al", "pha<", 3),
        ({"stop": ["pha", "op>"], "min_tokens": 2}, "alpha<st", "op>", 4),
        ({"stop": "<stop>", "min_tokens": 4}, "alpha<stop>tail", None, 5),
    ],
)
def test_a_stop_ends_the_text(fields, expected, stop, tokens):
    chunks, text = read(PIECES, **fields)
    assert (text.text, text.stop, text.num_tokens) == (expected, stop, tokens)
    assert "".join(chunks) == expected, "the joined stream is the text"


def test_what_may_begin_a_stop_is_held_back_and_nothing_else():
    chunks, _ = read(PIECES, stop="<stopX>")
    assert chunks == ["al", "pha", "", "<stop>", "tail", ""]
    chunks, _ = read(["a", "a", "a", "b"], stop="aab")
    assert chunks[:3] == ["", "", "a"], "the longest end that may begin it"
    assert read(["a", "a", "a", "b"], stop="aab")[1].text == "a"


def test_every_way_to_cut_a_text_into_tokens_stops_it_in_the_same_place():
    whole, stop = "xabababacy", "ababac"
    for cuts in range(1 << (len(whole) - 1)):
        pieces, start = [], 0
        for place in range(1, len(whole) + 1):
            if place == len(whole) or cuts >> (place - 1) & 1:
                pieces.append(whole[start:place])
                start = place
        chunks, text = read(pieces, stop=[stop])
        assert "".join(chunks) == text.text == "xab"
        assert (
            "".join(pieces[: text.num_tokens - 1]).find(stop)
            < 0
            <= "".join(pieces[: text.num_tokens]).find(stop)
        )


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
def test_a_stop_of_several_bytes_counts_the_token_that_completed_it(script, fallback_script, make):
    speaker = script if make is byte_tokenizer else fallback_script
    tokenizer = speaker.llm.tokenizer
    ids = [i for i in tokenizer.encode("é mill") if i != tokenizer.bos_id]
    assert len(set(ids)) == len(ids), "a script can say it"
    speaker.say(ids)
    last_byte = next(n for n in range(1, len(ids) + 1) if "é" in tokenizer.decode(ids[:n]))
    out = speaker.run(stop=["é"])
    assert (out.text, out.stop_reason) == ("", "é")
    assert out.token_ids == ids[:last_byte]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_engine_ends_a_request_at_its_stop(script, overlap):
    ids = [30, 31, 32, 33, 34, 35, 36]
    script.say(ids)
    text = script.llm.tokenizer.decode(ids)
    stop = text[2:4]
    params = SamplingParams(temperature=0, max_tokens=30, stop=[stop], logprobs=1)
    deltas = list(script.llm.stream([0], params))
    out = deltas[-1].output.outputs[0]
    assert out.text == text[: text.index(stop)] == "".join(delta.text for delta in deltas)
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert script.llm.tokenizer.decode(out.token_ids) == text[: text.index(stop) + len(stop)]
    assert len(out.logprobs) == len(out.token_ids)
    assert not script.llm.engine.scheduler.has_work


def test_stop_token_ids_end_it_and_ignore_eos_does_not_hide_them(script):
    script.say([30, 31, 32, 33])
    out = script.run(stop_token_ids=[32])
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([30, 31, 32], "stop", 32)
    assert out.text == script.llm.tokenizer.decode([30, 31])
    out = script.run(stop_token_ids=[32], ignore_eos=True, include_stop_str_in_output=True)
    assert out.text == script.llm.tokenizer.decode([30, 31, 32])
    assert script.run(ignore_eos=True, max_tokens=7).token_ids == [30, 31, 32, 33, 2, 2, 2]
    assert script.run(max_tokens=7).token_ids == [30, 31, 32, 33, 2]


def test_no_end_counts_before_min_tokens(script):
    script.say([30, 31])
    assert script.run(max_tokens=9).token_ids == [30, 31, 2]
    table = script_table_with_two([30, 31])
    script.show(table)
    out = script.run(max_tokens=9, min_tokens=5)
    assert out.token_ids[:2] == [30, 31] and 2 not in out.token_ids[:5]
    assert len(out.token_ids) >= 5
    assert script.run(max_tokens=9, min_tokens=5, stop_token_ids=[30]).token_ids[0] != 30


def script_table_with_two(ids):
    """Returns a table that ends after `ids`, and says 40 where it may not end."""
    table = np.zeros((300, 300), np.float32)
    table[:, ids[0]] = 5
    for here, there in zip(ids, [*ids[1:], 2], strict=True):
        table[here, ids[0]] = 0
        table[here, there] = 10
    table[ids[-1], 40] = 8
    table[40, ids[0]], table[40, 2], table[40, 40] = 0, 10, 8
    return table

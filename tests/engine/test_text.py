# SPDX-License-Identifier: Apache-2.0
"""Scripted outputs through the whole engine: what the user reads is what the ids say (D-01)."""

import numpy as np
import pytest

from engine import LLM, SamplingParams
from tests.fixtures import byte_tokenizer, fallback_tokenizer, script_table, write_script

TEXTS = ["été 漢字 😀", "the mill", "a  b", "\N{REPLACEMENT CHARACTER}!"]


def distinct(ids):
    """Returns whether a script can say `ids`: each id has one successor."""
    return len(set(ids)) == len(ids)


@pytest.fixture(scope="module", params=["bytes", "fallback"])
def speaker(request, own_cache, tmp_path_factory):
    """An engine whose weights are replaced to say whatever a test asks for."""
    tokenizer = {"bytes": byte_tokenizer, "fallback": fallback_tokenizer}[request.param]()
    folder = tmp_path_factory.mktemp("script")
    table = script_table([5, 6, 7])
    write_script(folder, table, tokenizer=tokenizer)
    return LLM(str(folder), max_num_seqs=1, max_num_batched_tokens=8, num_pages=9)


def say(speaker, ids):
    """Makes the model say `ids`, then its end token, after any prompt that is not among them."""
    head = np.asarray(speaker.engine.params["head"])
    table = script_table(ids)
    width = head.shape[1]
    changed = np.zeros_like(head)
    changed[:, : len(table)] = table.T * np.sqrt(1 / width + 1e-5)
    speaker.engine.params = {**speaker.engine.params, "head": changed}


@pytest.mark.parametrize("text", TEXTS)
def test_the_joined_stream_is_the_text(speaker, text):
    ids = [i for i in speaker.tokenizer.encode(text) if i != speaker.tokenizer.bos_id]
    if not distinct(ids):
        ids = list(dict.fromkeys(ids))
    say(speaker, ids)
    params = SamplingParams(temperature=0, max_tokens=60)
    deltas = list(speaker.stream([0], params))
    completion = deltas[-1].output.outputs[0]
    assert completion.token_ids == [*ids, 2]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 2)
    expected = speaker.tokenizer.decode(ids)
    assert completion.text == "".join(delta.text for delta in deltas) == expected
    for cut in range(1, len(ids)):
        [output] = speaker.generate([[0]], SamplingParams(temperature=0, max_tokens=cut))
        assert output.outputs[0].token_ids == ids[:cut]
        assert output.outputs[0].text == speaker.tokenizer.decode(ids[:cut])


def test_sampled_tokens_follow_the_table(speaker):
    """Temperature, top_k and top_p through the public API: frequencies of 400 seeded draws."""
    table = np.full((300, 300), -30.0, np.float32)
    table[:, 10:14] = np.log([0.4, 0.3, 0.2, 0.1])
    head = np.zeros_like(np.asarray(speaker.engine.params["head"]))
    head[:, :300] = table.T * np.sqrt(1 / head.shape[1] + 1e-5)
    speaker.engine.params = {**speaker.engine.params, "head": head}
    cases = {
        "plain": ({}, [0.4, 0.3, 0.2, 0.1]),
        "top_k 2": ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        "top_p 0.75": ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        "temperature 0.5": ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    }
    for name, (fields, expected) in cases.items():
        params = [
            SamplingParams(seed=seed, max_tokens=40, ignore_eos=True, **fields)
            for seed in range(10)
        ]
        outputs = speaker.generate([[0]] * 10, params)
        drawn = np.array([o.outputs[0].token_ids for o in outputs]).reshape(-1)
        counts = np.array([(drawn == token).sum() for token in range(10, 14)])
        assert counts.sum() == 400, name
        deviation = (counts - 400 * np.array(expected)) ** 2 / (400 * np.array(expected) + 1e-9)
        assert deviation[np.array(expected) > 0].sum() < 16.3, name  # chi-square, p = 0.001
        assert counts[np.array(expected) == 0].sum() == 0, name
        again = speaker.generate([[0]] * 10, params)
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]

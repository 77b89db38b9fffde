# SPDX-License-Identifier: Apache-2.0
"""A tokenizer built from GGUF metadata gives the ids of the tokenizer that the tables came from."""

import json
import pathlib
import random

import pytest

import checkpoints
from checkpoints.gguf_tokenizer import tokenizer_from_metadata
from tests.checkpoints.gguf_files import write_tokenizer_gguf
from tests.fixtures import BOS, EOS, NOTE, byte_tokenizer, fallback_tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "data/golden"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = [
    "",
    "the water comes down",
    "  two  spaces\n\n\tand a tab ",
    "été 漢字 😀👩‍👩‍👧 \ufffd",
    f"{BOS}the{EOS} mill{NOTE} race",
    "12 and 345, it's DON'T",
]


def tables(tokenizer):
    """Returns the tokens of a `tokenizers` tokenizer in order of their ids, and its merges."""
    entries = tokenizer.get_vocab(with_added_tokens=True)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(entries, key=entries.get), [" ".join(merge) for merge in merges]


def kind_of(token):
    if token == "<unk>":
        return UNKNOWN
    if token.startswith("<0x"):
        return BYTE
    return {BOS: CONTROL, EOS: CONTROL, NOTE: USER_DEFINED}.get(token, NORMAL)


def write_byte_level(path, *, pre="gpt-2", extra=(), **more):
    tokens, merges = tables(byte_tokenizer())
    types = [kind_of(token) for token in tokens] + [UNUSED] * len(extra)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return write_tokenizer_gguf(
        path, [*tokens, *extra], types, kind="gpt2", pre=pre, merges=merges, **ids | more
    )


def write_sentence_piece(path, **more):
    """Writes the fallback tokenizer's pieces, with scores that fall in the order of its merges."""
    tokens, merges = tables(fallback_tokenizer())
    rank = {merge.replace(" ", ""): index for index, merge in enumerate(merges)}
    scores = [-float(rank.get(token, len(merges))) for token in tokens]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write_tokenizer_gguf(
        path, tokens, [kind_of(t) for t in tokens], kind="llama", scores=scores, **ids | more
    )


def build(path):
    return checkpoints.open_checkpoint(path).tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tables_give_the_source_tokenizers_ids(tmp_path, text):
    tokenizer = build(write_byte_level(tmp_path / "t.gguf"))
    ids = tokenizer.encode(text)
    assert ids == byte_tokenizer().encode(text).ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == byte_tokenizer().decode(ids, skip)


@pytest.mark.parametrize("text", TEXTS)
def test_sentence_piece_tables_give_the_source_tokenizers_ids(tmp_path, text):
    tokenizer = build(write_sentence_piece(tmp_path / "t.gguf"))
    ids = tokenizer.encode(text)
    assert ids == fallback_tokenizer().encode(text).ids
    assert ids[0] == 1 and tokenizer.add_bos
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == fallback_tokenizer().decode(ids, skip)


def test_special_tokens_and_ids_follow_the_token_types(tmp_path):
    path = write_byte_level(tmp_path / "t.gguf", extra=["[PAD]"], eot_token_id=0)
    tokenizer = build(path)
    note = tokenizer.backend.token_to_id(NOTE)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2, 0), False)
    assert tokenizer.special_ids == {0, 1, 2} and note not in tokenizer.special_ids
    assert tokenizer.decode([1, note, 2]) == NOTE
    assert tokenizer.size == 300
    assert tokenizer.known(299) and not tokenizer.known(300) and not tokenizer.known(301)
    assert not tokenizer.known(-1)


def test_the_chat_template_comes_from_the_metadata(tmp_path):
    assert build(write_byte_level(tmp_path / "none.gguf")).chat_template is None
    tokens, merges = tables(byte_tokenizer())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert tokenizer_from_metadata(metadata).chat_template == "{{ messages }}"


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("write", [write_byte_level, write_sentence_piece])
def test_the_bos_flag_gives_one_bos_or_none(tmp_path, write, flag):
    tokenizer = build(write(tmp_path / "t.gguf", add_bos_token=flag))
    assert tokenizer.add_bos is flag
    assert tokenizer.encode("the mill").count(1) == flag
    assert tokenizer.encode("") == [1] * flag
    assert tokenizer.encode("the mill", add_special_tokens=False).count(1) == 0


def test_a_bos_without_an_id_is_refused(tmp_path):
    path = write_byte_level(tmp_path / "t.gguf", add_bos_token=True, bos_token_id=2**32 - 1)
    with pytest.raises(ValueError, match="t.gguf: add_bos is true, but no BOS token is named"):
        build(path)


def test_the_dummy_prefix_follows_the_metadata(tmp_path):
    with_prefix = build(write_sentence_piece(tmp_path / "a.gguf"))
    without = build(write_sentence_piece(tmp_path / "b.gguf", add_space_prefix=False))
    assert with_prefix.encode("the") == without.encode(" the") != without.encode("the")
    assert with_prefix.decode(with_prefix.encode(" the")) == " the"
    assert without.decode(without.encode(" the")) == " the"


def test_characters_without_a_piece_fall_back_to_bytes(tmp_path):
    tokenizer = build(write_sentence_piece(tmp_path / "t.gguf", add_space_prefix=False))
    ids = tokenizer.encode("漢", add_special_tokens=False)
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["<0xE6>", "<0xBC>", "<0xA2>"]
    # A byte token's spelling in a text is text.
    spelled = tokenizer.encode("<0xE6>", add_special_tokens=False)
    assert len(spelled) > 1 and tokenizer.decode(spelled) == "<0xE6>"


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("gpt-2", ["123", "Ġ45"]),
        ("smollm", ["1", "2", "3", "Ġ", "4", "5"]),
        ("qwen2", ["1", "2", "3", "Ġ", "4", "5"]),
        ("llama-bpe", ["123", "Ġ", "45"]),
    ],
)
def test_a_pre_tokenizers_name_decides_how_digits_split(tmp_path, pre, pieces):
    tokens = [*"12345Ġ", "12", "123", "45", "Ġ45", "<s>"]
    types = [NORMAL] * (len(tokens) - 1) + [CONTROL]
    path = write_tokenizer_gguf(
        tmp_path / "t.gguf",
        tokens,
        types,
        kind="gpt2",
        pre=pre,
        merges=["1 2", "12 3", "4 5", "Ġ 45"],
        bos_token_id=len(tokens) - 1,
    )
    tokenizer = build(path)
    ids = tokenizer.encode("123 45", add_special_tokens=False)
    assert [tokens[i] for i in ids] == pieces
    assert tokenizer.add_bos is (pre == "llama-bpe")


def test_qwen2_composes_characters_first(tmp_path):
    tokenizer = build(write_byte_level(tmp_path / "t.gguf", pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pre": "tekken"}, "pre 'tekken' is not supported; supported: default, gpt-2, smollm"),
        ({"eos_token_id": 300}, "eos_token_id is 300, but there are 300 tokens"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; a bool is needed"),
        ({"extra": ["the"] * 2}, "tokens holds 'the' twice"),
    ],
)
def test_tables_that_cannot_be_followed_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        build(write_byte_level(tmp_path / "t.gguf", **change))
    assert "t.gguf: " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "merges, message",
    [
        (["a"], "merges holds 'a'; two pieces are needed"),
        (["a b c"], "merges holds 'a b c'; two pieces are needed"),
        (["a b"], "merges holds 'a b', but 'ab' is no token"),
        (["a c"], "merges holds 'a c', but 'c' is no token"),
    ],
)
def test_merges_that_do_not_fit_are_refused(tmp_path, merges, message):
    path = write_tokenizer_gguf(
        tmp_path / "t.gguf", ["a", "b"], [NORMAL] * 2, kind="gpt2", merges=merges
    )
    with pytest.raises(ValueError, match=message):
        build(path)


def test_other_kinds_are_refused_by_name(tmp_path):
    path = write_tokenizer_gguf(tmp_path / "t.gguf", ["a"], [NORMAL], kind="t5")
    with pytest.raises(ValueError, match="model 't5' is not supported; supported: gpt2, llama"):
        build(path)


def join_by_score(text, score):
    """Returns SentencePiece's pieces: again and again the neighbours with the best score join."""
    pieces = list(text)
    while True:
        pairs = zip(pieces[:-1], pieces[1:], strict=True)
        joins = [(score.get(a + b), -i) for i, (a, b) in enumerate(pairs)]
        joins = [join for join in joins if join[0] is not None]
        if not joins:
            return pieces
        at = -max(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.parametrize("seed", range(20))
def test_merges_from_scores_join_as_sentence_piece_does(tmp_path, seed):
    rng = random.Random(seed)
    words = {"".join(rng.choices("abcd", k=rng.randint(2, 5))) for _ in range(60)}
    pieces = ["<unk>", *"abcd", *sorted(words)]
    scores = [float(-s) for s in rng.sample(range(1000), len(pieces))]
    path = write_tokenizer_gguf(
        tmp_path / "t.gguf",
        pieces,
        [UNKNOWN] + [NORMAL] * (len(pieces) - 1),
        kind="llama",
        scores=scores,
        unknown_token_id=0,
        add_bos_token=False,
        add_space_prefix=False,
    )
    tokenizer = build(path)
    score = dict(zip(pieces, scores, strict=True))
    for _ in range(20):
        text = "".join(rng.choices("abcd", k=30))
        assert [pieces[i] for i in tokenizer.encode(text)] == join_by_score(text, score)


REAL = {  # golden file, BOS id, end ids, whether BOS is added, entries, a piece of the template
    "smollm2-135m": ("smollm2-135m-instruct", 1, (2,), False, 49_152, "<|im_start|>"),
    "gemma3-270m": ("gemma3-270m", 2, (1,), True, 262_144, None),
    "qwen2.5-coder-0.5b": (
        "qwen2.5-coder-0.5b-instruct", 151_643, (151_645,), False, 151_665, "<|im_start|>"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_gives_the_golden_ids(users_model, name):
    file, bos_id, eos_ids, add_bos, size, template = REAL[name]
    tokenizer = build(users_model(name))
    golden = json.loads((GOLDEN / f"{file}.json").read_text())
    for prompt in golden["prompts"]:
        assert tokenizer.encode(prompt["text"]) == prompt["ids"], prompt["name"]
        said = tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=False)
        assert said == prompt["greedy_text"], prompt["name"]
    forced = golden["teacher_forced"]
    assert tokenizer.encode(forced["text"]) == forced["ids"]
    assert tokenizer.encode("") == ([bos_id] if add_bos else [])
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (bos_id, eos_ids, add_bos)
    assert tokenizer.size == size
    assert (
        (tokenizer.chat_template is None)
        if template is None
        else template in tokenizer.chat_template
    )

# SPDX-License-Identifier: Apache-2.0
"""Builds a tokenizer from a GGUF file's metadata, which holds tables but no pipeline.

Two kinds are known by the name in `tokenizer.ggml.model`: "gpt2" is byte-level BPE, whose
pre-tokenizer is given by name only (`tokenizer.ggml.pre`); "llama" is SentencePiece BPE with
scores in place of merges, and byte tokens for characters without an entry.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from checkpoints.tokenizer import Tokenizer, build_tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_NORMAL = 1
_SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies

# Longer pieces get no merges: real ones are far shorter, and the work grows with the square.
_MAX_PIECE_LENGTH = 256

_ARRAYS = {"tokens": str, "merges": str, "scores": float, "token_type": int}
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")


class _PreTokenizer(NamedTuple):
    """What a pre-tokenizer's name means for byte-level BPE.

    `splits` cut the text before its bytes are spelled; `gpt2_regex` is GPT-2's own cut.
    `whole_words` takes a word that is an entry as it is, without merges. `adds_bos` holds where
    the metadata has no flag.
    """

    splits: Callable[[], list[Any]]
    gpt2_regex: bool
    normalizer: Callable[[], Any] | None = None
    whole_words: bool = False
    adds_bos: bool = False


def _split_words(digits: str) -> Callable[[], list[Any]]:
    """Returns a splitter into contractions, words, numbers as `digits` says, marks and spaces."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")]


_GPT2 = _PreTokenizer(splits=list, gpt2_regex=True)
PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _PreTokenizer(
        splits=lambda: [pre_tokenizers.Digits(individual_digits=True)], gpt2_regex=True
    ),
    "qwen2": _PreTokenizer(
        splits=_split_words(r"\p{N}"), gpt2_regex=False, normalizer=normalizers.NFC
    ),
    "llama-bpe": _PreTokenizer(
        splits=_split_words(r"\p{N}{1,3}"), gpt2_regex=False, whole_words=True, adds_bos=True
    ),
}


def check_tokenizer_metadata(metadata: dict[str, Any]) -> None:
    """Raises ValueError unless the tokenizer's tables have the right types and fit together."""
    for name, kind in _ARRAYS.items():
        values = metadata.get(f"tokenizer.ggml.{name}")
        # The items of a GGUF array are all of one type.
        if values is not None and not (
            isinstance(values, list) and all(type(v) is kind for v in values[:1])
        ):
            found = type(values[0]).__name__ if isinstance(values, list) else "no array"
            raise ValueError(f"tokenizer.ggml.{name} must be an array of {kind.__name__}: {found}")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    for name in ("scores", "token_type"):
        length = len(metadata.get(f"tokenizer.ggml.{name}", tokens))
        if length != len(tokens):
            raise ValueError(f"tokenizer.ggml.{name} has {length} items for {len(tokens)} tokens")
    for name in _IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        value = metadata.get(key)
        # 2**32 - 1 is how some writers spell -1, "there is none".
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 32):
            raise ValueError(f"{key} is {value!r}; a token id is needed")
    for key, kind in (
        ("tokenizer.ggml.model", str),
        ("tokenizer.ggml.pre", str),
        ("tokenizer.chat_template", str),
        ("tokenizer.ggml.add_bos_token", bool),
        ("tokenizer.ggml.add_space_prefix", bool),
    ):
        value = metadata.get(key)
        if value is not None and type(value) is not kind:
            raise ValueError(f"{key} is {value!r}; a {kind.__name__} is needed")


def tokenizer_from_metadata(metadata: dict[str, Any]) -> Tokenizer | None:
    """Returns the tokenizer that the metadata describes, or None where it describes none.

    No end token is ever appended to a prompt (`add_eos_token` is not followed). Raises ValueError
    for a kind or a pre-tokenizer that is not supported, and for tables that contradict themselves.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    if kind not in _KINDS:
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not supported; supported: {', '.join(_KINDS)}"
        )
    check_tokenizer_metadata(metadata)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise ValueError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    backend, adds_bos = _KINDS[kind](metadata, vocabulary)
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    for special, wanted in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
        add = backend.add_special_tokens if special else backend.add_tokens
        add(
            [
                tokenizers.AddedToken(token, special=special, normalized=False)
                for token, token_type in zip(tokens, types, strict=True)
                if token_type in wanted and token
            ]
        )
    ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    return build_tokenizer(
        backend,
        bos_id=ids["bos"],
        eos_ids=[ids["eos"], ids["eot"], ids["eom"]],
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        chat_template=metadata.get("tokenizer.chat_template"),
        unused_ids=[i for i, token_type in enumerate(types) if token_type == _UNUSED],
    )


def _token_id(metadata: dict[str, Any], name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None or value == (1 << 32) - 1:
        return None
    if value >= size:
        raise ValueError(f"{key} is {value}, but there are {size} tokens")
    return value


def _byte_level(
    metadata: dict[str, Any], vocabulary: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a byte-level BPE backend, and whether a BOS is added by default."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    if "tokenizer.ggml.merges" not in metadata:
        raise ValueError("tokenizer.ggml.merges is missing")
    merges = []
    for merge in metadata["tokenizer.ggml.merges"]:
        left, space, right = merge.partition(" ")
        if not (left and right) or " " in right:
            raise ValueError(f"tokenizer.ggml.merges holds {merge!r}; two pieces are needed")
        # The library would abort with a panic on a merge whose result is no token.
        for piece in (left, right, left + right):
            if piece not in vocabulary:
                raise ValueError(
                    f"tokenizer.ggml.merges holds {merge!r}, but {piece!r} is no token"
                )
        merges.append((left, right))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole_words)
    )
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer()
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_regex)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*pre.splits(), spell])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentence_piece(
    metadata: dict[str, Any], vocabulary: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a SentencePiece-style BPE backend with byte fallback, and that a BOS is added."""
    if "tokenizer.ggml.scores" not in metadata:
        raise ValueError("tokenizer.ggml.scores is missing")
    merges = _merges_from_scores(metadata, vocabulary)
    unknown_id = _token_id(metadata, "unknown", len(vocabulary))
    unknown = None if unknown_id is None else metadata["tokenizer.ggml.tokens"][unknown_id]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=unknown,
        )
    )
    dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spell: list[Any] = [normalizers.Replace(" ", _SPACE)]
    unspell: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if dummy_prefix:
        spell.insert(0, normalizers.Prepend(_SPACE))
        unspell.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spell)
    backend.decoder = decoders.Sequence(unspell)
    return backend, True


def _merges_from_scores(
    metadata: dict[str, Any], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Returns every way to join two pieces into a third, best score of the third first.

    SentencePiece joins the neighbours whose piece has the best score; so does BPE over merges in
    this order. Only normal pieces join: spellings of byte or control tokens never arise from text.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    merges = []
    for index in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
        piece = tokens[index]
        if piece not in pieces or len(piece) > _MAX_PIECE_LENGTH:
            continue
        # Of two ways to the same piece the one with the longer left part comes first, as pieces
        # grow from the left.
        for cut in range(len(piece) - 1, 0, -1):
            if piece[:cut] in pieces and piece[cut:] in pieces:
                merges.append((piece[:cut], piece[cut:]))
    return merges


_KINDS = {"gpt2": _byte_level, "llama": _sentence_piece}

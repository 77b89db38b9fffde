# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that the engine uses, from whichever checkpoint format it was built."""

import dataclasses
from collections.abc import Collection, Sequence

import tokenizers
from tokenizers import processors


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    - `backend` does the work; its post-processor already follows `add_bos`.
    - `eos_ids` are the checkpoint's own end tokens, without repeats, the main one first.
    - `special_ids` are skipped by `decode` unless asked for.
    - `known_ids` are the ids that stand for something; padding entries are not among them.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
    special_ids: frozenset[int]
    known_ids: frozenset[int]

    @property
    def size(self) -> int:
        """One more than the highest known id."""
        return max(self.known_ids, default=-1) + 1

    def known(self, token_id: int) -> bool:
        """Returns whether the id stands for something, so that it may be sampled."""
        return token_id in self.known_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`; spellings of special tokens in it become those tokens.

        With `add_special_tokens`, one BOS comes first exactly where `add_bos` says so.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids; ids without an entry give no text."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


def build_tokenizer(
    backend: tokenizers.Tokenizer,
    *,
    bos_id: int | None,
    eos_ids: Sequence[int | None],
    add_bos: bool | None,
    chat_template: str | None,
    unused_ids: Collection[int] = (),
) -> Tokenizer:
    """Returns a Tokenizer whose backend adds one BOS, or none, as `add_bos` says.

    `add_bos=None` keeps what the backend's post-processor does by itself; an explicit flag wins
    over it. Raises ValueError where a BOS shall be added and there is none.
    """
    starts_with_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    if add_bos is None:
        add_bos = starts_with_bos
    if add_bos and bos_id is None:
        raise ValueError("add_bos is true, but no BOS token is named; name one, or unset the flag")
    if add_bos and not starts_with_bos:
        # "BOS" is only this template's name for the id: its pieces cannot hold every token text.
        bos_first = processors.TemplateProcessing(
            single=["BOS", "$A"], special_tokens=[("BOS", bos_id)]
        )
        before = backend.post_processor
        backend.post_processor = processors.Sequence([before, bos_first] if before else [bos_first])
    elif starts_with_bos and not add_bos:
        backend.post_processor = None
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return Tokenizer(
        backend=backend,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
        add_bos=add_bos,
        chat_template=chat_template,
        special_ids=frozenset(i for i, token in added.items() if token.special),
        known_ids=frozenset(vocabulary.values()).difference(unused_ids),
    )

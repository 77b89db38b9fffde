# SPDX-License-Identifier: Apache-2.0
"""Token ids to text as they come, in whole characters, at a cost that does not grow.

One rule: the joined stream is `tokenizer.decode` of all the output's ids at once. So a prompt plays
no part: what its last bytes began, the output's bytes do not complete.
"""

import codecs
import functools
import json
import re

# How byte-level vocabularies spell bytes as characters: printable Latin-1 stands for itself, and
# the other bytes are, in order, the characters from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + place): byte
    for place, byte in enumerate(byte for byte in range(0x100) if byte not in PRINTABLE)
}
# How vocabularies with byte fallback spell one byte.
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """The text of one output, grown by `push` and closed by `finish`.

    - `push` and `finish` return only new text, and text once returned is never changed.
    - A character is returned when all of it is known; an unfinished one at the end is returned by
      `finish`, as U+FFFD.
    - `text` is everything returned so far.

    With `skip_special_tokens`, special tokens have no text. Ids without an entry never have any.
    """

    def __init__(self, tokenizer, *, skip_special_tokens: bool = True):
        self._piece_of = tokenizer.backend.id_to_token
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._parts: list[str] = []
        decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        byte_level = is_byte_level(tokenizer.backend.decoder)
        self._reader = ByteReader() if byte_level else PieceReader(decode)

    @property
    def text(self) -> str:
        """The text returned so far."""
        # Joined when asked for, so that a long output does not copy itself at every token.
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def push(self, token_id: int) -> str:
        """Returns the text that the next id completes; empty while a character is unfinished."""
        if token_id in self._skipped or (piece := self._piece_of(token_id)) is None:
            return ""
        return self._keep(self._reader.read(token_id, piece))

    def finish(self) -> str:
        """Returns what is left: the text of an unfinished tail, with U+FFFD for what lacks."""
        return self._keep(self._reader.finish())

    def _keep(self, new: str) -> str:
        self._parts.append(new)
        return new


def is_byte_level(decoder) -> bool:
    """Returns whether a `tokenizers` decoder joins the pieces' bytes and does nothing else."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]


class ByteReader:
    """Reads byte-level pieces: the text is the UTF-8 reading of their bytes."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, _: int, piece: str) -> str:
        return self._decoder.decode(piece_bytes(piece))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


@functools.lru_cache(maxsize=1 << 18)
def piece_bytes(piece: str) -> bytes:
    """Returns the bytes that a piece spells; an added token may be plain text instead."""
    if all(character in BYTE_OF for character in piece):
        return bytes(BYTE_OF[character] for character in piece)
    return piece.encode()


class PieceReader:
    """Reads pieces that are whole strings, or single bytes that stand in for missing characters.

    The tokenizer's own decoder gives the text of what is new, with a few ids of what came before in
    front, since it treats the first piece differently (it strips the leading space). A run of byte
    pieces waits for its end: the decoder replaces the whole run when any of it is not UTF-8.
    """

    def __init__(self, decode):
        self._decode = decode
        self._context: list[int] = []  # already read; decodes to some text, unless all is empty
        self._context_text = ""
        self._waiting: list[int] = []  # a run of byte pieces

    def read(self, token_id: int, piece: str) -> str:
        self._waiting.append(token_id)
        return "" if BYTE_PIECE.fullmatch(piece) else self.finish()

    def finish(self) -> str:
        ids, self._waiting = self._waiting, []
        return self._advance(ids) if ids else ""

    def _advance(self, ids: list[int]) -> str:
        """Returns the text of `ids`, which become the context of what follows."""
        ids = self._context + ids
        new = self._decode(ids)[len(self._context_text) :]
        for start in range(len(ids) - 1, -1, -1):
            self._context, self._context_text = ids[start:], self._decode(ids[start:])
            if self._context_text:
                break
        return new

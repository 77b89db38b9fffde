# SPDX-License-Identifier: Apache-2.0
"""The text of one output as it grows: stop texts found across tokens, nothing shown too early."""

from checkpoints.tokenizer import Tokenizer
from engine.detokenize import Detokenizer
from engine.params import SamplingParams


class OutputText:
    """Text from tokens, up to the first stop text.

    - `push` and `finish` return only what is final: text that may turn out to begin a stop text is
      held back until that is known.
    - `stop` is the stop text that was found; then `num_tokens` counts the tokens up to the one that
      completed it, and no more may be pushed.
    - A stop that lies wholly in the text of the first `min_tokens` tokens does not count.
    - Of several that one token completes, the earliest wins, and the first of the list in a tie.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._token_ids: list[int] = []
        self._held = ""  # read, and not returned yet
        self._shown: list[str] = []
        self._num_shown = 0  # characters
        self._exempt = 0  # characters in which no stop may end
        self.stop: str | None = None

    @property
    def text(self) -> str:
        """Everything that was returned."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the output."""
        return len(self._token_ids)

    def push(self, token_id: int) -> str:
        """Returns what the next token adds to the text."""
        assert self.stop is None, "a stop text ended this output"
        new = self._detokenizer.push(token_id)
        self._token_ids.append(token_id)
        if not self._params.stop:
            self._shown.append(new)
            return new
        self._held += new
        shown = self._search()
        if len(self._token_ids) <= self._params.min_tokens:
            self._exempt = self._num_shown + len(self._held)
        return shown

    def finish(self) -> str:
        """Returns the rest of the text, also what an unfinished character left."""
        if self.stop is not None:
            return ""
        self._held += self._detokenizer.finish()
        shown = self._search() if self._params.stop else ""
        return shown if self.stop is not None else shown + self._show(len(self._held))

    def _search(self) -> str:
        """Looks for a stop in what is held, and returns what is certain."""
        found = self._first_stop()
        if found is None:
            return self._show(len(self._held) - self._possible_stop())
        place, self.stop = found
        end = place + len(self.stop)
        self._drop_later_tokens(self._num_shown + end)
        shown = self._show(end if self._params.include_stop_str_in_output else place)
        self._held = ""
        return shown

    def _first_stop(self) -> tuple[int, str] | None:
        """Returns (place in the held text, stop) of the stop that counts, if there is one."""
        if len(self._token_ids) <= self._params.min_tokens:
            return None
        found = []
        for order, stop in enumerate(self._params.stop):
            least = max(0, self._exempt - self._num_shown - len(stop) + 1)
            place = self._held.find(stop, least)
            if place >= 0:
                found.append((place, order))
        if not found:
            return None
        place, order = min(found)
        return place, self._params.stop[order]

    def _possible_stop(self) -> int:
        """Returns the length of the longest end of the held text that begins a stop."""
        longest = max(map(len, self._params.stop)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._params.stop):
                return length
        return 0

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self._shown.append(shown)
        self._num_shown += len(shown)
        return shown

    def _drop_later_tokens(self, end: int) -> None:
        """Forgets the tokens after the one that completed the first `end` characters.

        There are some where the decoder waits: a run of bytes is text only when it has ended.
        """
        wanted = (self.text + self._held)[:end]
        ids = self._token_ids
        skip = self._params.skip_special_tokens
        while len(ids) > 1 and self._tokenizer.decode(ids[:-1], skip)[:end] == wanted:
            del ids[-1]

# SPDX-License-Identifier: Apache-2.0
"""From a conversation to token ids: the model's own template, and messages that stay text."""

import json
import pathlib
import re
import secrets
import selectors
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from checkpoints.tokenizer import Tokenizer

Message = Mapping[str, Any]
Conversation = Sequence[Message]

WORKER = pathlib.Path(__file__).with_name("template_worker.py")
MAX_SECONDS = 10.0  # of rendering one conversation
# Characters of the private planes: no text has them, and no template looks for them.
OPENS, CLOSES = "\U0010fff0", "\U0010fff1"
# Nobody outside can write a private name, since nobody knows this.
NONCE = secrets.token_hex(8)


class ChatEncoder:
    """Renders conversations with a tokenizer's template, and encodes them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer()
        self._specials = special_texts(tokenizer) if tokenizer else {}
        self._apart: tokenizers.Tokenizer | None = None  # made when first needed

    def token_ids(
        self, conversation: Conversation, options: Mapping[str, Any], *, parse_special: bool
    ) -> list[int]:
        """Returns the ids of a conversation: those of its rendered text, without another BOS.

        Spellings of special tokens in the messages are text, unless `parse_special`. Raises
        ValueError where there is no template, or it refuses the conversation.
        """
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer; chat needs one")
        masks: dict[str, str] = {}
        messages: Any = [dict(message) for message in conversation]
        spelling = re.compile("|".join(map(re.escape, by_length(self._specials))) or r"(?!)")
        if not parse_special:

            def mask(match: re.Match) -> str:
                return masks.setdefault(match[0], private_name(f"text {len(masks)}"))

            messages = map_texts(messages, lambda text: spelling.sub(mask, text))
        text = self.render(messages, options)
        if not masks:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._encode_apart(text, masks, spelling)

    def render(self, conversation: Conversation, options: Mapping[str, Any]) -> str:
        """Returns the text of a conversation as the model's template writes it."""
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ValueError("the model has no chat template; write the prompt yourself")
        variables = {
            "messages": [flat_message(message) for message in conversation],
            "add_generation_prompt": True,
            **self._token_variables(),
            **options,
        }
        goes_on = variables.pop("continue_final_message", False)
        if goes_on:
            variables["add_generation_prompt"] = False
        text = self._renderer.render(tokenizer.chat_template, variables)
        return cut_after_last(text, conversation) if goes_on else text

    def _token_variables(self) -> dict[str, str]:
        """Returns the texts of BOS and EOS, which templates name."""
        assert self._tokenizer is not None
        backend = self._tokenizer.backend
        named = {"bos_token": self._tokenizer.bos_id}
        named["eos_token"] = next(iter(self._tokenizer.eos_ids), None)
        texts = {name: backend.id_to_token(i) for name, i in named.items() if i is not None}
        return {name: text or "" for name, text in texts.items()} | {
            name: "" for name, i in named.items() if i is None
        }

    def _encode_apart(self, text: str, masks: Mapping[str, str], spelling: re.Pattern) -> list[int]:
        """Returns the ids of a text in which masked spellings are text and others are tokens.

        By a copy of the tokenizer that knows the special tokens under other names: those in the
        text are renamed, what is masked is spelled out again and means nothing to the copy.
        """
        assert self._tokenizer is not None
        if self._apart is None:
            self._apart = renamed_specials(self._tokenizer)
        renamed = spelling.sub(lambda match: private_name(self._specials[match[0]]), text)
        for original, mask in masks.items():
            renamed = renamed.replace(mask, original)
        names = {private_name(i): i for i in self._specials.values()}
        own = {self._apart.token_to_id(name): i for name, i in names.items()}
        ids = self._apart.encode(renamed, add_special_tokens=False).ids
        return [own.get(i, i) for i in ids]


def as_conversations(messages: Any) -> list[Conversation]:
    """Returns one conversation, or several, as a list; raises ValueError for anything else."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError("messages must be a list of messages, or a list of such lists")
    listed = list(messages)
    conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
    for index, conversation in enumerate(conversations):
        check_conversation(conversation, f"conversation {index}")
    return conversations


def check_conversation(conversation: Any, where: str) -> None:
    """Raises ValueError, naming the message, unless it is a list of messages."""
    if isinstance(conversation, str | bytes | Mapping) or not isinstance(conversation, Sequence):
        raise ValueError(f"{where} must be a list of messages")
    if not conversation:
        raise ValueError(f"{where} has no messages; give at least one")
    for place, message in enumerate(conversation):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'{where}, message {place}: it must be an object with a "role"')
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for part in parts:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise ValueError(f"{where}, message {place}: only parts of text are supported")
        if not isinstance(content, str | list | None):
            raise ValueError(f"{where}, message {place}: the content must be text")


def flat_message(message: Message) -> dict[str, Any]:
    """Returns a message whose content, if it came in parts, is one text, a line a part."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "\n".join(part["text"] for part in content)}


def cut_after_last(text: str, conversation: Conversation) -> str:
    """Returns the rendered text up to the end of the last message's content."""
    content = str(flat_message(conversation[-1]).get("content") or "").strip()
    place = text.rfind(content)
    if not content or place < 0:
        raise ValueError("continue_final_message: the template does not write the last message")
    return text[: place + len(content)]


def map_texts(value: Any, change: Any) -> Any:
    """Returns a JSON value with `change` done to every text in it, keys left alone."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value


def special_texts(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns {spelling: id} of the tokenizer's special tokens."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special}


def by_length(texts: Mapping[str, Any]) -> list[str]:
    """Returns the texts, longest first, so that a pattern finds the longest."""
    return sorted(texts, key=len, reverse=True)


def private_name(what: str | int) -> str:
    """Returns a text that stands in for a special token, by its id, or for a masked spelling."""
    return f"{OPENS}{NONCE}{what}{CLOSES}"


def renamed_specials(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Returns a copy of the backend whose special tokens have their private names."""
    state = json.loads(tokenizer.backend.to_str())
    for token in state["added_tokens"]:
        if token["special"]:
            token["content"] = private_name(token["id"])
    return tokenizers.Tokenizer.from_str(json.dumps(state))


class Renderer:
    """Renders templates in a worker process, which is started when first needed.

    One that takes too long is ended, and the next call starts another.
    """

    def __init__(self, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._worker: subprocess.Popen | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Returns the text; raises ValueError with what went wrong, in one line."""
        try:
            asked = json.dumps({"template": template, "variables": variables}) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the chat template's variables are not JSON: {error}") from None
        worker = self._running()
        assert worker.stdin is not None
        try:
            worker.stdin.write(asked.encode())
            worker.stdin.flush()
            answer = self._read_line(worker)
        except OSError:
            answer = b""
        if not answer:
            self._end()
            raise ValueError("the chat template's process ended; it may have taken too much memory")
        answered = json.loads(answer)
        if "error" in answered:
            raise ValueError(f"the chat template failed: {' '.join(answered['error'].split())}")
        return answered["text"]

    def _read_line(self, worker: subprocess.Popen) -> bytes:
        assert worker.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)
            if not selector.select(self._max_seconds):
                self._end()
                raise ValueError(f"the chat template took more than {self._max_seconds:g} s")
        return worker.stdout.readline()

    def _running(self) -> subprocess.Popen:
        if self._worker is None or self._worker.poll() is not None:
            # Isolated: neither the working folder nor the environment says what is imported.
            command = [sys.executable, "-I", str(WORKER)]
            self._worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            weakref.finalize(self, end_process, self._worker)
        return self._worker

    def _end(self) -> None:
        if self._worker is not None:
            end_process(self._worker)
            self._worker = None


def end_process(process: subprocess.Popen) -> None:
    """Ends a process and waits for it."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()

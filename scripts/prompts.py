# SPDX-License-Identifier: Apache-2.0
"""Reads the prompts of a command: flags or a file, every row checked before any work starts."""

import json
import sys
from json import JSONDecodeError
from pathlib import Path
from typing import Any, NamedTuple

from engine.chat import check_conversation
from engine.params import SamplingParams
from scripts.command_line import UsageError, usage_errors

# What a row asks for, by the keys that say it, and how to write it.
KINDS = {
    "prompt": (("prompt",), '{"prompt": "..."}'),
    "chat": (("messages",), '{"messages": [{"role": "user", "content": "..."}]}'),
    "score": (("context", "continuation"), '{"context": "...", "continuation": "..."}'),
}
# What a row may ask for in each mode.
ALLOWED = {
    "prompt": ("prompt", "chat"),
    "chat": ("prompt", "chat"),
    "score": ("score",),
    "embed": ("prompt",),
}
UNSAMPLED = ("score", "embed")  # modes in which no token is drawn
TEMPLATE_KEYS = ("tools", "documents", "chat_template_kwargs")


class Row(NamedTuple):
    """One request of the input. `asked` is its prompt, its messages, or a pair to score."""

    kind: str
    asked: Any
    fields: dict[str, Any]  # of sampling
    template: dict[str, Any]  # variables of the chat template

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters, without a model's own defaults."""
        return SamplingParams.from_dict(self.fields)


def read_rows(
    prompts: list[str] | None, source: str | None, fields: dict[str, Any], mode: str = "prompt"
) -> list[Row]:
    """Returns the rows of --prompt or --input; `fields` are the sampling flags that were given.

    A file ending in .jsonl has one object a line, and its sampling fields win over the flags; blank
    lines are passed over. One ending in .txt has one prompt a line. "-" is standard input: objects
    if the first line begins with "{", else prompts. `mode`: "prompt", "chat" (a prompt is what the
    user says; lines may have messages), "score" (lines have a context and a continuation) or
    "embed"; the last two have no sampling fields.
    Raises UsageError naming the line.
    """
    if (prompts is None) == (source is None):
        raise UsageError("give either --prompt=TEXT, once or more, or --input=FILE")
    with usage_errors():
        SamplingParams.from_dict(fields)
    if mode == "score" and prompts is not None:
        raise UsageError("--score takes --input=F.jsonl, with a context and a continuation a line")
    if source is None:
        return [text_row(text, fields, mode, "--prompt") for text in prompts or []]
    lines = read_lines(source)
    name = "standard input" if source == "-" else source
    if not is_jsonl(source, lines):
        if mode == "score":
            raise UsageError(f"--input={source} has texts; --score takes JSON lines")
        return [
            text_row(line, fields, mode, f"{name} line {number}")
            for number, line in enumerate(lines, start=1)
        ]
    return [
        parse_row(line, fields, mode, f"{name} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def text_row(text: str, fields: dict[str, Any], mode: str, where: str) -> Row:
    """Returns the row of a bare text."""
    text = checked_text(text, where)
    if mode == "chat":
        return Row("chat", [{"role": "user", "content": text}], fields, {})
    return Row("prompt", text, fields, {})


def read_lines(source: str) -> list[str]:
    if source != "-" and Path(source).suffix not in (".jsonl", ".txt"):
        raise UsageError(f"--input={source} must end in .jsonl or .txt, or be - for standard input")
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        # Only a newline ends a line: JSON may hold the other characters that str.splitlines knows.
        lines = data.decode("utf-8").split("\n")
    except OSError as error:
        raise UsageError(
            f"--input={source} cannot be read ({error.strerror}); check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--input={source} is not UTF-8 at byte {error.start}; convert it first"
        ) from error
    lines = [line.removesuffix("\r") for line in lines]
    return lines[:-1] if lines[-1] == "" else lines


def is_jsonl(source: str, lines: list[str]) -> bool:
    if source != "-":
        return Path(source).suffix == ".jsonl"
    return next((line for line in lines if line.strip()), "").lstrip().startswith("{")


def parse_row(line: str, fields: dict[str, Any], mode: str, where: str) -> Row:
    """Returns the row of one line of JSON; `where` names it in errors."""
    form = KINDS[mode if mode in KINDS else "prompt"][1]
    try:
        row = json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        fault = (
            f"{error.msg}, column {error.colno}" if isinstance(error, JSONDecodeError) else error
        )
        raise UsageError(
            f"{where} is not valid JSON ({fault}); write {form} on one line"
        ) from error
    keys_of = row if isinstance(row, dict) else {}
    kinds = [kind for kind, (keys, _) in KINDS.items() if all(key in keys_of for key in keys)]
    if len(kinds) != 1 or kinds[0] not in ALLOWED[mode]:
        keys = '"prompt": text or a list of ids' if mode in ("prompt", "embed") else form
        raise UsageError(f"{where} must be an object with {keys}")
    [kind] = kinds
    asked = checked_ask(kind, [row.pop(key) for key in KINDS[kind][0]], mode, where)
    kind = "chat" if mode == "chat" and kind == "prompt" else kind
    template = take_template(row, where) if kind == "chat" else {}
    if row and mode in UNSAMPLED:
        raise UsageError(f"{where}: {next(iter(row))!r} plays no part with --{mode}; leave it out")
    with usage_errors(f"{where}: "):
        SamplingParams.from_dict(fields | row)
    return Row(kind, asked, fields | row, template)


def checked_ask(kind: str, values: list[Any], mode: str, where: str) -> Any:
    """Returns what a row asks for, checked: a prompt, messages, or a pair."""
    if kind == "chat":
        with usage_errors():
            check_conversation(values[0], where)
        return values[0]
    if kind == "score":
        return tuple(checked_prompt(value, where) for value in values)
    if mode == "chat":
        return [{"role": "user", "content": checked_text(values[0], where)}]
    return checked_prompt(values[0], where)


def take_template(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Takes the template's variables out of a row, and returns them."""
    found = {key: row.pop(key) for key in TEMPLATE_KEYS if key in row}
    more = found.pop("chat_template_kwargs", {})
    if not isinstance(more, dict):
        raise UsageError(f"{where}: chat_template_kwargs must be an object")
    return found | more


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def checked_text(text: Any, where: str) -> str:
    """Returns a text that is one; raises UsageError, naming `where`."""
    if not isinstance(text, str):
        raise UsageError(f"{where}: the prompt of a chat must be text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: the prompt has half of a surrogate pair at character {error.start}; "
            "write the whole character"
        ) from error
    return text


def checked_prompt(prompt: Any, where: str) -> str | list[int]:
    """Returns the prompt if it is text or ids; raises UsageError, naming `where`."""
    if isinstance(prompt, str):
        return checked_text(prompt, where)
    if isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    raise UsageError(f"{where}: the prompt must be text or a list of ids, whole numbers from 0")

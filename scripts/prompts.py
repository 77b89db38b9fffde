# SPDX-License-Identifier: Apache-2.0
"""Reads the prompts of a command: flags or a file, every row checked before any work starts."""

import json
import sys
from json import JSONDecodeError
from pathlib import Path
from typing import Any, NamedTuple

from engine.request import SamplingParams
from scripts.command_line import UsageError, usage_errors


class Row(NamedTuple):
    """One request of the input."""

    prompt: str | list[int]
    params: SamplingParams


def read_rows(prompts: list[str] | None, source: str | None, fields: dict[str, Any]) -> list[Row]:
    """Returns the rows of --prompt or --input; `fields` are the sampling flags that were given.

    A file ending in .jsonl has one object a line, {"prompt": text or ids, any sampling field}, and
    its fields win over the flags; blank lines are passed over. One ending in .txt has one prompt a
    line. "-" is standard input: objects if the first line begins with "{", else prompts. Raises
    UsageError naming the line.
    """
    if (prompts is None) == (source is None):
        raise UsageError("give either --prompt=TEXT, once or more, or --input=FILE")
    with usage_errors():
        params = SamplingParams.from_dict(fields)
    if source is None:
        return [Row(checked_prompt(text, "--prompt"), params) for text in prompts or []]
    lines = read_lines(source)
    name = "standard input" if source == "-" else source
    if not is_jsonl(source, lines):
        return [
            Row(checked_prompt(line, f"{name} line {number}"), params)
            for number, line in enumerate(lines, start=1)
        ]
    return [
        parse_row(line, fields, f"{name} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


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


def parse_row(line: str, fields: dict[str, Any], where: str) -> Row:
    """Returns the row of one line of JSON; `where` names it in errors."""
    try:
        row = json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        fault = (
            f"{error.msg}, column {error.colno}" if isinstance(error, JSONDecodeError) else error
        )
        raise UsageError(
            f'{where} is not valid JSON ({fault}); write {{"prompt": "..."}} on one line'
        ) from error
    if not isinstance(row, dict) or "prompt" not in row:
        raise UsageError(f'{where} must be an object with "prompt": text or a list of ids')
    prompt = checked_prompt(row.pop("prompt"), where)
    with usage_errors(f"{where}: "):
        return Row(prompt, SamplingParams.from_dict(fields | row))


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def checked_prompt(prompt: Any, where: str) -> str | list[int]:
    """Returns the prompt if it is text or ids; raises UsageError, naming `where`."""
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{where}: the prompt has half of a surrogate pair at character {error.start}; "
                "write the whole character"
            ) from error
        return prompt
    if isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    raise UsageError(f"{where}: the prompt must be text or a list of ids, whole numbers from 0")

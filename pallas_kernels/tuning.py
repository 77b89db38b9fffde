# SPDX-License-Identifier: Apache-2.0
"""Block sizes of kernels: those that were measured, and those that a rule gives for all others.

What was measured is in tuned.json beside each kernel, a line an entry, sorted: {"chip", "shape",
"dtype", "blocks", and the evidence: "seconds", "untuned_seconds", "jax", "date"}.
`scripts/tune_kernels.py` writes it.
"""

import contextlib
import contextvars
import functools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = "tuned.json"
FOLDER = Path(__file__).parent


class Asked(NamedTuple):
    """What a kernel asked for sizes of, and what its rule gives."""

    operation: str
    chip: str
    shape: Mapping[str, int]
    dtype: str
    rule: Mapping[str, int]


class Trial(NamedTuple):
    """Sizes that take the place of all others, or None for the rule's; who asked for some."""

    blocks: Mapping[str, int] | None
    asked: list[Asked]


_trial: contextvars.ContextVar[Trial | None] = contextvars.ContextVar("trial", default=None)


@contextlib.contextmanager
def trial(blocks: Mapping[str, int] | None = None) -> Iterator[list[Asked]]:
    """Yields a list of what is asked while the block runs; it is answered with `blocks`, or with
    the rule's sizes if None, whatever was measured.

    Sizes are asked for as a call is traced: jax must not have traced the same function before.
    """
    tried = Trial(blocks, [])
    before = _trial.set(tried)
    try:
        yield tried.asked
    finally:
        _trial.reset(before)


def entry_key(chip: str, shape: Mapping[str, int], dtype: str) -> str:
    """Returns what an entry is found by."""
    return f"{chip} {dtype} {' '.join(f'{name}={shape[name]}' for name in sorted(shape))}"


@functools.cache
def entries(operation: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the entries of an operation's file by their keys."""
    path = folder / operation / FILE
    return by_key(json.loads(path.read_text())) if path.exists() else {}


def by_key(found: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns entries by their keys; of those with the same one, the last."""
    return {entry_key(one["chip"], one["shape"], one["dtype"]): dict(one) for one in found}


def to_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what a file of these entries says."""
    lines = [json.dumps(found[key]) for key in sorted(found)]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def block_sizes(
    operation: str, chip: str, shape: Mapping[str, int], dtype: str, rule: Mapping[str, int]
) -> dict[str, int]:
    """Returns the sizes that were measured for such arguments, or those of the rule.

    That nothing was measured is said once for each shape, where the chip is known.
    """
    tried = _trial.get()
    if tried is not None:
        tried.asked.append(Asked(operation, chip, dict(shape), dtype, dict(rule)))
        return dict(rule if tried.blocks is None else tried.blocks)
    found = entries(operation, FOLDER).get(entry_key(chip, shape, dtype))
    if found is not None:
        return dict(found["blocks"])
    if chip:
        _say_missing(operation, entry_key(chip, shape, dtype), str(dict(rule)))
    return dict(rule)


@functools.cache
def _say_missing(operation: str, key: str, rule: str) -> None:
    logging.getLogger("headrace").info(
        "%s was not tuned for %s; taking %s (scripts/tune_kernels.py measures)",
        operation,
        key,
        rule,
    )

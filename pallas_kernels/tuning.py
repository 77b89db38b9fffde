# SPDX-License-Identifier: Apache-2.0
"""Block sizes of kernels: those that were measured, and those that a rule gives for all others.

What was measured is in tuned.json beside each kernel, a line an entry, sorted: {"chip", "shape",
"dtype", "blocks", and the evidence: "seconds", "untuned_seconds", "jax", "date"}.
`scripts/tune_kernels.py` writes it.
"""

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "tuned.json"


def entry_key(chip: str, shape: Mapping[str, int], dtype: str) -> str:
    """Returns what an entry is found by."""
    return f"{chip} {dtype} {' '.join(f'{name}={shape[name]}' for name in sorted(shape))}"


@functools.cache
def entries(operation: str, folder: Path = Path(__file__).parent) -> dict[str, dict[str, Any]]:
    """Returns the entries of an operation's file by their keys."""
    path = folder / operation / FILE
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return {entry_key(entry["chip"], entry["shape"], entry["dtype"]): entry for entry in found}


def block_sizes(
    operation: str, chip: str, shape: Mapping[str, int], dtype: str, rule: Mapping[str, int]
) -> dict[str, int]:
    """Returns the sizes that were measured for such arguments, or those of the rule.

    That nothing was measured is said once for each shape, where the chip is known.
    """
    found = entries(operation).get(entry_key(chip, shape, dtype))
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

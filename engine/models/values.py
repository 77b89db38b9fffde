# SPDX-License-Identifier: Apache-2.0
"""Values of a model's config, each checked as it is read: a refusal names the key and the value."""

import math
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

MOST = 2**31 - 1  # sizes, positions and token ids are 32-bit integers on the device
MODEL = "the model's config"


def required(config: Mapping[str, Any], key: str) -> Any:
    """Returns config[key]; raises ValueError naming the key."""
    if config.get(key) is None:
        raise ValueError(f"the model's config has no {key!r}; the checkpoint is incomplete")
    return config[key]


def count(
    config: Mapping[str, Any],
    key: str,
    default: int | None = None,
    *,
    low: int = 1,
    most: int = MOST,
) -> int:
    """Returns the whole number config[key] in [low, most], or the default where there is none."""
    value = required(config, key) if default is None else config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < low:
        needed = "a positive integer" if low == 1 else f"an integer of at least {low}"
        raise wrong(MODEL, key, value, needed)
    if value > most:
        raise wrong(MODEL, key, value, f"at most {most}")
    return value


def number(
    config: Mapping[str, Any], key: str, default: float | None = None, *, owner: str = MODEL
) -> float:
    """Returns the finite number config[key] above 0, or the default where there is none."""
    value = required(config, key) if default is None else config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise wrong(owner, key, value, "a positive number")
    if value > 1e30:  # as an integer it may be beyond any float
        raise wrong(owner, key, value, "at most 1e30")
    return float(value)


def optional_number(config: Mapping[str, Any], key: str) -> float | None:
    """Returns the finite number config[key] above 0, or None where there is none."""
    return None if config.get(key) is None else number(config, key)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Returns the truth value config[key], or the default where there is none."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(MODEL, key, value, "true or false")
    return value


def choice(config: Mapping[str, Any], key: str, default: str, known: Collection[str]) -> str:
    """Returns the name config[key], which must be known, or the default where there is none."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, str) or value not in known:
        shown = reprlib.repr(value)
        raise ValueError(f"{key} {shown} is not supported here; use {' or '.join(known)}")
    return value


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the object config[key], empty where there is none."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(MODEL, key, value, "an object")
    return value


def indices(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Returns the list of layers config[key], empty where there is none."""
    value = [] if config.get(key) is None else config[key]
    if not isinstance(value, list | tuple) or not all(type(layer) is int for layer in value):
        raise wrong(MODEL, key, value, "a list of layers")
    return tuple(value)


def ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Returns the token ids config[key], which may be absent, one id or a list."""
    value = config.get(key)
    if value is None:
        return ()
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(token) is int and 0 <= token <= MOST for token in found):
        raise ValueError(f"{key} {reprlib.repr(value)} stands where token ids are needed")
    return found


def first_id(config: Mapping[str, Any], key: str) -> int | None:
    """Returns the first of `ids`, or None."""
    found = ids(config, key)
    return found[0] if found else None


def wrong(owner: str, key: str, value: Any, needed: str) -> ValueError:
    """Returns the error of a value that cannot be, cut short where it is long."""
    return ValueError(f"{owner} has {key} {reprlib.repr(value)}; {needed} is needed")

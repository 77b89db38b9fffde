# SPDX-License-Identifier: Apache-2.0
"""Strict mode: what would be a warning, or a compilation after the start, is an error."""

import contextlib
import logging
from collections.abc import Iterator

import jax

WARNING_LOGGERS = ("headrace", "checkpoints")
_COMPILED = "/jax/core/compile/backend_compile_duration"


class StrictError(ValueError):
    """Something that strict mode does not let pass."""


class RaisingHandler(logging.Handler):
    """Raises what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        raise StrictError(f"strict: {record.getMessage()}")


@contextlib.contextmanager
def no_warnings(strict: bool) -> Iterator[None]:
    """Makes a warning of ours an error in this block, where `strict`."""
    if not strict:
        yield
        return
    handler = RaisingHandler(logging.WARNING)
    loggers = [logging.getLogger(name) for name in WARNING_LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class CompileCounter:
    """Counts XLA's compilations in this process, from when it is made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **more: str | int) -> None:
        if event == _COMPILED:
            self.count += 1


@contextlib.contextmanager
def no_compilation(counter: CompileCounter | None) -> Iterator[None]:
    """Raises StrictError if something was compiled in this block; without a counter, never."""
    before = counter.count if counter else 0
    yield
    if counter and counter.count > before:
        raise StrictError(
            f"strict: {counter.count - before} programs were compiled in a step; "
            "a running engine compiles nothing, so this is a fault of ours"
        )

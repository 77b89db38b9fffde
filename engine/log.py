# SPDX-License-Identifier: Apache-2.0
"""The engine's few lines to the user: the choices made at start, and surprises."""

import logging
import sys


class StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the time, also after somebody replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None:  # a process without one
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # closed, or its reader gone: no reason to fail what was logged about
            self.handleError(record)


def logger() -> logging.Logger:
    """Returns the "headrace" logger; it writes to stderr unless the application set it up."""
    log = logging.getLogger("headrace")
    if not log.handlers and log.level == logging.NOTSET:
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter("headrace: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log

# SPDX-License-Identifier: Apache-2.0
"""Which implementation of its operations a program takes, and what their chips have room for.

Each operation has a table of implementations by `Backend.kind`. One that cannot do what is asked
says why, and XLA's own code does it, with one warning.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

CHOICES = ("auto", "pallas", "xla")
MIB = 2**20
# Of a core's vector memory, and of what a GPU's block of threads shares: as the makers' compilers
# have it.
VMEM_BYTES = {"v4": 16 * MIB, "v5e": 128 * MIB, "v5p": 64 * MIB, "v6e": 128 * MIB}
SHARED_BYTES = {"a100": 163 * 1024, "h100": 227 * 1024, "h200": 227 * 1024}
# Of chips that are not in these tables: the least that makers have built for long.
LEAST_VMEM_BYTES, LEAST_SHARED_BYTES = 16 * MIB, 99 * 1024
TWO_CORES = ("v4", "v5p")  # chips of two cores, which share out a grid's parallel axes
# What a chip calls itself, or the beginning of it.
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
}


class Backend(NamedTuple):
    """The implementation that a program takes; static.

    kind: "xla", "tpu" or "gpu". chip: a name in VMEM_BYTES or SHARED_BYTES, by which tuned sizes
    are kept; "" is none that is known. interpret: kernels run in jax's interpreter, as on a machine
    without such a chip: True, or what a `pallas_call` takes.
    """

    kind: str = "xla"
    chip: str = ""
    interpret: Any = False

    def __str__(self) -> str:
        kind = "xla" if self.kind == "xla" else f"pallas for {self.chip or self.kind}"
        return f"{kind}, interpreted" if self.interpret else kind

    @property
    def vmem_bytes(self) -> int:
        """What a core of a TPU has for a kernel."""
        return VMEM_BYTES.get(self.chip, LEAST_VMEM_BYTES)

    @property
    def shared_bytes(self) -> int:
        """What a block of threads may share."""
        return SHARED_BYTES.get(self.chip, LEAST_SHARED_BYTES)


XLA = Backend()


def choose(choice: str, platform: str, device_kind: str = "") -> Backend:
    """Returns the backend for a choice of CHOICES on a platform of jax.

    "auto" takes kernels where there are some. "pallas" where there are none interprets those for
    TPU, which is for tests.
    """
    found = [chip for kind, chip in KINDS.items() if device_kind.startswith(kind)]
    chip = found[0] if found else ""
    kind = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}.get(platform)
    if choice == "xla" or (choice == "auto" and kind is None):
        return XLA
    return Backend(kind, chip) if kind else Backend("tpu", interpret=True)


class Declined(Exception):
    """A kernel does not take what it was given, and XLA was not to stand in for it."""


_only_kernels = contextvars.ContextVar("only_kernels", default=False)


@contextlib.contextmanager
def kernels_only() -> Iterator[None]:
    """Has kernels that decline raise Declined: what is measured as a kernel is to be one."""
    before = _only_kernels.set(True)
    try:
        yield
    finally:
        _only_kernels.reset(before)


def decline(operation: str, reason: str) -> None:
    """Warns, once, that XLA's own code stands in for a kernel; raises within `kernels_only`."""
    if _only_kernels.get():
        raise Declined(f"{operation}: {reason}")
    say_left(operation, reason)


@functools.cache
def say_left(operation: str, reason: str) -> None:
    """Warns, once for the same reason."""
    logging.getLogger("headrace").warning("%s is left to XLA: %s", operation, reason)

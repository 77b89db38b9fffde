# SPDX-License-Identifier: Apache-2.0
"""Holds arrays to the shapes in their names: a local called `q_TNH` has three axes, T, N and H.

Every suffixed local of a project function is checked as the function returns, eagerly and under
any tracing, and one letter must mean one length within a call.
"""

import contextlib
import pathlib
import re
import sys
import threading

# The letters that names may use. Within a function one letter is one length; a file that gives one
# another meaning than this says so at its top.
GLOSSARY = {
    "B": "sequences",
    "T": "query tokens",
    "S": "key tokens",
    "U": "query tokens of a row, where T counts those of a step",
    "C": "candidates: the likeliest tokens; tokens of a chunk group",
    "D": "width",
    "F": "feed-forward width",
    "N": "query heads",
    "K": "KV heads",
    "G": "query heads a KV head, or page groups",
    "H": "head width",
    "V": "vocabulary",
    "E": "experts",
    "X": "inputs of a matrix, or experts a token",
    "Y": "outputs of a matrix",
    "P": "pages",
    "W": "tokens a page",
    "L": "layers",
    "R": "rows",
    "J": "drafted positions",
}

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = tuple(f"{ROOT / name}/" for name in ("engine", "pallas_kernels", "sharding", "tests"))
SUFFIX = re.compile(r"_([A-Z]+)$")


def shape_faults(function, variables):
    """Yields a line for each variable whose shape is not the one its name states."""
    lengths: dict[str, tuple[int, str]] = {}
    for name, value in variables.items():
        match = SUFFIX.search(name)
        shape = getattr(value, "shape", None)
        if match is None or not isinstance(shape, tuple):
            continue
        letters = match.group(1)
        if unknown := [letter for letter in letters if letter not in GLOSSARY]:
            yield f"{function}: {name} uses {unknown[0]}, which the glossary lacks"
        elif len(shape) != len(letters):
            yield f"{function}: {name} has {len(shape)} axes, {shape}"
        else:
            for letter, length in zip(letters, shape, strict=True):
                known, owner = lengths.setdefault(letter, (length, name))
                if known != length:
                    here = f"{name} has {letter}={length}"
                    yield f"{function}: {here}, but {letter}={known} in {owner}"


@contextlib.contextmanager
def checked_shapes():
    """Checks every project function that returns inside the block; raises AssertionError after it.

    Threads that start inside the block are checked too: programs are traced in some.

    A profile hook that raises is taken out by Python at once, so faults are gathered until the end.
    """
    faults: dict[str, None] = {}

    def hook(frame, event, _):
        if event == "return" and frame.f_code.co_filename.startswith(FOLDERS):
            for fault in shape_faults(frame.f_code.co_qualname, frame.f_locals):
                faults[fault] = None

    before, threads_before = sys.getprofile(), threading.getprofile()
    sys.setprofile(hook)
    threading.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(threads_before)
    assert not faults, "shapes differ from names:\n" + "\n".join(faults)

# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for chips that are not there, and what the command says of them."""

import re
import subprocess
import sys

import pytest

from engine import aot
from scripts import check_kernels
from scripts.check_kernels import CHIPS, OPERATIONS, Compiled


def run_apart(*arguments):
    """Returns the command's result, in a process of its own: a compiler for GPUs that is found
    stays found."""
    command = [sys.executable, "-m", "scripts.check_kernels", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800)


def assert_all_compile(operations):
    try:
        aot.compiler_settings()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    result = run_apart(f"--operations={','.join(operations)}")
    assert result.returncode == 0, result.stderr
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), key=operations.index)
    assert {row[0] for row in rows} == set(operations)
    assert all(len(row) == 2 + len(CHIPS) and " s, " in row[-1] for row in rows)
    kernels = [cell for row in rows for cell in row[2:-1]]
    assert all(re.fullmatch(r"[\d.]+ s, \d+ MB, [\d.]+ MB", cell) for cell in kernels)


@pytest.mark.slow
def test_every_shape_of_an_operation_compiles_for_every_chip():
    assert_all_compile(["kv_write"])


# Some minutes: python -m scripts.check_kernels.
@pytest.mark.slow
@pytest.mark.long
def test_every_kernel_compiles_for_every_chip():
    assert_all_compile([name for name in OPERATIONS if name != "kv_write"])


def test_faults_are_named_and_the_exit_code_is_1(monkeypatch, capsys):
    found = {
        "v5e": Compiled(0.5, 2_000_000, 1_500_000, None),
        "v6e": Compiled(1.0, 0, None, "it is too large"),
    }
    monkeypatch.setattr(check_kernels, "FLAGS", check_kernels.define_flags())
    monkeypatch.setattr(check_kernels, "rows", lambda operation, _: iter([("a model", found)]))
    monkeypatch.setattr(check_kernels, "chip_device", lambda chip: None)
    monkeypatch.setattr(aot, "compiler_settings", dict)
    with pytest.raises(SystemExit) as caught:
        check_kernels.run(["check_kernels", "--chips=v5e,v6e", "--operations=kv_write"])
    out, err = capsys.readouterr()
    assert caught.value.code == 1
    assert out.splitlines()[-1] == "| kv_write | a model | 0.5 s, 2 MB, 1.5 MB | 1.0 s, 0 MB |"
    assert err == "check_kernels: kv_write, a model, v6e: it is too large\n"


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--chips=v9", "--chips=v9 is not known; name some of v5e, v5p, v6e, h100"),
        ("--operations=sort", "--operations=sort is not known; name some of paged_attention"),
        ("--chips=", "there is nothing to compile"),
    ],
)
def test_wrong_names_are_a_wrong_use(monkeypatch, capsys, argument, message):
    monkeypatch.setattr(check_kernels, "FLAGS", check_kernels.define_flags())
    with pytest.raises(SystemExit) as caught:
        check_kernels.run(["check_kernels", argument])
    assert caught.value.code == 2 and message in capsys.readouterr().err

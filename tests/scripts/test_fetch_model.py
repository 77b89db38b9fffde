# SPDX-License-Identifier: Apache-2.0
"""The command prints where the model is, or one line that says what is wrong."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "scripts.fetch_model", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model=nope"], "no model is named 'nope'; known names: smollm2-135m"),
        (["--modle=smollm2-135m"], "Unknown command line flag 'modle'"),
        (["--file=absent.whl"], "absent.whl: no such file; give the wheel or the model file"),
        (
            ["--model=gemma3-270m", "--file=README.md", "--file=part2.whl"],
            "part2.whl: no such file; give the wheel or the model file",
        ),
        (["smollm2-135m"], "unexpected argument 'smollm2-135m'; use --model=NAME"),
    ],
)
def test_a_wrong_use_is_one_line_and_exit_code_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and len(done.stderr.splitlines()) == 1

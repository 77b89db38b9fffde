# SPDX-License-Identifier: Apache-2.0
"""Published models on slices of TPUs: small cases compiled, and what the command says."""

import pytest

from engine import aot
from engine.traffic import Collective
from scripts import check_meshes
from scripts.check_meshes import CASES, HEADS, Checked, told


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs the command: (exit code, stdout, stderr)."""
    found = settings()
    monkeypatch.setattr(aot, "compiler_settings", lambda: found)
    for name, value in found.items():
        monkeypatch.setenv(name, value)  # which puts back what was there, afterwards

    def run(*arguments):
        monkeypatch.setattr(check_meshes, "FLAGS", check_meshes.define_flags())
        with pytest.raises(SystemExit) as caught:
            check_meshes.run(["check_meshes", *arguments])
        return caught.value.code, *capsys.readouterr()

    return run


def settings():
    """Returns the compiler's settings; none where there is no compiler."""
    try:
        return aot.compiler_settings()
    except FileNotFoundError:
        return {}


# The whole table takes minutes: python -m scripts.check_meshes.
@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        *("llama-3.1-8b v5e:2x4", "sequence=2"),
        pytest.param("qwen3-30b-a3b", marks=pytest.mark.long),
    ],
)
def test_a_case_is_compiled_and_has_no_fault(run, cases):
    if not settings():
        pytest.skip("libtpu is not installed; make test-slow does that")
    code, out, err = run(f"--cases={cases}")
    assert code == 0, err
    rows = [line.split(" | ") for line in out.splitlines()[2:]]
    [case] = [case for case in CASES if cases in case.name]
    assert [row[0].strip("| ") for row in rows] == [f"{case.model}, {case.topology}"] * 2
    assert all(len(row) == len(HEADS) for row in rows)


def test_faults_are_named_and_the_exit_code_is_1(run, monkeypatch):
    cells = ("model",) * len(HEADS)
    monkeypatch.setattr(check_meshes, "check", lambda case, _: [Checked(cells, [case.model])])
    code, out, err = run("--cases=v6e:16x16")
    assert (code, err) == (1, "check_meshes: deepseek-v3\n")
    assert out.splitlines()[-1] == f"| {' | '.join(cells)} |"


def test_a_case_that_is_not_there_is_a_wrong_use(run):
    code, out, err = run("--cases=nope")
    assert (code, out) == (2, "") and "--cases=nope names none of llama-3.1-8b v5e:2x4" in err


def test_collectives_of_layers_come_first():
    found = [Collective("all-reduce", 1, 500), *[Collective("all-reduce", 80, 1500)] * 2]
    assert told(found) == "80 layers: 2 all-reduce 1.5; once: all-reduce 0.5"
    assert told([]) == "none"

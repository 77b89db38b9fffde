# SPDX-License-Identifier: Apache-2.0
"""README's reference says what the code does: every field, option and flag, and their defaults."""

import dataclasses
import pathlib
import re

from engine.chips import CHIPS
from engine.config import EngineConfig
from engine.params import SamplingParams
from scripts import generate, inspect_model, list_families, plan, sampling_flags
from scripts.benchmark import SUITES
from scripts.command_line import ENGINE_OPTIONS
from tests.engine import test_gguf_families, test_golden

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def section(head):
    """Returns the text under a head, up to the next one."""
    return README.split(f"{head}\n", 1)[1].split("\n#", 1)[0]


def rows(text):
    """Returns {name: default} of the first table in `text` whose rows begin with a name."""
    table = text[text.index("|---") :].split("\n\n", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.M))


def test_every_sampling_field_has_its_default():
    listed = rows(section("### `SamplingParams`"))
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert list(listed) == [*listed] and listed.keys() == fields.keys()
    for name, default in fields.items():
        shown = listed[name].strip("`")
        assert shown == (f'"{default}"' if isinstance(default, str) else repr(default)), name


def test_every_engine_option_has_its_default():
    listed = rows(section("### `LLM(model, **options)`"))
    fields = {f.name: f.default for f in dataclasses.fields(EngineConfig) if f.name != "model"}
    assert listed.keys() == fields.keys()
    for name, default in fields.items():
        shown = listed[name].strip("`")
        if default is not None:
            assert shown == (f'"{default}"' if isinstance(default, str) else repr(default)), name


def test_every_field_and_option_is_a_flag_of_the_command():
    assert set(sampling_flags.FIELDS) == {f.name for f in dataclasses.fields(SamplingParams)}
    flags = set(generate.FLAGS)
    assert set(sampling_flags.FIELDS) <= flags and set(ENGINE_OPTIONS) <= flags
    text = section("## Command line")
    for name in flags - set(sampling_flags.FIELDS):
        assert f"--{name}" in text, name


def test_every_suite_is_in_the_table():
    text = section("## Benchmark")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.M) == list(SUITES)


def test_every_flag_of_a_plan_and_of_a_listing_is_told():
    for head, values in {"## Planning": plan.FLAGS, "## Looking": inspect_model.FLAGS}.items():
        text = section(head)
        for name in set(values) - {"help"}:
            assert f"--{name}" in text, name
    assert f"of {', '.join(CHIPS)}" in section("## Planning")


def test_the_tables_of_families_and_formats_are_what_the_code_registers():
    text = section("## Models and formats")
    assert list_families.families_table() in text
    assert list_families.formats_table() in text


def test_every_test_of_those_tables_is_there():
    tables = list_families.families_table() + list_families.formats_table()
    named = set(re.findall(r"`(test_\w+)(?:\[(.*?)\])?`", tables))
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert {file for file, _ in named} <= files
    parameters = {"test_golden": test_golden.TINY, "test_gguf_families": test_gguf_families.MODELS}
    for file, parameter in named:
        assert not parameter or parameter in parameters[file], (file, parameter)

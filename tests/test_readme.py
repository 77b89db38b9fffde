# SPDX-License-Identifier: Apache-2.0
"""README's reference says what the code does: every field, option and flag, and their defaults."""

import dataclasses
import pathlib
import re

from engine.chips import CHIPS
from engine.config import EngineConfig
from engine.params import SamplingParams
from scripts import generate, inspect_model, plan, sampling_flags
from scripts.benchmark import SUITES
from scripts.command_line import ENGINE_OPTIONS

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


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

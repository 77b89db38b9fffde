# SPDX-License-Identifier: Apache-2.0
"""Block sizes: what is measured, tried and written, and kernels that must not be stood in for."""

import json
import logging
import tomllib
from pathlib import Path

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.backends import Backend, Declined, decline, kernels_only, say_left
from pallas_kernels.flash_attention import cases
from pallas_kernels.quantized_matmul import cases as quantized

SHAPE, RULE = {"T": 4, "D": 8}, {"rows": 16}
ENTRY = {
    "chip": "v5e",
    "shape": SHAPE,
    "dtype": "float32",
    "blocks": {"rows": 32},
    "seconds": 1e-5,
    "untuned_seconds": 2e-5,
    "jax": "0.10.2",
    "date": "2026-12-01",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns the folder in which sizes are looked for."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    (tmp_path / "product").mkdir()
    yield tmp_path
    tuning.entries.cache_clear()


def sizes(operation="product", chip="v5e"):
    return tuning.block_sizes(operation, chip, SHAPE, "float32", RULE)


def test_measured_sizes_come_before_the_rules(folder):
    assert sizes() == RULE
    tuning.entries.cache_clear()
    (folder / "product" / tuning.FILE).write_text(tuning.to_text(tuning.by_key([ENTRY])))
    assert sizes() == {"rows": 32}
    assert sizes(chip="v6e") == RULE


def test_a_trial_takes_the_place_of_both_and_notes_who_asks(folder):
    (folder / "product" / tuning.FILE).write_text(tuning.to_text(tuning.by_key([ENTRY])))
    with tuning.trial() as asked:
        assert sizes() == RULE
        with tuning.trial({"rows": 8}) as inner:
            assert sizes() == {"rows": 8}
        assert sizes() == RULE
    assert asked == [tuning.Asked("product", "v5e", SHAPE, "float32", RULE)] * 2
    assert inner == asked[:1]
    with pytest.raises(ZeroDivisionError), tuning.trial({"rows": 8}):
        raise ZeroDivisionError
    assert sizes() == {"rows": 32}


def test_what_is_written_is_sorted_a_line_an_entry_and_read_again():
    others = [ENTRY | {"chip": chip} for chip in ("v6e", "h100")]
    text = tuning.to_text(tuning.by_key([ENTRY, *others, ENTRY | {"blocks": {"rows": 64}}]))
    lines = text.splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("[", "]", 5)
    found = json.loads(text)
    assert [one["chip"] for one in found] == ["h100", "v5e", "v6e"]
    assert found[1]["blocks"] == {"rows": 64} and json.loads(lines[1].rstrip(",")) == found[0]


def test_a_trial_reaches_a_kernel_that_is_traced():
    shape = cases.small(cases.SHAPES["llama-3.1-8b"])
    call, arguments = cases.abstract_call(shape, Backend("tpu", "v5e", True))
    with tuning.trial({"queries": 16, "cells": 32}) as asked:
        text = str(jax.make_jaxpr(call)(*arguments))
    assert asked[0].operation == "flash_attention" and asked[0].shape["T"] == 64
    assert asked[0].rule != {"queries": 16, "cells": 32}
    assert all(one == asked[0] for one in asked) and "grid=(8, 4, " in text


def warnings(caplog):
    return sum(record.levelno == logging.WARNING for record in caplog.records)


def test_a_kernel_that_declines_is_an_error_where_only_kernels_count(caplog):
    say_left.cache_clear()
    case = quantized.CASES["int8 by 12, which kernels decline"]
    call, arguments = quantized.abstract_call(case, Backend("tpu", "v5e", True))
    with kernels_only(), pytest.raises(Declined, match="quantized_matmul: groups of 12"):
        jax.eval_shape(call, *arguments)
    assert warnings(caplog) == 0
    jax.eval_shape(call, *arguments)
    decline("quantized_matmul", "any reason")
    decline("quantized_matmul", "any reason")
    assert warnings(caplog) == 2  # of the case, and of any reason, each once


def test_what_is_tuned_goes_with_the_package():
    settings = tomllib.loads((Path(tuning.__file__).parents[1] / "pyproject.toml").read_text())
    data = settings["tool"]["setuptools"]["package-data"]
    assert data["pallas_kernels"] == [f"*/{tuning.FILE}"]

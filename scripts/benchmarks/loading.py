# SPDX-License-Identifier: Apache-2.0
"""The suite loading: a checkpoint's weights to parameters, beside a copy from the page cache.

And how fast each GGUF type is dequantized, beside the gguf package.
"""

import os
import pathlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from checkpoints import store
from checkpoints.gguf_blocks import BLOCK_TYPES, dequantize
from engine.loading import Model, load_model, open_model, stored_dtype
from scripts.benchmarks.report import Chart, Table, shown
from scripts.benchmarks.rounds import Figures, Run, median_ratio, medians, quiet_rounds
from scripts.benchmarks.settings import Settings
from scripts.command_line import UsageError, usage_errors
from sharding import RULES, make_mesh

RATE = "bytes_per_s"
BUFFER_BYTES = 1 << 24
ELEMENTS = 1 << 22  # of a tensor that is dequantized
LOAD, COPY = "load", "page cache"
OURS, GGUF = "Headrace", "gguf"


def measure(settings: Settings) -> dict[str, Any]:
    """Returns the rate of a load, of a copy of its files, and of dequantizing each type."""
    with usage_errors():
        path = pathlib.Path(store.resolve(settings.model))
        model = open_model(path)
    repeats = settings.repeats or 5
    runs: dict[str, Run] = {LOAD: partial(run_load, model), COPY: partial(run_copy, path)}
    for run in runs.values():
        run()  # the files come into the page cache
    rounds, void = quiet_rounds(runs, [os.getpid()], repeats, settings.most_void)
    types = {
        name: measure_type(name, repeats, settings.most_void)
        for name, block in BLOCK_TYPES.items()
        if block.decode is not None
    }
    return {
        "bytes": sum(file.stat().st_size for file in weight_files(path)),
        "loading": {name: medians([figures[name] for figures in rounds]) for name in runs},
        "ratio": median_ratio(rounds, LOAD, COPY, RATE),
        "void": void,
        "rounds": rounds,
        "types": types,
    }


def weight_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint that hold its weights."""
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def run_load(model: Model) -> Figures:
    """Returns the rate at which a model's parameters came from its files, in the stored type."""
    size = sum(file.stat().st_size for file in weight_files(model.checkpoint.path))
    start = time.perf_counter()
    mesh = make_mesh(jax.local_devices()[:1])
    params = load_model(model, mesh, RULES, stored_dtype(model.checkpoint), stacked=False)
    jax.block_until_ready(params)
    return {RATE: size / (time.perf_counter() - start)}


def run_copy(path: pathlib.Path) -> Figures:
    """Returns the rate at which the files' bytes are copied from the page cache to a buffer."""
    buffer = bytearray(BUFFER_BYTES)
    size = 0
    start = time.perf_counter()
    for file in weight_files(path):
        with file.open("rb", buffering=0) as opened:
            while num_bytes := opened.readinto(buffer):
                size += num_bytes
    return {RATE: size / (time.perf_counter() - start)}


def measure_type(name: str, repeats: int, most_void: int) -> dict[str, Any]:
    """Returns the rates of both dequantizations of random blocks of a type, in float32 bytes."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as gguf_dequantize
    except ImportError:
        raise UsageError("the suite loading needs the package gguf: pip install gguf") from None
    block = BLOCK_TYPES[name]
    num_bytes = ELEMENTS // block.size * block.layout.itemsize
    # Bytes under 120 are no infinity and no NaN where they are the scale of a block.
    data = np.random.default_rng(0).integers(0, 120, num_bytes, np.uint8)
    shape = (ELEMENTS // 4096, 4096)
    rows = data.reshape(shape[0], -1)
    runs: dict[str, Run] = {
        OURS: partial(run_dequantize, lambda: dequantize(data, name, shape)),
        GGUF: partial(run_dequantize, lambda: gguf_dequantize(rows, GGMLQuantizationType[name])),
    }
    for run in runs.values():
        run()
    rounds, void = quiet_rounds(runs, [os.getpid()], repeats, most_void)
    return {
        **{name: medians([figures[name] for figures in rounds]) for name in runs},
        "ratio": median_ratio(rounds, OURS, GGUF, RATE),
        "void": void,
    }


def run_dequantize(call: Callable[[], np.ndarray]) -> Figures:
    start = time.perf_counter()
    values = call()
    return {RATE: values.nbytes / (time.perf_counter() - start)}


def tables(figures: dict[str, Any]) -> list[Table]:
    rates = [shown(figures["loading"][name][RATE], ".2f", 1e-9) for name in (LOAD, COPY)]
    load = [
        shown(figures["bytes"], ".2f", 1e-9),
        *rates,
        shown(figures["ratio"], ".2f"),
        str(figures["void"]),
    ]
    types = [
        [
            name,
            *(shown(rates[side][RATE], ".2f", 1e-9) for side in (OURS, GGUF)),
            shown(rates["ratio"], ".2f"),
            str(rates["void"]),
        ]
        for name, rates in figures["types"].items()
    ]
    return [
        Table(
            "Files to parameters, in the stored type",
            ["GB", "load GB/s", "page cache GB/s", "ratio", "void"],
            [load],
        ),
        Table(
            "Dequantizing, float32 out",
            ["type", f"{OURS} GB/s", f"{GGUF} GB/s", "ratio", "void"],
            types,
        ),
    ]


def charts(figures: dict[str, Any]) -> list[Chart]:
    types = figures["types"]
    series = {side: [rates[side][RATE] * 1e-9 for rates in types.values()] for side in (OURS, GGUF)}
    return [Chart("loading", "Dequantizing GGUF types", "GB/s", list(types), series)]

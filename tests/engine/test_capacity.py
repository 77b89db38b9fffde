# SPDX-License-Identifier: Apache-2.0
"""Parameters, KV and layouts of published models, against what is published and closed formulas.

tests/data/configs/README.md says where the counts are from.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine import capacity
from engine.capacity import Parallel
from engine.chips import CHIPS, parse_chips
from engine.kv import empty_pool
from engine.loading import read_config
from engine.models.tree import parameter_specs
from sharding import make_mesh

ROOT = pathlib.Path(__file__).parents[1] / "data"
KIB = 1024
# parameters; those of a token, embedding left out; KV bytes a token in 16 bits. Qwen's 3.3 B
# activated are with the 311 M of the embedding.
PUBLISHED = {
    "llama-3.1-8b": (8.03e9, 8.03e9 - 128256 * 4096, 128 * KIB),
    "llama-3.1-70b": (70.6e9, 70.6e9 - 128256 * 8192, 320 * KIB),
    "qwen3-30b-a3b": (30.5e9, 3.353e9 - 151936 * 2048, 2 * 48 * 4 * 128 * 2),
    "gemma-3-27b": (27.016e9, 27.016e9, 2 * 62 * 16 * 128 * 2),
    "deepseek-v3": (671e9, 36.6e9, 61 * (512 + 64) * 2),
}


def shape_of(name, dtype=jnp.bfloat16, page_size=64, max_model_len=8192, step_tokens=512):
    path = ROOT / "configs" / f"{name}.json"
    path = path if path.exists() else ROOT / "golden/tiny" / name
    options = dict(page_size=page_size, max_model_len=max_model_len, step_tokens=step_tokens)
    return capacity.shape_of(read_config(path), np.dtype(dtype), **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_published(name):
    total, active, kv = PUBLISHED[name]
    shape = shape_of(name)
    assert capacity.num_parameters(shape) == pytest.approx(total, rel=0.005)
    assert capacity.active_parameters(shape) == pytest.approx(active, rel=0.005)
    assert sum(kind.cell_bytes for kind in capacity.kv_kinds(shape)) == kv
    whole = capacity.weight_bytes(shape)
    assert whole == pytest.approx(2 * total, rel=0.005)
    assert capacity.weight_bytes(shape_of(name, jnp.float32)) == 4 * capacity.num_parameters(shape)


def test_requests_of_full_length_take_what_the_formula_says():
    """2 L K d b S, and of windowed layers no more than the window (and what pages round up)."""
    shape = shape_of("llama-3.1-8b", max_model_len=32768)
    pages = capacity.request_pages(shape) * shape.layout.page_bytes
    assert pages == 4 * 2**30
    shape = shape_of("deepseek-v3", max_model_len=131072)
    pages = capacity.request_pages(shape) * shape.layout.page_bytes
    assert pages == pytest.approx(8.6 * 2**30, rel=0.005)
    shape = shape_of("gemma-3-27b", max_model_len=131072)
    window, full = capacity.kv_kinds(shape)
    assert (window.window, window.layers, full.window, full.layers) == (1024, 52, None, 10)
    assert (window.groups, full.groups) == (6, 1) and shape.layout.places == 10
    # The last of the windowed groups has 2 layers in its 10 places.
    least = 131072 * full.cell_bytes + 1024 * window.cell_bytes * 60 / 52
    pages = capacity.request_pages(shape) * shape.layout.page_bytes
    assert least <= pages <= least + 7 * shape.layout.page_bytes


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_bytes_are_those_of_the_arrays(name):
    shape = shape_of(name, jnp.float32, page_size=16, max_model_len=64)
    specs = jax.tree.leaves(parameter_specs(shape.config, np.dtype(np.float32), stacked=True))
    arrays = [np.zeros(spec.shape, spec.dtype) for spec in specs]
    assert capacity.weight_bytes(shape) == sum(array.nbytes for array in arrays)
    pool = empty_pool(shape.layout, 3, stacked=True)
    assert pool.nbytes == 3 * shape.layout.page_bytes
    cells = shape.layout.places * capacity.cell_bytes(shape.layout)
    assert pool.nbytes == 3 * 16 * cells


@pytest.mark.parametrize("parallel", [Parallel(4, 1, 2), Parallel(1, 4, 2), Parallel(2, 2, 2)])
def test_a_chips_share_is_what_shardings_give_a_device(parallel):
    shape = shape_of("qwen3_moe", jnp.float32)
    mesh = make_mesh(jax.devices(), **parallel._asdict())
    first = 0
    for _, spec in shape.specs:
        part = capacity.RULES.sharding(mesh, spec).shard_shape(spec.shape)
        first += int(np.prod(part)) * spec.dtype.itemsize
    assert capacity.weight_bytes(shape, parallel) == first
    assert capacity.shards((None, "kv_heads", None, None), parallel) == parallel.tensor


# The least tensor size that holds weights and a useful pool in 0.9 of each chip.
ADVISED = {
    ("llama-3.1-8b", "v5e", 8): Parallel(4, 1, 2),  # 16.1 GB in 14.4: two chips
    ("llama-3.1-8b", "h100", 8): Parallel(8, 1, 1),
    ("llama-3.1-70b", "h100", 8): Parallel(2, 1, 4),  # two would leave 1.4 GB of pool
    ("llama-3.1-70b", "h200", 2): Parallel(1, 1, 2),
    ("qwen3-30b-a3b", "v5e", 8): Parallel(1, 8, 1),
    ("gemma-3-27b", "v6e", 8): Parallel(2, 1, 4),
    ("deepseek-v3", "h200", 16): Parallel(1, 16, 1),
}


@pytest.mark.parametrize("name, chip, count", ADVISED)
def test_the_least_tensor_size_that_leaves_a_pool_is_advised(name, chip, count):
    shape, usable = shape_of(name), int(CHIPS[chip].memory_bytes * 0.9)
    found = capacity.advise(shape, usable, count, 32)
    assert found.parallel == ADVISED[name, chip, count] and found.parallel.chips == count
    assert found.weight_bytes + found.pool_bytes <= usable
    assert found.weight_bytes + found.pool_bytes + found.page_bytes > usable
    assert found.batch >= 32 or found.pool_bytes >= usable / 4


def test_layouts_divide_what_they_split():
    """Eight KV heads allow eight shards; one latent is repeated on all of them."""
    sizes = [p.tensor for p in capacity.layouts(shape_of("llama-3.1-70b").config, 64)]
    assert sizes == [1, 2, 4, 8]
    layouts = list(capacity.layouts(shape_of("deepseek-v3").config, 64))
    assert [p.tensor for p in layouts] == [1, 2, 4, 8, 16, 32, 64]
    assert all(p.chips == 64 and p.expert == 64 // p.tensor for p in layouts)
    shape = shape_of("deepseek-v3")
    assert capacity.room(shape, 10**12, layouts[3]).page_bytes == shape.layout.page_bytes
    assert list(capacity.layouts(shape.config, 3)) == [Parallel(3, 1, 1)]


def test_without_a_useful_pool_the_most_requests_win_and_without_any_there_is_none():
    shape = shape_of("llama-3.1-8b")
    request = capacity.request_pages(shape) * shape.layout.page_bytes
    weights, page = capacity.weight_bytes(shape), shape.layout.page_bytes
    assert capacity.advise(shape, weights + request + page, 1, 32).batch == 1
    assert capacity.advise(shape, weights + request + page - 1, 1, 32) is None
    assert capacity.least_chips(shape, weights + request + page - 1, 32) == 2
    assert capacity.least_chips(shape, weights // 8, 32) is None


def test_chips_are_named_and_counted():
    assert parse_chips("v5e:8") == ("v5e", 8) and parse_chips("cpu") == ("cpu", 1)
    for text, fault in {
        "v9:8": "chips='v9:8' is not known; use NAME:COUNT with one of v5e, v5p",
        "h100:0": "must have a count of at least 1; use h100:8, say",
        "h100:-1": "must have a count of at least 1",
        "h100:": "must have a count of at least 1",
        "cpu:2": "a machine's cores are one device; use cpu",
    }.items():
        with pytest.raises(ValueError, match=fault):
            parse_chips(text)

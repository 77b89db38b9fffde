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
from engine.chips import parse_chips
from engine.kv import empty_pool
from engine.loading import abstract_parameters, read_config
from engine.memory import device_tree_bytes
from engine.models.tree import parameter_specs
from sharding import RULES, make_mesh, parse_mesh

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


def shape_of(name, dtype=jnp.bfloat16, page_size=64, max_model_len=8192, step_tokens=512, lanes=1):
    path = ROOT / "configs" / f"{name}.json"
    path = path if path.exists() else ROOT / "golden/tiny" / name
    return capacity.shape_of(
        read_config(path),
        np.dtype(dtype),
        page_size=page_size,
        max_model_len=max_model_len,
        step_tokens=step_tokens,
        lanes=lanes,
    )


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
    assert pool.nbytes == 3 * 16 * shape.layout.places * capacity.cell_bytes(shape.layout)


def test_cells_take_whole_lanes_of_memory():
    """A latent of 576 numbers takes 640 on a TPU; 256 of a head's key and value take no more."""
    assert shape_of("deepseek-v3", lanes=128).layout.page_bytes == 61 * 64 * 640 * 2
    plain, filled = (shape_of("llama-3.1-8b", lanes=lanes).layout for lanes in (1, 128))
    assert plain == filled


@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "expert=4,tensor=2", "data=2,expert=4"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_chips_share_is_what_the_engine_gives_a_device(mesh, dtype):
    shape, parallel = shape_of("qwen3_moe", dtype), Parallel(**parse_mesh(mesh))
    devices = make_mesh(jax.devices(), **parallel._asdict())
    params = abstract_parameters(shape.config, devices, RULES, np.dtype(dtype), stacked=True)
    assert capacity.weight_bytes(shape, parallel) == device_tree_bytes(params)
    assert parallel.mesh == mesh and Parallel().mesh == "data=1"
    assert shape.split(parallel.tensor).heads_ways(parallel) == parallel.tensor


def test_what_fills_up_and_copies_of_kv_heads_take_memory():
    """The tiny llama has fewer KV heads than eight."""
    shape, ways = shape_of("llama", jnp.float32), 8
    copies = ways // shape.config.kv_heads
    assert copies > 1
    found = capacity.room(shape, 10**9, Parallel(tensor=ways))
    alone = capacity.room(shape, 10**9, Parallel())
    assert found.page_bytes == alone.page_bytes * copies // ways
    devices = make_mesh(jax.devices(), tensor=ways)
    params = abstract_parameters(shape.config, devices, RULES, np.dtype(np.float32), stacked=True)
    assert found.weight_bytes == device_tree_bytes(params) > alone.weight_bytes // ways


def test_a_sequence_axis_shares_the_pages_of_a_request():
    shape = shape_of("llama-3.1-8b")
    alone, four = (capacity.room(shape, 40 * 10**9, Parallel(sequence=n)) for n in (1, 4))
    assert four.request_pages == alone.request_pages / 4 and four.pages == alone.pages
    assert four.batch >= 4 * alone.batch and four.parallel.replicas == 1


def test_layouts_are_those_the_engine_has():
    """KV heads divide, or are divided and copied; a latent is whole; experts divide evenly."""
    shape = shape_of("llama-3.1-70b")
    found = list(capacity.layouts(shape, 16))
    assert {p.tensor for p in found} == {1, 2, 4, 8, 16} and {p.expert for p in found} == {1}
    assert {p.sequence for p in found if p.tensor == 2} == {1, 2, 4, 8}
    assert all(p.chips == 16 for p in found)
    assert max(p.tensor for p in capacity.layouts(shape, 128)) == 64  # as many as query heads
    moe = shape_of("deepseek-v3")
    assert {p.expert for p in capacity.layouts(moe, 64) if p.tensor == 4} == {1, 2, 4, 8, 16}
    assert capacity.room(moe, 10**12, Parallel(tensor=8)).page_bytes == moe.layout.page_bytes
    assert {tuple(p) for p in capacity.layouts(moe, 3)} == {(3, 1, 1, 1), (1, 3, 1, 1)}
    # Two pages of 64 tokens are not shared out over four chips.
    short = shape_of("llama-3.1-70b", max_model_len=128)
    assert max(p.sequence for p in capacity.layouts(short, 8)) == 2


def test_a_layout_without_room_for_a_request_is_none():
    shape = shape_of("llama-3.1-8b")
    request = capacity.request_pages(shape) * shape.layout.page_bytes
    weights, page = capacity.weight_bytes(shape), shape.layout.page_bytes
    [found] = capacity.roomy(shape, weights + request + page, 1)
    assert found.batch == 1 and found.weight_bytes + found.pool_bytes == weights + request + page
    assert not capacity.roomy(shape, weights + request + page - 1, 1)
    assert capacity.least_chips(shape, weights + request + page - 1) == 2
    assert capacity.least_chips(shape, weights // 100) is None


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

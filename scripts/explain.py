# SPDX-License-Identifier: Apache-2.0
"""The plan of an engine as text: model, memory, pages, buckets, programs, and what each costs."""

import math
from collections.abc import Iterator
from typing import Any

import jax

from engine import LLM
from engine.memory import device_tree_bytes


def explain(llm: LLM) -> list[str]:
    """Returns the lines; all programs are made first, so that their costs are known."""
    llm.engine.worker.programs.wait()
    parts = (model_lines, memory_lines, mesh_lines, bucket_lines, program_lines)
    return [line for part in parts for line in part(llm)]


def size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def model_lines(llm: LLM) -> Iterator[str]:
    model, device = llm.model_config, jax.devices()[0]
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(llm.engine.worker.params))
    yield f"model      {llm.config.model}: {model.family}, {model.num_layers} layers"
    dtype = llm.built.factory.cfg.layout.dtype.name
    yield f"           {parameters / 1e6:.1f} M parameters, {dtype}"
    yield f"device     {device.device_kind} ({device.platform}), jax {jax.__version__}"
    yield f"context    {llm.max_model_len} tokens, vocabulary {model.vocab_size}"


def memory_lines(llm: LLM) -> Iterator[str]:
    factory = llm.built.factory
    layout, pages = factory.cfg.layout, factory.num_pages
    groups = len(layout.groups)
    cfg = factory.cfg
    tokens = (pages - 1) // groups * cfg.shape.host_page * cfg.rules.ways(cfg.mesh, "rows")
    pool = pages * layout.page_bytes
    yield f"weights    {size(device_tree_bytes(llm.engine.worker.params))}"
    yield (
        f"pages      {size(pool)}: {pages} pages of {layout.page_size} tokens, {groups} page "
        f"groups, about {tokens} tokens; {layout.page_bytes} bytes a page"
    )
    state = device_tree_bytes(factory.state) - pool
    yield f"row state  {size(state)}, most of it biases and tallies"


def mesh_lines(llm: LLM) -> Iterator[str]:
    """Yields how arrays are shared out over the mesh: of parameters alike in all layers, one."""
    mesh = llm.built.factory.cfg.mesh
    if mesh.size == 1:
        return
    axes = ", ".join(f"{axis}={ways}" for axis, ways in mesh.shape.items() if ways > 1)
    yield f"mesh       {axes}; devices {', '.join(str(d.id) for d in mesh.devices.flat)}"
    yield f"{'array':<34}{'count':>6} {'shape of all':<22}{'split over':<34}{'MB a device':>12}"
    found: dict[tuple[Any, ...], int] = {}
    trees = {"": llm.engine.worker.params, "pool": llm.engine.worker.state.pool}
    for first, tree in trees.items():
        for path, leaf in jax.tree.leaves_with_path(tree):
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            name = ".".join(filter(None, [first, *map(str, names)]))
            alike = (name, leaf.shape, str(tuple(leaf.sharding.spec)), device_tree_bytes(leaf))
            found[alike] = found.get(alike, 0) + 1
    for (name, shape, spec, num_bytes), count in found.items():
        bytes_each = f"{num_bytes / 1e6:.3f}"
        yield f"{name:<34}{count:>6} {shape!s:<22}{spec:<34}{bytes_each:>12}"


def bucket_lines(llm: LLM) -> Iterator[str]:
    ladder, config = llm.built.ladder, llm.config
    yield (
        f"buckets    {ladder.rows} rows; steps of up to {config.max_num_batched_tokens} tokens, "
        f"{ladder.pieces} pieces of prompts of up to {ladder.width} tokens"
    )


def program_lines(llm: LLM) -> Iterator[str]:
    """Yields a table of the programs: seconds to make, operations, bytes moved, temporaries."""
    programs = llm.engine.worker.programs
    yield f"programs   {len(programs)}"
    yield f"{'program':<32}{'made in s':>10}{'GFLOP':>9}{'MB moved':>10}{'MB temporary':>14}"
    for key in programs:
        name = programs.name(key)
        executable: Any = programs[key]
        cost = executable.cost_analysis() or {}
        memory = executable.memory_analysis()
        flops, moved = cost.get("flops"), cost.get("bytes accessed")
        temporary = None if memory is None else memory.temp_size_in_bytes
        columns = (
            shown(programs.seconds.get(name), 1, ".2f"),
            shown(flops, 1e9, ".3f"),
            shown(moved, 1e6, ".1f"),
            shown(temporary, 1e6, ".1f"),
        )
        yield f"{name:<32}{columns[0]:>10}{columns[1]:>9}{columns[2]:>10}{columns[3]:>14}"


def shown(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None or value < 0 else format(value / unit, form)

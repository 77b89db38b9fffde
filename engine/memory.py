# SPDX-License-Identifier: Apache-2.0
"""How many pages the pool has: what memory there is, and what else takes it."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from engine.buckets import Ladder
from engine.config import EngineConfig
from engine.kv import KVLayout
from engine.memo import Memo
from engine.program_store import Program, ProgramStore
from engine.programs import ProgramFactory, total_tokens

# Most bytes of the KV pool on CPU unless num_pages says otherwise.
CPU_POOL_BYTES = 2 * 2**30


def default_pages(
    config: EngineConfig,
    layout: KVLayout,
    max_model_len: int,
    factory_of: Callable[[int], ProgramFactory],
    ladder: Ladder,
    programs_store: ProgramStore,
) -> int:
    """Returns the pool's size when none is set, the same at every start while memory allows.

    On CPU: every row at full length, 2 GiB, or a quarter of the free memory, whichever is least;
    what an earlier start chose is kept while it fits half of the free memory. On an accelerator:
    what `memory_fraction` leaves beside the weights, the row state and the temporaries of the
    largest programs, which are compiled with a tiny pool to learn them.
    """
    # Whole pages of a request, whose tokens the sequence axis shares.
    places = factory_of(2).cfg.shape.pages_per_row
    wanted = config.max_num_seqs * min(places * layout.page_size, max_model_len)
    device = jax.local_devices()[0]
    tiny = factory_of(2)
    programs = largest_programs(tiny, ladder)
    folder = programs_store.folder
    memo = Memo(folder / "sizes.json" if folder else None)
    key = f"{programs_store.key(programs[0])} {wanted}"
    known = memo.get(key)
    if device.platform == "cpu":
        devices = tiny.cfg.mesh.size  # which all have the one memory
        free = available_bytes() // devices
        if known is None or known * layout.page_bytes > free // 2:
            sizing = dict(free_bytes=free // 4, limit_bytes=CPU_POOL_BYTES // devices)
            known = pool_pages(layout, tokens_wanted=wanted, **sizing)
            memo.set(key, known)
        return known
    if known is None:
        known = max(temporary_bytes(program) for program in programs)
        memo.set(key, known)
    free = device_bytes(device, config.memory_fraction) - fixed_bytes(tiny) - known
    return pool_pages(layout, tokens_wanted=wanted, free_bytes=free, limit_bytes=None)


def check_pages(config: EngineConfig, factory: ProgramFactory) -> None:
    """Raises ValueError, with the bytes, when the pool that was asked for cannot be had."""
    pool = factory.num_pages * factory.cfg.layout.page_bytes
    beside = fixed_bytes(factory)
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        free = available_bytes() // factory.cfg.mesh.size
    else:
        free = device_bytes(device, config.memory_fraction)
    if pool + beside > free:
        fits = max(0, free - beside) // factory.cfg.layout.page_bytes
        raise ValueError(
            f"num_pages={factory.num_pages} takes {pool / 1e9:.2f} GB beside {beside / 1e9:.2f} GB "
            f"of weights and row state, and {free / 1e9:.2f} GB are free, on each device; use at "
            f"most {fits}, or leave it out"
        )


def largest_programs(factory: ProgramFactory, ladder: Ladder) -> list[Program]:
    """Returns the programs that may need most temporaries: the largest body, all heads, and what
    moves experts."""
    body = factory.body(max(ladder.bodies, key=total_tokens))
    places = [factory.place(segment) for segment in factory.placed_segments()]
    return [body, *(factory.head(head) for head in ladder.heads()), *places]


def temporary_bytes(program: Program) -> int:
    """Returns the temporaries of a program, which is compiled to learn them."""
    analysis = program.compile().memory_analysis()
    assert analysis is not None, "accelerators report a program's memory"
    return analysis.temp_size_in_bytes


def device_bytes(device: Any, fraction: float) -> int:
    """Returns what an accelerator has for us."""
    return int(device.memory_stats()["bytes_limit"] * fraction)


def fixed_bytes(factory: ProgramFactory) -> int:
    """Returns a device's bytes of weights and row state, whatever the pool's size."""
    pool = factory.num_pages * factory.cfg.layout.page_bytes
    return device_tree_bytes(factory.params) + device_tree_bytes(factory.state) - pool


def available_bytes() -> int:
    """Returns the memory that can be had without swapping; the page cache counts as free."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_tree_bytes(tree: Any) -> int:
    """Returns the bytes that one device has of a tree of arrays, or of abstract ones."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def coarse_pages(pages: int) -> int:
    """Returns `pages` rounded down to a grid of two steps an octave, so that starts agree."""
    power = 1 << max(pages, 1).bit_length() - 1
    return power + power // 2 if pages >= power + power // 2 else power


def pool_pages(
    layout: KVLayout, *, tokens_wanted: int, free_bytes: int, limit_bytes: int | None
) -> int:
    """Returns the number of pages that hold `tokens_wanted` or as many as fit, on the grid.

    `tokens_wanted` counts tokens of all groups together. Raises ValueError when not even two
    pages fit.
    """
    budget = free_bytes if limit_bytes is None else min(free_bytes, limit_bytes)
    wanted = -(-tokens_wanted // layout.page_size) * len(layout.groups) + 1
    pages = min(wanted, budget // layout.page_bytes)
    if pages < 2:
        raise ValueError(
            f"the KV pool has {budget} bytes and one page takes {layout.page_bytes}; free memory, "
            "raise memory_fraction, or use a smaller page_size"
        )
    return coarse_pages(pages) if pages < wanted else wanted

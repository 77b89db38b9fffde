# SPDX-License-Identifier: Apache-2.0
"""Programs compiled ahead of time for slices of TPUs or a GPU, and what the compiler says of them.

libtpu has the compiler and the topologies of all TPUs, jax's plugin for CUDA that of GPUs, and they
need none of them. Nothing runs: what can be held to is memory (what a chip has, what is updated in
place, what is read and written) and what chips tell each other.
"""

import collections
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from engine.batch import BatchShape
from engine.buckets import Body, Ladder
from engine.capacity import Parallel, Shape
from engine.hlo import Moved, collectives, largest_temporary, moved, parsed
from engine.kv import kv_layout, lanes_of
from engine.loading import abstract_parameters
from engine.memory import device_tree_bytes
from engine.models.config import ModelConfig
from engine.models.split import device_config, split_config, with_backend
from engine.models.tree import fuse, is_fused, is_stacked
from engine.program_store import Program
from engine.programs import ProgramFactory, total_tokens
from engine.step_config import StepConfig
from engine.traffic import Collective, step_traffic
from pallas_kernels.backends import XLA, Backend
from sharding import RULES, make_mesh

# Of a chip, as the compiler counts it.
HBM_BYTES = {"v5e": 15.75 * 2**30, "v5p": 95.74 * 2**30, "v6e": 31.25 * 2**30}
# NVIDIA's figures of an H100 (SXM), as XLA's `gpu_device_info` names them.
H100: dict[str, Any] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "memory_bandwidth": 3352320000000,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 84942979072,
    "shared_memory_per_block_optin": 232448,
    "cuda_compute_capability": ("major: 9 minor: 0",),
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
GPU = "h100"
H100_SOFTWARE = (
    'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } '
    'device_description_str: "NVIDIA H100 80GB HBM3"'
)
TOPOLOGY = re.compile(rf"({'|'.join(HBM_BYTES)}):\d+x\d+(x\d+)?")


class Slice(NamedTuple):
    """A model on the chips of a TPU slice, such as "v5e:2x4", or on one "h100": so many of them
    along each mesh axis, `rows` requests of up to `row_tokens` in each replica, `num_pages` on each
    chip. choice: who computes attention and the products of experts, "pallas" or "xla"."""

    config: ModelConfig
    topology: str
    parallel: Parallel
    rows: int
    row_tokens: int
    num_pages: int
    page_size: int = 64
    step_tokens: int = 512
    dtype: Any = jax.numpy.bfloat16
    choice: str = "pallas"

    @property
    def chip(self) -> str:
        """The kind of its chips."""
        return self.topology.split(":")[0]

    @property
    def hbm_bytes(self) -> float:
        """What a chip has for programs."""
        return H100["device_memory_size"] if self.chip == GPU else HBM_BYTES[self.chip]


class DoesNotCompile(Exception):
    """The compiler refuses a program: it does not fit, or has what TPUs do not do."""


class Compiled(NamedTuple):
    """A program as the compiler reports it: bytes of a chip, seconds to lower and to compile."""

    name: str
    argument_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    output_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    largest_temporary_bytes: int
    collectives: list[Collective]
    moved: list[Moved]  # outside of kernels
    seconds: float

    @property
    def used_bytes(self) -> int:
        """What a chip has to have at once, by the compiler's count."""
        new = self.output_bytes - self.aliased_bytes
        return self.argument_bytes + self.temporary_bytes + new

    @property
    def moved_bytes(self) -> int:
        """What a run of it reads from and writes to a chip's memory outside of kernels."""
        return sum(one.times * (one.read_bytes + one.written_bytes) for one in self.moved)


def compiler_settings() -> dict[str, str]:
    """Returns the environment variables with which jax finds libtpu's compiler.

    Raises FileNotFoundError where it is not installed.
    """
    # There is no metadata server to ask, and no TPU that a second process would take away.
    found = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    path = Path(os.environ.get("TPU_LIBRARY_PATH", f"{sys.prefix}/aot/libtpu/libtpu.so"))
    if path.exists():
        return found | {"TPU_LIBRARY_PATH": str(path)}
    if importlib.util.find_spec("libtpu") is None:
        raise FileNotFoundError(f"{path} is missing, the compiler for TPUs; run make test-slow")
    return found


def find_gpu_compiler() -> None:
    """Has jax find the compiler for NVIDIA GPUs; FileNotFoundError where it is not installed.

    Before anything asks for a device.
    """
    if importlib.util.find_spec("jax_cuda12_plugin") is not None:
        return
    folder = Path(sys.prefix, "aot/cuda")
    if not (folder / "jax_plugins").exists():
        raise FileNotFoundError(f"{folder} is missing, the compiler for GPUs; run make test-slow")
    sys.path.append(str(folder))


def gpu_device() -> Any:
    """Returns an H100 to compile for: XLA's description of it takes the place of the card."""
    jax.devices()  # plugins are registered with the first look for devices
    card = "".join(
        f"{name}: {value} " if not isinstance(value, tuple) else f"{name} {{ {value[0]} }} "
        for name, value in H100.items()
    )
    config = f"gpu_device_info {{ {card}}} {H100_SOFTWARE}"
    topology = topologies.get_topology_desc("h100", "cuda", target_config=config, topology="1x1x1")
    return topology.devices[0]


def check_slice_name(topology: str) -> None:
    """Raises ValueError for what is not the name of a slice."""
    if not TOPOLOGY.fullmatch(topology):
        raise ValueError(f"{topology!r} is no slice of TPUs; write such as v6e:2x4 or v5p:2x2x4")


def slice_devices(topology: str) -> list[Any]:
    """Returns the chips of a slice; ValueError for one that there is not."""
    if topology == GPU:
        return [gpu_device()]
    check_slice_name(topology)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{topology!r} cannot be compiled for: {first}") from None
    return list(found.devices)


def make_factory(case: Slice) -> tuple[ProgramFactory, Ladder]:
    """Returns the programs as the engine would build them on the slice, and their shapes."""
    devices, sizes = slice_devices(case.topology), case.parallel
    if sizes.chips > len(devices):
        raise ValueError(f"{sizes.mesh} needs {sizes.chips} chips; {case.topology} has fewer")
    mesh = make_mesh(devices[: sizes.chips], **sizes._asdict())
    dtype, ladder = np.dtype(case.dtype), Ladder(case.rows, case.step_tokens)
    part = device_config(split_config(case.config, sizes.tensor), sizes.tensor, sizes.expert)
    platform = "gpu" if case.chip == GPU else "tpu"
    backend = XLA if case.choice == "xla" else Backend(platform, case.chip)
    part = with_backend(part, backend)
    layout = kv_layout(part, case.page_size, dtype, lanes=lanes_of(platform))
    host_page = case.page_size * sizes.sequence
    places = -(-case.row_tokens // host_page)
    cfg = StepConfig(
        model=part,
        layout=layout,
        shape=BatchShape(len(layout.groups), places, case.rows, host_page),
        mesh=mesh,
        rules=RULES,
        score_tokens=max(total_tokens(body) for body in ladder.bodies),
        forbidden=None,
        attention=backend,
    )
    stacked = is_stacked(platform, stages=1)
    params = abstract_parameters(case.config, mesh, RULES, dtype, stacked=stacked)
    params = fuse(params) if is_fused(mesh, stacked) else params
    return ProgramFactory(cfg, params, case.num_pages, stacked=stacked), ladder


def step_bodies(ladder: Ladder) -> tuple[Body, Body]:
    """Returns the largest body of decodes alone, and that of the largest steps with prompts."""
    decodes = [body for body in ladder.bodies if all(group.kind == "decode" for group in body)]
    return max(decodes, key=total_tokens), max(ladder.bodies, key=total_tokens)


def compile_program(program: Program) -> Compiled:
    """Returns what the compiler says of a program; DoesNotCompile for one that it refuses."""
    begin = time.monotonic()
    try:
        compiled = program.compile()
    except jax.errors.JaxRuntimeError as error:
        raise DoesNotCompile(f"{program.name}: {str(error).splitlines()[0]}") from error
    seconds, memory = time.monotonic() - begin, compiled.memory_analysis()
    text = compiled.as_text()
    assert memory is not None and text is not None, "libtpu's compiler gives both"
    hlo = parsed(text)
    return Compiled(
        program.name,
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.host_argument_size_in_bytes,
        memory.host_output_size_in_bytes,
        largest_temporary(hlo, memory.temp_size_in_bytes),
        collectives(hlo),
        moved(hlo),
        seconds,
    )


def planned(shape: Shape, parallel: Parallel, body: Body) -> list[Collective]:
    """Returns the collectives that a body is to have, of a model not yet split."""
    told = step_traffic(shape.split(parallel.tensor), parallel, total_tokens(body))
    return [one.collective for one in told]


def differing(found: Iterable[Collective], wanted: Iterable[Collective]) -> list[str]:
    """Returns a line for each collective that is there and was not planned, or the reverse.

    XLA writes a gathering of little as a sum of parts that are filled up with zeros: of equal bytes
    they are one.
    """

    def plain(one: Collective) -> Collective:
        return one._replace(kind="all-reduce") if one.kind == "all-gather" else one

    there = collections.Counter(map(plain, found))
    due = collections.Counter(map(plain, wanted))
    extra = [f"{shown(one)} not planned" for one in (there - due).elements()]
    return extra + [f"{shown(one)} planned, not there" for one in (due - there).elements()]


def shown(one: Collective) -> str:
    return f"{one.times} x {one.kind} of {one.bytes} bytes"


def least_layer_bytes(factory: ProgramFactory) -> int:
    """Returns the bytes that a chip has of a layer's weights or of its part of the pool, whichever
    is least, of all layers."""
    runs = zip(factory.cfg.model.segments(), factory.params["segments"], strict=True)
    layers = [
        sum(math.prod(p.sharding.shard_shape(p.shape)) * p.dtype.itemsize for p in tree.values())
        // len(run)
        for run, tree in runs
    ]
    layout = factory.cfg.layout
    return min(*layers, factory.num_pages * layout.page_bytes // layout.places)


def faults(
    compiled: Compiled, factory: ProgramFactory, hbm_bytes: float, wanted: Iterable[Collective]
) -> Iterator[str]:
    """Yields what is wrong with a body on a chip, a line each."""
    pool, least = factory.num_pages * factory.cfg.layout.page_bytes, least_layer_bytes(factory)
    there = device_tree_bytes(factory.params) + device_tree_bytes(factory.state)
    # What a body does not read, the head's matrix, is on the chip all the same.
    needed = compiled.used_bytes + max(0, there - compiled.argument_bytes)
    if needed > hbm_bytes:
        yield f"{needed} bytes do not fit the {hbm_bytes:.0f} of a chip"
    if compiled.aliased_bytes < pool:
        yield f"{compiled.aliased_bytes} bytes are updated in place, the pool has {pool}"
    if compiled.largest_temporary_bytes >= least:
        size = compiled.largest_temporary_bytes
        yield f"a temporary of {size} bytes, a layer or its part of the pool has {least}"
    yield from differing(compiled.collectives, wanted)

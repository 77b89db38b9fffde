# SPDX-License-Identifier: Apache-2.0
"""The engine's own programs, compiled for real TPUs by libtpu's compiler, on any machine.

Nothing runs: what is held to is memory (pool pages updated in place, small temporaries, all of it
within the chip) and communication (no weight and no page crosses chips). Each case prints a table.
`make test-slow` installs libtpu apart from the environment, where jax would look for a TPU at
every start.
"""

import collections
import importlib.util
import json
import os
import pathlib
import re
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from engine.batch import BatchShape
from engine.buckets import Ladder
from engine.kv import kv_layout
from engine.loading import abstract_parameters
from engine.models import llama, qwen_moe
from engine.models.split import device_config, split_config
from engine.programs import MOVES, ProgramFactory
from engine.step import StepConfig
from sharding import RULES, make_mesh

DATA = pathlib.Path(__file__).parents[1] / "data"
PAGE_SIZE = 64
STEP_TOKENS = 512
MAX_TEMPORARIES = 256e6
HBM_BYTES = {"v5e": 15.75 * 2**30, "v6e": 31.25 * 2**30}  # a chip, as the compiler counts it

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}


class Case(NamedTuple):
    """A model on chips: `rows` requests of up to `row_tokens`, a pool of `pool_tokens` tokens."""

    config: dict
    topology: str
    chips: int
    rows: int
    row_tokens: int
    pool_tokens: int


CASES = {
    "smollm2 on one v5e": Case(SMOLLM2, "v5e:2x2", 1, 32, 8192, 65536),
    "llama 8b on eight v5e": Case(LLAMA_8B, "v5e:2x4", 8, 64, 2048, 131072),
    "llama 8b on one v6e": Case(LLAMA_8B, "v6e:2x2", 1, 32, 2048, 65536),
}

COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
ARRAY = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")


@pytest.fixture
def libtpu(monkeypatch):
    """Lets jax find libtpu's compiler; devices stay the CPU's."""
    path = pathlib.Path(os.environ.get("TPU_LIBRARY_PATH", f"{sys.prefix}/aot/libtpu/libtpu.so"))
    if path.exists():
        monkeypatch.setenv("TPU_LIBRARY_PATH", str(path))
    elif importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed; make test-slow does that")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    yield
    assert {device.platform for device in jax.devices()} == {"cpu"}


def make_factory(case, config):
    """Returns (ProgramFactory, Ladder) as the engine would build them on the chips."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    mesh = make_mesh(chips[: case.chips], tensor=case.chips)
    dtype = np.dtype(jnp.bfloat16)
    ladder = Ladder(case.rows, STEP_TOKENS)
    part = device_config(split_config(config, case.chips), case.chips)
    cfg = StepConfig(
        model=part,
        layout=kv_layout(part, PAGE_SIZE, dtype),
        shape=BatchShape(1, case.row_tokens // PAGE_SIZE, case.rows),
        mesh=mesh,
        rules=RULES,
        score_tokens=max(g.rows * g.width for body in ladder.bodies for g in body),
        forbidden=None,
    )
    params = abstract_parameters(config, mesh, RULES, dtype, stacked=True)
    num_pages = case.pool_tokens // PAGE_SIZE + 1
    return ProgramFactory(cfg, params, num_pages, stacked=True), ladder


def largest_programs(factory, ladder):
    """Returns {what: Program}: the body of most tokens of each make, the largest of each head."""
    chosen = {}
    for body in sorted(ladder.bodies, key=lambda body: sum(g.rows * g.width for g in body)):
        chosen["+".join(group.kind for group in body)] = factory.body(body)
    for head in sorted(ladder.heads(), key=lambda head: head.rows):
        chosen[head.kind] = factory.head(head)
    moves = (factory.copy(), factory.park(), factory.restore())
    return chosen | {program.name: program for program in moves}


def compile_timed(program):
    """Returns (compiled, seconds to lower and compile)."""
    begin = time.monotonic()
    compiled = program.lower().compile()
    return compiled, time.monotonic() - begin


def collectives(compiled):
    """Returns [(kind, bytes of the result)] of every collective in the code, a loop's once."""
    found = []
    for shapes, kind in COLLECTIVE.findall(compiled.as_text()):
        sizes = [
            int(re.sub(r"\D", "", dtype)) // 8 * np.prod([int(n) for n in dims.split(",") if n])
            for dtype, dims in ARRAY.findall(shapes)
        ]
        found.append((kind, int(sum(sizes))))
    return found


def check_memory(what, memory, chip, pool_bytes):
    in_use = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    in_use += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert in_use <= HBM_BYTES[chip], f"{what}: {in_use} bytes do not fit a {chip}"
    assert memory.temp_size_in_bytes < MAX_TEMPORARIES, what
    if what not in ("score", "park"):  # which are not given the state
        assert memory.alias_size_in_bytes >= pool_bytes, f"{what}: the pool is copied"


def check_collectives(what, found, case):
    kinds = collections.Counter(kind for kind, _ in found)
    if case.chips == 1:
        assert not kinds, what
    elif "chunk" in what or "decode" in what:
        # The embedding's, and in the layer those after attention and MLP: activations only.
        assert kinds == {"all-reduce": 3}, what
    elif what in ("copy", "park", "restore"):
        assert not kinds, what
    else:
        assert max(size for _, size in found) < 2**20, f"{what}: logits cross chips, {found}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_programs_compile_for_tpu(name, libtpu, capsys):
    case = CASES[name]
    factory, ladder = make_factory(case, llama.from_hf(case.config))
    programs = largest_programs(factory, ladder)
    whats = {"chunk", "decode", "chunk+decode", "greedy", "sample", "logprobs", "score"}
    assert set(programs) == whats | {"copy", "park", "restore"}
    # One by one: libtpu compiles one program at a time, whatever the threads.
    done = {what: compile_timed(program) for what, program in programs.items()}

    pool_bytes = factory.num_pages * factory.cfg.layout.page_bytes
    lines = [f"{name}: pool {pool_bytes / 1e6:.1f} MB a chip; MB a chip, and seconds to compile"]
    lines.append(f"{'program':30} {'args':>9} {'aliased':>9} {'temp':>7} {'moved':>7} {'s':>6}")
    for what, (compiled, seconds) in done.items():
        memory, found = compiled.memory_analysis(), collectives(compiled)
        sizes = (memory.argument_size_in_bytes, memory.alias_size_in_bytes)
        lines.append(
            f"{programs[what].name:30} {sizes[0] / 1e6:9.1f} {sizes[1] / 1e6:9.1f} "
            f"{memory.temp_size_in_bytes / 1e6:7.1f} "
            f"{max((size for _, size in found), default=0) / 1e6:7.1f} {seconds:6.1f}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))

    for what, (compiled, _) in done.items():
        check_memory(what, compiled.memory_analysis(), case.topology.split(":")[0], pool_bytes)
        check_collectives(what, collectives(compiled), case)
    # What is parked is in the host's memory, one array a page.
    parked = done["park"][0].memory_analysis()
    pages = MOVES * factory.cfg.layout.page_bytes
    assert parked.host_output_size_in_bytes == pages
    assert done["restore"][0].memory_analysis().host_argument_size_in_bytes == pages


@pytest.mark.slow
def test_the_experts_of_a_layer_are_not_copied(libtpu):
    """Six layers of Qwen3-30B-A3B: one layer's experts take 1.2 GB, which no step may move."""
    config = json.loads((DATA / "configs" / "qwen3-30b-a3b.json").read_text())
    config["num_hidden_layers"] = 6
    case = Case(config, "v6e:2x2", 1, 32, 2048, 65536)
    factory, ladder = make_factory(case, qwen_moe.from_hf(config))
    compiled, _ = compile_timed(largest_programs(factory, ladder)["decode"])
    memory = compiled.memory_analysis()
    check_memory("decode", memory, "v6e", factory.num_pages * factory.cfg.layout.page_bytes)
    assert memory.temp_size_in_bytes < 20e6

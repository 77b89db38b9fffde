# SPDX-License-Identifier: Apache-2.0
"""The engine's own programs, compiled for real TPUs by libtpu's compiler, on any machine.

Nothing runs: what is held to is memory (pool pages updated in place, small temporaries, all of it
within the chip) and communication (no weight and no page crosses chips). Each case prints a table.
`make test-slow` installs libtpu apart from the environment, where jax would look for a TPU at
every start.
"""

import json
import pathlib
from typing import NamedTuple

import jax
import pytest

from engine import aot
from engine.capacity import Parallel
from engine.models import llama, qwen_moe
from engine.programs import MOVES

DATA = pathlib.Path(__file__).parents[1] / "data"
PAGE_SIZE = 64
MAX_TEMPORARIES = 256e6

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


@pytest.fixture
def libtpu(monkeypatch):
    """Lets jax find libtpu's compiler; devices stay the CPU's."""
    try:
        settings = aot.compiler_settings()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield
    assert {device.platform for device in jax.devices()} == {"cpu"}


def slice_of(case, config):
    """Returns what is compiled of a case."""
    parallel, pages = Parallel(tensor=case.chips), case.pool_tokens // PAGE_SIZE + 1
    return aot.Slice(config, case.topology, parallel, case.rows, case.row_tokens, pages, PAGE_SIZE)


def largest_programs(factory, ladder):
    """Returns {what: Program}: the body of most tokens of each make, the largest of each head."""
    chosen = {}
    for body in sorted(ladder.bodies, key=lambda body: sum(g.rows * g.width for g in body)):
        chosen["+".join(group.kind for group in body)] = factory.body(body)
    for head in sorted(ladder.heads(), key=lambda head: head.rows):
        chosen[head.kind] = factory.head(head)
    moves = (factory.copy(), factory.park(), factory.restore())
    return chosen | {program.name: program for program in moves}


def check_memory(what, compiled, hbm_bytes, pool_bytes):
    assert compiled.used_bytes <= hbm_bytes, f"{what}: {compiled.used_bytes} bytes do not fit"
    assert compiled.temporary_bytes < MAX_TEMPORARIES, what
    if what not in ("score", "park"):  # which are not given the state
        assert compiled.aliased_bytes >= pool_bytes, f"{what}: the pool is copied"


def check_collectives(what, found, case):
    if case.chips == 1 or what in ("copy", "park", "restore"):
        assert not found, what
    elif "chunk" in what or "decode" in what:
        # The embedding's, and in the layer those after attention and MLP: activations only.
        layers = case.config["num_hidden_layers"]
        assert {one.kind for one in found} == {"all-reduce"}, what
        assert sorted(one.times for one in found) == [1, layers, layers], what
    else:
        assert max(one.bytes for one in found) < 2**20, f"{what}: logits cross chips, {found}"


def check_traffic(done, factory, case, pool_bytes):
    """Outside of kernels a step reads the weights once, and nothing but kernels looks at the pool.

    What is embedded is a few rows. A step with a chunk keeps what its MLP makes in the chip's
    memory, which 544 tokens do not leave room for elsewhere.
    """
    weights = aot.device_tree_bytes(factory.params)
    if not case.config["tie_word_embeddings"]:
        weights -= aot.device_tree_bytes(factory.params["embedding"])
    head, layers = done["greedy"].moved_bytes, case.config["num_hidden_layers"]
    width = case.config["intermediate_size"] // case.chips
    for what, tokens in (("decode", 0), ("chunk+decode", case.rows + 512), ("chunk", 512)):
        activations = layers * tokens * 4 * width * 2  # gate and up: written and read
        moved = done[what].moved_bytes + head
        ratio = moved / weights
        print(f"{what}: {moved / 1e6:.1f} MB outside of kernels, {ratio:.3f} x the weights")
        assert moved <= 1.1 * weights + activations, what
        assert not touches(done[what], pool_bytes), f"{what}: the pool is read outside of kernels"


def touches(compiled, size):
    """Returns the operations outside of kernels that read or make an array of so many bytes."""
    return [one.name for one in compiled.moved if size in (*one.operand_bytes, *one.made_bytes)]


@pytest.mark.slow
def test_what_looks_at_pages_outside_of_kernels_is_seen(libtpu):
    """The check above finds it in XLA's own attention, which gathers blocks of pages."""
    case = Case(SMOLLM2 | {"num_hidden_layers": 2}, "v5e:2x2", 1, 32, 8192, 65536)
    target = slice_of(case, llama.from_hf(case.config))._replace(choice="xla")
    factory, ladder = aot.make_factory(target)
    compiled = aot.compile_program(largest_programs(factory, ladder)["decode"])
    assert touches(compiled, factory.num_pages * factory.cfg.layout.page_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("smollm2 on one v5e", "llama 8b on eight v5e"),
        pytest.param("llama 8b on one v6e", marks=pytest.mark.long),
    ],
)
def test_programs_compile_for_tpu(name, libtpu, capsys):
    case = CASES[name]
    target = slice_of(case, llama.from_hf(case.config))
    factory, ladder = aot.make_factory(target)
    programs = largest_programs(factory, ladder)
    whats = {"chunk", "decode", "chunk+decode", "greedy", "sample", "logprobs", "score"}
    assert set(programs) == whats | {"copy", "park", "restore"}
    # One by one: libtpu compiles one program at a time, whatever the threads.
    done = {what: aot.compile_program(program) for what, program in programs.items()}

    pool_bytes = factory.num_pages * factory.cfg.layout.page_bytes
    lines = [f"{name}: pool {pool_bytes / 1e6:.1f} MB a chip; MB a chip, and seconds to compile"]
    lines.append(f"{'program':30} {'args':>9} {'aliased':>9} {'temp':>7} {'moved':>7} {'s':>6}")
    for compiled in done.values():
        moved = max((one.bytes for one in compiled.collectives), default=0)
        lines.append(
            f"{compiled.name:30} {compiled.argument_bytes / 1e6:9.1f} "
            f"{compiled.aliased_bytes / 1e6:9.1f} {compiled.temporary_bytes / 1e6:7.1f} "
            f"{moved / 1e6:7.1f} {compiled.seconds:6.1f}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))

    for what, compiled in done.items():
        check_memory(what, compiled, target.hbm_bytes, pool_bytes)
        check_collectives(what, compiled.collectives, case)
    with capsys.disabled():
        check_traffic(done, factory, case, pool_bytes)
    # What is parked is in the host's memory, one array a page.
    pages = MOVES * factory.cfg.layout.page_bytes
    assert done["park"].host_output_bytes == pages
    assert done["restore"].host_argument_bytes == pages


@pytest.mark.slow
def test_the_experts_of_a_layer_are_not_copied(libtpu):
    """Six layers of Qwen3-30B-A3B: one layer's experts take 1.2 GB, which no step may move."""
    config = json.loads((DATA / "configs" / "qwen3-30b-a3b.json").read_text())
    config["num_hidden_layers"] = 6
    case = Case(config, "v6e:2x2", 1, 32, 2048, 65536)
    target = slice_of(case, qwen_moe.from_hf(config))
    factory, ladder = aot.make_factory(target)
    compiled = aot.compile_program(largest_programs(factory, ladder)["decode"])
    pool_bytes = factory.num_pages * factory.cfg.layout.page_bytes
    check_memory("decode", compiled, target.hbm_bytes, pool_bytes)
    assert compiled.temporary_bytes < 20e6

# SPDX-License-Identifier: Apache-2.0
"""The engine's own programs, compiled for an H100 by XLA's compiler for CUDA, on any machine.

Nothing runs: what is held to is memory, and that a step is one captured graph (XLA's command
buffer), with the kernels in it. `make test-slow` installs the compiler apart from the environment.
"""

import re
import subprocess
import sys

import pytest

from engine import aot
from engine.models import llama
from tests.engine.test_tpu_compile import LLAMA_8B, SMOLLM2, Case, largest_programs, slice_of

CASES = {
    "smollm2": Case(SMOLLM2, aot.GPU, 1, 32, 8192, 65536),
    "llama 8b": Case(LLAMA_8B, aot.GPU, 1, 64, 2048, 131072),
}
# Of the thunks that a program is: "000: kCommandBuffer [source | sink] ...", those within a graph
# or a loop further in.
THUNK = re.compile(r"^( *)\d+: k(\w+)\s+\[.*?\]\s*(\S*)")


def thunks(text):
    """Returns [(how far in, kind, name)] of the thunks of a program."""
    found = [THUNK.match(line) for line in text.splitlines()]
    return [(len(one[1]), one[2], one[3]) for one in found if one]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("smollm2", marks=pytest.mark.long), "llama 8b"])
def test_a_step_is_one_captured_graph(name, tmp_path):
    """In a process of its own: a compiler for GPUs would be found by all tests that come after."""
    try:
        aot.compiler_settings()
        aot.find_gpu_compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "tests.engine.test_gpu_compile", name, str(tmp_path)]
    subprocess.run(command, check=True, timeout=600)
    for what in ("decode", "chunk+decode", "greedy"):
        [path] = (tmp_path / what).glob("*thunk_sequence_after_thunk_passes.txt")
        found = thunks(path.read_text())
        outer = [kind for depth, kind, _ in found if not depth]
        assert outer == ["CommandBuffer"], f"{what}: {outer}"
        kernels = [re.sub(r"_+\d+$", "", kernel) for _, _, kernel in found]
        layers = CASES[name].config["num_hidden_layers"]
        groups = {"greedy": 0, "decode": 1, "chunk+decode": 2}[what]
        assert kernels.count("paged_attention") == layers * groups, what
        assert kernels.count("kv_write") == layers * groups, what


def compile_all(name, folder):
    """Compiles the programs of a case, checks their memory and has XLA tell their thunks."""
    case = CASES[name]
    factory, ladder = aot.make_factory(slice_of(case, llama.from_hf(case.config)))
    pool = factory.num_pages * factory.cfg.layout.page_bytes
    programs = largest_programs(factory, ladder)
    for what in ("decode", "chunk+decode", "greedy", "sample", "logprobs", "copy"):
        options = {"xla_dump_to": f"{folder}/{what}", "xla_dump_hlo_as_text": True}
        compiled = programs[what].lower().compile(options)
        memory = compiled.memory_analysis()
        print(f"{what}: {memory.temp_size_in_bytes / 1e6:.1f} MB of temporaries")
        assert memory.temp_size_in_bytes < 256e6, what
        assert memory.alias_size_in_bytes >= pool, f"{what}: the pool is copied"


if __name__ == "__main__":
    import os

    import jax

    os.environ.update(aot.compiler_settings())
    jax.config.update("jax_platforms", "cpu")
    aot.find_gpu_compiler()
    compile_all(*sys.argv[1:])

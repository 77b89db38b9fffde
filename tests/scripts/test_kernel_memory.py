# SPDX-License-Identifier: Apache-2.0
"""The formulas of shared memory hold for what XLA's compiler for CUDA makes of the kernels."""

import importlib
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

from engine import aot
from pallas_kernels.backends import Backend
from scripts import check_kernels

OPERATIONS = [name for name in check_kernels.OPERATIONS if name != "kv_write"]  # shares nothing
# Those that have a gpu.py of their own.
FOLDERS = [
    "paged_attention",
    "flash_attention",
    "quantized_matmul",
    "grouped_matmul",
]
# Of the thunks that a program is: a kernel's name, its grid, what a program shares.
KERNEL = re.compile(r"(?:attention|matmul)\S* grid.* shared_memory: (\d+) bytes")


@pytest.mark.slow
@pytest.mark.long
def test_shared_memory_is_reckoned():
    """In a process of its own: a compiler for GPUs would be found by all tests that come after."""
    try:
        aot.compiler_settings()
        aot.find_gpu_compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "tests.scripts.test_kernel_memory"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    found = [line.split("|") for line in lines.stdout.splitlines()]
    assert {operation for operation, *_ in found} == set(OPERATIONS)
    room = Backend("gpu", "h100").shared_bytes
    for operation, shape, reckoned, used in found:
        assert int(used) <= int(reckoned) <= room, (operation, shape)
        assert int(used) > 0, (operation, shape)


def tell_all():
    """Prints, of every kernel at every shape, the bytes that it reckons and those that it takes."""
    reckoned = []
    for folder in FOLDERS:
        module = importlib.import_module(f"pallas_kernels.{folder}.gpu")

        def recorded(warps, stages, need, backend, do=module.compiler_params):
            reckoned.append(need)
            return do(warps, stages, need, backend)

        module.compiler_params = recorded
    backend, device = Backend("gpu", "h100"), aot.gpu_device()
    for operation in OPERATIONS:
        cases = importlib.import_module(f"pallas_kernels.{operation}.cases")
        for name, shape in cases.SHAPES.items():
            reckoned.clear()
            call, arguments = cases.abstract_call(shape, backend)
            with tempfile.TemporaryDirectory() as folder:
                check_kernels.lowered(call, arguments, device).compile({"xla_dump_to": folder})
                [path] = pathlib.Path(folder).glob("*thunk_sequence.txt")
                [used] = KERNEL.findall(path.read_text())
            print(operation, name, *reckoned, used, sep="|")


if __name__ == "__main__":
    import os

    import jax

    os.environ.update(aot.compiler_settings())
    jax.config.update("jax_platforms", "cpu")
    aot.find_gpu_compiler()
    tell_all()

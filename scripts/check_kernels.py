# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for chips that are not there, at the shapes of published models.

    python -m scripts.check_kernels [--chips=v5e,v5p,v6e,h100] [--operations=paged_attention,...]

It prints a table in Markdown: seconds to lower and to compile, the temporaries beside the kernel,
and of a TPU the vector memory that the compiler gave it; MB of a chip. Exit code 1, with a line for
each fault on stderr, when a compiler refuses a kernel, a kernel declines a shape or takes more than
it reckons, or what is to be written in place is not.
"""

import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine import aot
from pallas_kernels.backends import Backend
from pallas_kernels.tpu_tiles import SPARE_BYTES
from scripts.command_line import UsageError, run_command, usage_errors

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "h100": None}  # a slice of each
OPERATIONS = (
    *("paged_attention", "latent_attention", "flash_attention", "kv_write"),
    *("quantized_matmul", "grouped_matmul"),
)
IN_PLACE = ("kv_write",)  # its first argument is donated
# In a kernel's call: the vector memory (space 1) that it may take, and how far it took some.
SCOPED = r'scoped_memory_configs":\[{"memory_space":"1","offset":"(\d+)","size":"(\d+)"}\]'
VECTOR = re.compile(f'"tpu_custom_call".*"{SCOPED}.*"used_{SCOPED}')


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_list("chips", list(CHIPS), "Chips to compile for.", flag_values=values)
    flags.DEFINE_list("operations", list(OPERATIONS), "Operations.", flag_values=values)
    return values


FLAGS = define_flags()


class Compiled(NamedTuple):
    """What a compiler says of a kernel at a shape; `fault` is why it is not right, or None."""

    seconds: float
    temporary_bytes: int
    vector_bytes: int | None  # the most of a kernel; None if there are none, or no such memory
    fault: str | None

    def __str__(self) -> str:
        text = f"{self.seconds:.1f} s, {self.temporary_bytes / 1e6:.0f} MB"
        return text if self.vector_bytes is None else f"{text}, {self.vector_bytes / 1e6:.1f} MB"


def main() -> None:
    for name, known in (("chips", CHIPS), ("operations", OPERATIONS)):
        if unknown := [one for one in getattr(FLAGS, name) if one not in known]:
            raise UsageError(f"--{name}={unknown[0]} is not known; name some of {', '.join(known)}")
    if not FLAGS.chips or not FLAGS.operations:
        raise UsageError("there is nothing to compile; leave --chips and --operations out for all")
    with usage_errors():
        os.environ.update(aot.compiler_settings())
        if "h100" in FLAGS.chips:
            aot.find_gpu_compiler()
    jax.config.update("jax_platforms", "cpu")  # what is there is left to others
    devices = {chip: chip_device(chip) for chip in FLAGS.chips}
    heads = ["operation", "shape", *devices]
    print_line(heads)
    print_line(["---"] * len(heads))
    faults = []
    for operation in FLAGS.operations:
        for name, found in rows(operation, devices):
            print_line([operation, name, *map(str, found.values())])
            faults += [
                f"{operation}, {name}, {chip}: {one.fault}"
                for chip, one in found.items()
                if one.fault
            ]
    for fault in faults:
        print(f"check_kernels: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)


def print_line(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def chip_device(chip: str) -> Any:
    """Returns a chip to compile for."""
    topology = CHIPS[chip]
    return aot.slice_devices(topology)[0] if topology else aot.gpu_device()


def rows(operation: str, devices: dict[str, Any]) -> Iterator[tuple[str, dict[str, Compiled]]]:
    """Yields (shape's name, what is made of it by chip) of an operation."""
    cases = importlib.import_module(f"pallas_kernels.{operation}.cases")
    for name, shape in cases.SHAPES.items():
        found = {}
        for chip, device in devices.items():
            backend = Backend("gpu" if device.platform in ("gpu", "cuda") else "tpu", chip)
            call, arguments = cases.abstract_call(shape, backend)
            found[chip] = compiled(call, arguments, device, donated=operation in IN_PLACE)
        yield name, found


def lowered(
    call: Callable[..., Any], arguments: Any, device: Any, *, donated: bool = False
) -> jax.stages.Lowered:
    """Returns a call lowered for a device that is not there; its first argument may be donated."""
    mesh = Mesh([device], ("chip",))
    place = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place), arguments
    )
    whole = PartitionSpec()
    local = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(local, donate_argnums=0 if donated else ()).lower(*arguments)


def compiled(call: Callable[..., Any], arguments: Any, device: Any, *, donated: bool) -> Compiled:
    """Returns what the compiler of a device makes of a call."""
    begin = time.monotonic()
    try:
        made = lowered(call, arguments, device, donated=donated).compile()
    except Exception as error:  # of any of the compilers' own kinds
        return Compiled(time.monotonic() - begin, 0, None, str(error).splitlines()[0])
    seconds, memory, text = time.monotonic() - begin, made.memory_analysis(), made.as_text()
    assert memory is not None and text is not None, "compilers for chips give both"
    fault = None
    if "tpu_custom_call" not in text and "triton" not in text:
        fault = "the kernel declines it"
    vector = [tuple(map(int, numbers)) for numbers in VECTOR.findall(text)]
    used = [start + size - offset for offset, _, start, size in vector]
    for (_, most, *_), one in zip(vector, used, strict=True):
        if one > most - SPARE_BYTES:
            fault = f"{one} bytes of vector memory; {most - SPARE_BYTES} are reckoned"
    size = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arguments[0]))
    if donated and memory.alias_size_in_bytes < size:
        fault = f"{memory.alias_size_in_bytes} of {size} bytes are written in place"
    return Compiled(seconds, memory.temp_size_in_bytes, max(used, default=None), fault)


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command."""
    run_command(main, FLAGS, __doc__ or "", argv)


if __name__ == "__main__":
    run()

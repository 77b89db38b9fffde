# SPDX-License-Identifier: Apache-2.0
"""Compiles published models for slices of TPUs that are not there, and checks what comes of it.

    python -m scripts.check_meshes [--cases=llama-3.1-8b] [--configs=FOLDER]

It prints a table in Markdown. All bytes are of a chip. Exit code 1, with a line for each fault on
stderr, when a step does not fit its chips, does not update its pool in place, has temporaries as
large as a layer or its pool, or tells other chips anything else than planned (engine/traffic.py).
"""

import collections
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from engine import aot
from engine.capacity import Parallel, shape_of
from engine.kv import lanes_of
from engine.loading import read_config
from engine.traffic import Collective
from scripts.command_line import UsageError, run_command, usage_errors

PAGE_SIZE = 64
CONFIGS = Path(__file__).parents[1] / "tests/data/configs"


class Case(NamedTuple):
    """A model by its config, on a slice: `rows` requests of up to `row_tokens` in each replica,
    whose pages hold `pool_tokens` tokens on a chip."""

    model: str
    topology: str
    parallel: Parallel
    rows: int = 32
    row_tokens: int = 8192
    pool_tokens: int = 131072

    @property
    def name(self) -> str:
        return f"{self.model} {self.topology} {self.parallel.mesh}"


CASES = (
    Case("llama-3.1-8b", "v5e:2x4", Parallel(tensor=8), rows=64),
    Case("llama-3.1-8b", "v6e:2x4", Parallel(tensor=8), rows=64),
    Case("llama-3.1-8b", "v6e:2x4", Parallel(sequence=2, tensor=4)),
    Case("llama-3.1-70b", "v6e:4x4", Parallel(data=2, tensor=8)),
    Case("llama-3.1-70b", "v5p:2x2x4", Parallel(data=4, tensor=4)),
    Case("qwen3-30b-a3b", "v6e:2x4", Parallel(expert=8)),
    Case("deepseek-v3", "v5p:4x4x4", Parallel(expert=64), pool_tokens=262144),
    Case("deepseek-v3", "v6e:16x16", Parallel(expert=64, tensor=4)),
)
HEADS = (
    *("model, chips", "mesh", "program", "arguments, GB", "pool, GB", "aliased, GB"),
    *("temporaries (largest), MB", "collectives, KB each", "seconds"),
)


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    cases = "Those whose model, slice or mesh has this text; all if not given."
    flags.DEFINE_string("cases", "", cases, flag_values=values)
    configs = "The folder with MODEL.json."
    flags.DEFINE_string("configs", str(CONFIGS), configs, flag_values=values)
    return values


FLAGS = define_flags()


class Checked(NamedTuple):
    """A line of the table, and what is wrong."""

    cells: tuple[str, ...]
    faults: list[str]


def main() -> None:
    cases = [case for case in CASES if FLAGS.cases in case.name]
    if not cases:
        names = "; ".join(case.name for case in CASES)
        raise UsageError(f"--cases={FLAGS.cases} names none of {names}")
    with usage_errors():
        os.environ.update(aot.compiler_settings())
    jax.config.update("jax_platforms", "cpu")  # what is there is left to others
    faults = []
    print_line(HEADS)
    print_line(["---"] * len(HEADS))
    for case in cases:
        with usage_errors(f"{case.name}: "):
            for checked in check(case, Path(FLAGS.configs)):
                print_line(checked.cells)
                faults += checked.faults
    for fault in faults:
        print(f"check_meshes: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)


def print_line(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def check(case: Case, configs: Path) -> Iterator[Checked]:
    """Yields a line for each of a case's bodies, as it is compiled."""
    config = read_config(configs / f"{case.model}.json")
    target = aot.Slice(
        config,
        case.topology,
        case.parallel,
        case.rows,
        case.row_tokens,
        case.pool_tokens // PAGE_SIZE + 1,
        PAGE_SIZE,
    )
    shape = shape_of(
        config,
        np.dtype(jnp.bfloat16),
        page_size=PAGE_SIZE,
        max_model_len=case.row_tokens,
        step_tokens=target.step_tokens,
        lanes=lanes_of("tpu"),
    )
    factory, ladder = aot.make_factory(target)
    pool = factory.num_pages * factory.cfg.layout.page_bytes
    for body in aot.step_bodies(ladder):
        try:
            compiled = aot.compile_program(factory.body(body))
        except aot.DoesNotCompile as error:
            yield Checked((case.name, *["-"] * (len(HEADS) - 1)), [f"{case.name}: {error}"])
            continue
        wanted = aot.planned(shape, case.parallel, body)
        cells = (
            f"{case.model}, {case.topology}",
            case.parallel.mesh,
            compiled.name.removeprefix("body "),
            f"{compiled.argument_bytes / 1e9:.2f}",
            f"{pool / 1e9:.2f}",
            f"{compiled.aliased_bytes / 1e9:.2f}",
            f"{compiled.temporary_bytes / 1e6:.1f} ({compiled.largest_temporary_bytes / 1e6:.1f})",
            told(compiled.collectives),
            f"{compiled.seconds:.0f}",
        )
        found = aot.faults(compiled, factory, target.hbm_bytes, wanted)
        yield Checked(cells, [f"{case.name}: {compiled.name}: {fault}" for fault in found])


def told(found: Sequence[Collective]) -> str:
    """Returns the collectives as a cell has them: those in layers first, by how often they are."""
    texts = collections.defaultdict(list)
    for one, count in collections.Counter(found).items():
        number = f"{count} " if count > 1 else ""
        texts[one.times].append(f"{number}{one.kind} {one.bytes / 1e3:.1f}")
    parts = [
        f"{f'{times} layers' if times > 1 else 'once'}: {', '.join(texts[times])}"
        for times in sorted(texts, reverse=True)
    ]
    return "; ".join(parts) or "none"


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, 1 for faults, or 2 with one line for a wrong use."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

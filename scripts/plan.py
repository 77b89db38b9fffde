# SPDX-License-Identifier: Apache-2.0
"""What a model takes on given chips, from its config alone: memory, pages, step times, a mesh.

    python -m scripts.plan --model=M --chips=v5e:8|h100:8|cpu [--max_model_len=] [--max_num_seqs=]
        [--mesh=data=2,tensor=4] [--check=v5e:2x4]

All figures are reckoned from the chips' public ones; nothing is run and no weights are read. The
last line is the mesh, for --mesh of other commands. With --check its programs are compiled for a
slice of TPUs, which need not be there, and compared with the plan.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from checkpoints import store
from engine import aot, capacity
from engine.buckets import Ladder
from engine.build import context_length, default_page_size
from engine.capacity import Parallel, Room, Shape
from engine.chips import CHIPS, Chip, parse_chips
from engine.config import EngineConfig
from engine.loading import read_config
from engine.memory import available_bytes
from engine.programs import ProgramFactory
from engine.roofline import Choice, Step, Work, choices, choose, step
from scripts.benchmarks.report import Table, print_tables
from scripts.command_line import UsageError, given, run_command, usage_errors
from sharding import parse_mesh

DTYPES = ("float32", "bfloat16", "float16")
OPTIONS = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "memory_fraction",
)
MOST_LAYOUTS = 12  # that are shown
MEASURES = {"memory_gb": "memory_bytes", "bandwidth_gb_s": "bandwidth", "tflops": "flops"}


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()

    def integer(name: str, text: str) -> None:
        flags.DEFINE_integer(name, None, text, flag_values=values)

    def number(name: str, text: str) -> None:
        flags.DEFINE_float(name, None, text, flag_values=values)

    model = "A folder with config.json, that file, a GGUF file, a known name, or one of the hub."
    flags.DEFINE_string("model", None, model, flag_values=values)
    chips = f"NAME or NAME:COUNT, of {', '.join(CHIPS)}."
    flags.DEFINE_string("chips", None, chips, flag_values=values)
    flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "Of weights and KV.", flag_values=values)
    integer("max_model_len", "Most prompt and output tokens of a request; the model's by default.")
    integer("max_num_seqs", "Requests that run at once in a replica; by default as many as fit.")
    integer("max_num_batched_tokens", "Tokens of a prefill chunk; 512 by default.")
    integer("page_size", "Tokens of a KV page, a power of two.")
    number("memory_fraction", "Share of the memory to use; 0.9 by default.")
    number("memory_gb", "Gigabytes of a chip, in the place of its public figure.")
    number("bandwidth_gb_s", "Gigabytes a second from its memory, likewise.")
    number("tflops", "Its 1e12 operations a second, likewise.")
    mesh = "The mesh to plan for, instead of the best one; all of the chips."
    flags.DEFINE_string("mesh", None, mesh, flag_values=values)
    check = "A slice of TPUs to compile the programs for, such as v6e:2x4."
    flags.DEFINE_string("check", None, check, flag_values=values)
    return values


FLAGS = define_flags()


class Plan(NamedTuple):
    """What the flags come to."""

    shape: Shape
    chip: Chip
    chip_name: str
    num_chips: int
    usable_bytes: int  # of a chip
    max_num_seqs: int  # of each replica
    most_requests: int | None  # likewise, for predictions; None: as many as fit


def main() -> None:
    for name in ("model", "chips"):
        if not FLAGS[name].value:
            raise UsageError(f"--{name} is missing; --help shows the flags")
    with usage_errors():
        plan = make_plan()
        found = choices(
            plan.shape, plan.chip, plan.usable_bytes, plan.num_chips, plan.most_requests
        )
        if not found:
            raise UsageError(does_not_fit(plan))
        chosen = found[0] if FLAGS.mesh is None else asked_for(plan)
        if FLAGS.check is not None:
            target = slice_of(plan, chosen)
            os.environ.update(aot.compiler_settings())
            jax.config.update("jax_platforms", "cpu")  # what is there is left to others
            factory, ladder = aot.make_factory(target)
    tables = [model_table(plan), kv_table(plan), layout_table(plan, found, chosen)]
    print_tables([*tables, steps_table(plan, chosen.room)])
    faults: list[str] = []
    if FLAGS.check is not None:
        table, faults = check_table(plan, chosen, target, factory, ladder)
        print_tables([table])
    for fault in faults:
        print(f"plan: {fault}", file=sys.stderr)
    print(f"\n{chosen.room.parallel.mesh}")
    if faults:
        sys.exit(1)


def asked_for(plan: Plan) -> Choice:
    """Returns the layout of --mesh; raises ValueError if it is none of the chips', or holds no
    request."""
    sizes = parse_mesh(FLAGS.mesh)
    if sizes.pop("pipe", 1) > 1:
        raise ValueError(f"mesh={FLAGS.mesh!r}: plans have no stages yet; leave pipe out")
    parallel = Parallel(**sizes)
    if parallel not in list(capacity.layouts(plan.shape, plan.num_chips)):
        raise ValueError(
            f"mesh={FLAGS.mesh!r} is no layout of this model over {plan.num_chips} chips; leave it "
            "out to see those that are"
        )
    found = capacity.room(plan.shape, plan.usable_bytes, parallel)
    if not found.batch:
        raise ValueError(
            f"mesh={FLAGS.mesh!r}: {found.weight_bytes / 1e9:.1f} GB of weights and "
            f"{found.request_pages * found.page_bytes / 1e9:.1f} GB of KV for a request, on each "
            f"chip, do not fit in {plan.usable_bytes / 1e9:.1f} GB; leave it out to see what does"
        )
    return choose(plan.shape, plan.chip, found, plan.most_requests)


def make_plan() -> Plan:
    """Returns what the flags come to; raises ValueError for what cannot be."""
    name, count = parse_chips(FLAGS.chips)
    chip = measured(CHIPS[name])
    options = given(FLAGS, OPTIONS)
    engine = EngineConfig(model=FLAGS.model, **options)
    config = read_config(store.resolve(FLAGS.model, config_only=True))
    shape = capacity.shape_of(
        config,
        np.dtype(jnp.dtype(engine.dtype)),
        page_size=engine.page_size or default_page_size("cpu" if name == "cpu" else "accelerator"),
        max_model_len=context_length(engine, config.max_position),
        step_tokens=engine.max_num_batched_tokens,
        lanes=chip.lanes,
    )
    usable = int((chip.memory_bytes or available_bytes()) * engine.memory_fraction)
    rows = engine.max_num_seqs
    return Plan(shape, chip, name, count, usable, rows, options.get("max_num_seqs"))


def measured(chip: Chip) -> Chip:
    """Returns the chip with the figures that flags give it."""
    units = {"memory_gb": 1e9, "bandwidth_gb_s": 1e9, "tflops": 1e12}
    found = given(FLAGS, list(MEASURES))
    for name, value in found.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value} must be a number above 0")
    figures = {MEASURES[name]: value * units[name] for name, value in found.items()}
    if "memory_bytes" in figures:
        figures["memory_bytes"] = int(figures["memory_bytes"])
    return chip._replace(**figures)


def does_not_fit(plan: Plan) -> str:
    """Returns the line for a model without a layout: what is lacking, and what would do."""
    rooms = [
        capacity.room(plan.shape, plan.usable_bytes, parallel)
        for parallel in capacity.layouts(plan.shape, plan.num_chips)
    ]
    least = min(rooms, key=lambda found: found.weight_bytes)
    kv_gb = least.request_pages * least.page_bytes / 1e9
    shorter = " or a smaller --max_model_len" if least.weight_bytes < plan.usable_bytes else ""
    return (
        f"--chips={FLAGS.chips}: {least.weight_bytes / 1e9:.1f} GB of weights and {kv_gb:.1f} GB "
        f"of KV for one request of {plan.shape.max_model_len} tokens, on each chip, do not fit in "
        f"{plan.usable_bytes / 1e9:.1f} GB; {remedy(plan)}{shorter}"
    )


def remedy(plan: Plan) -> str:
    """Returns chips that would do: more of the same, else as few as there must be of others."""
    fraction = plan.usable_bytes / (plan.chip.memory_bytes or available_bytes())
    others = [name for name in CHIPS if name not in (plan.chip_name, "cpu")]
    for name in (plan.chip_name, *others) if plan.chip_name != "cpu" else others:
        same = name == plan.chip_name
        memory = plan.usable_bytes if same else int((CHIPS[name].memory_bytes or 0) * fraction)
        if found := capacity.least_chips(plan.shape, memory):
            return f"try --chips={name}:{found}"
    return "give a chip with more --memory_gb"


def model_table(plan: Plan) -> Table:
    shape = plan.shape
    config, dtype = shape.config, shape.layout.dtype.name
    row = (
        f"{capacity.num_parameters(shape) / 1e9:.2f} B",
        f"{capacity.active_parameters(shape) / 1e9:.2f} B",
        f"{capacity.weight_bytes(shape) / 1e9:.2f} GB",
    )
    heads = ("parameters", "of them used for a token", f"weights in {dtype}")
    return Table(f"{FLAGS.model}: {config.family}, {config.num_layers} layers", heads, [row])


def kv_table(plan: Plan) -> Table:
    shape = plan.shape
    layout = shape.layout
    kinds = list(capacity.kv_kinds(shape))
    rows = [
        (
            "full" if kind.window is None else f"window {kind.window}",
            str(kind.layers),
            str(kind.groups),
            str(kind.cell_bytes),
            str(min(kind.window or shape.max_model_len, shape.max_model_len)),
        )
        for kind in kinds
    ]
    total = sum(kind.cell_bytes for kind in kinds)
    rows.append(("all", str(shape.config.num_layers), str(len(layout.groups)), str(total), ""))
    heads = ("attention", "layers", "page groups", "bytes a token", "tokens kept at most")
    title = (
        f"\nKV: pages of {layout.page_size} tokens and {layout.page_bytes} bytes; a request of "
        f"{shape.max_model_len} tokens has {capacity.request_pages(shape)} pages"
    )
    return Table(title, heads, rows, left=[0])


def layout_table(plan: Plan, found: list[Choice], chosen: Choice) -> Table:
    def row(choice: Choice) -> tuple[str, ...]:
        left = choice.room
        return (
            *(str(length) for length in left.parallel),
            f"{left.weight_bytes / 1e9:.2f}",
            f"{left.pool_bytes / 1e9:.2f}",
            str(left.pages),
            str(left.batch),
            f"{choice.prefill.seconds * 1e3:.2f}",
            f"{choice.decode.seconds * 1e3:.2f}",
            f"{choice.prefill.tokens_per_s:.0f}",
            f"{choice.decode.tokens_per_s:.0f}",
            "chosen" if left.parallel == chosen.room.parallel else "",
        )

    heads = (
        *Parallel._fields,
        "weights, GB a chip",
        "pool, GB a chip",
        "pages a chip",
        f"requests of {plan.shape.max_model_len}",
        *("prefill, ms", "decode, ms", "prompt tok/s", "output tok/s", ""),
    )
    shown = found[:MOST_LAYOUTS]
    if all(choice.room.parallel != chosen.room.parallel for choice in shown):
        shown = [*shown, chosen]
    title = (
        f"\nlayouts on {FLAGS.chips}, of which {plan.usable_bytes / 1e9:.2f} GB a chip are used, "
        f"the fastest of {len(found)} that fit first"
    )
    return Table(title, heads, [row(choice) for choice in shown])


def works(plan: Plan, chosen: Room) -> Iterator[tuple[str, Work]]:
    """Yields the steps to show: chunks of prompts, one in each replica, and decodes."""
    longest = plan.shape.max_model_len
    chunk = min(plan.shape.step_tokens, longest)
    replicas = chosen.parallel.replicas
    yield f"prefill, tokens 0 to {chunk}", Work(replicas, chunk, 0)
    if longest > chunk:
        yield f"prefill, to token {longest}", Work(replicas, chunk, longest - chunk)
    most = chosen.batch if plan.most_requests is None else plan.most_requests * replicas
    for requests in dict.fromkeys((1, min(chosen.batch, most))):
        yield f"decode at token {longest}", Work(requests, 1, longest - 1)


def steps_table(plan: Plan, chosen: Room) -> Table:
    heads = (
        *("step", "requests", "TFLOP", "compute, ms", "weights, GB", "weights, ms"),
        *("KV, GB", "KV, ms", "links, MB", "links, ms", "all, ms", "bound by", "tokens/s"),
    )
    rows = [
        step_row(name, work.requests, step(plan.shape, chosen.parallel, plan.chip, work))
        for name, work in works(plan, chosen)
    ]
    title = (
        f"\n{chosen.parallel.mesh}: steps of a chip at {plan.chip.flops / 1e12:g} TFLOP/s and "
        f"{plan.chip.bandwidth / 1e9:g} GB/s ({plan.chip.source})"
    )
    return Table(title, heads, rows, left=[0])


def step_row(name: str, requests: int, found: Step) -> tuple[str, ...]:
    return (
        name,
        str(requests),
        f"{found.flops / 1e12:.3f}",
        f"{found.compute_s * 1e3:.2f}",
        f"{found.weight_bytes / 1e9:.2f}",
        f"{found.weights_s * 1e3:.2f}",
        f"{found.kv_bytes / 1e9:.2f}",
        f"{found.kv_s * 1e3:.2f}",
        f"{found.link_bytes / 1e6:.2f}",
        f"{found.links_s * 1e3:.2f}",
        f"{found.seconds * 1e3:.2f}",
        found.bound,
        f"{found.tokens_per_s:.0f}",
    )


def slice_of(plan: Plan, chosen: Choice) -> aot.Slice:
    """Returns the layout as --check compiles it, with all of the pool that is planned."""
    shape = plan.shape
    if not FLAGS.check.startswith(f"{plan.chip_name}:"):
        raise ValueError(
            f"check={FLAGS.check!r} is no slice of --chips={FLAGS.chips}; plan and check for one "
            f"kind of chip, of {', '.join(aot.HBM_BYTES)}"
        )
    aot.check_slice_name(FLAGS.check)
    return aot.Slice(
        shape.config,
        FLAGS.check,
        chosen.room.parallel,
        rows=plan.max_num_seqs,
        row_tokens=shape.max_model_len,
        num_pages=chosen.room.pages,
        page_size=shape.layout.page_size,
        step_tokens=shape.step_tokens,
        dtype=shape.layout.dtype,
    )


def check_table(
    plan: Plan, chosen: Choice, target: aot.Slice, factory: ProgramFactory, ladder: Ladder
) -> tuple[Table, list[str]]:
    """Returns the compiler's figures beside those planned, and what is wrong."""
    heads = (
        *("program", "planned, GB", "arguments, GB", "pool, GB", "in place, GB"),
        *("temporaries, MB", "collectives", "planned", "MB made", "planned", "seconds"),
    )
    rows, faults = [], []
    room = chosen.room
    for body in aot.step_bodies(ladder):
        try:
            compiled = aot.compile_program(factory.body(body))
        except aot.DoesNotCompile as error:
            faults.append(f"{FLAGS.check}: {error}")
            continue
        wanted = aot.planned(plan.shape, room.parallel, body)
        faults += [
            f"{FLAGS.check}: {compiled.name}: {fault}"
            for fault in aot.faults(compiled, factory, target.hbm_bytes, wanted)
        ]
        told = [
            figure
            for found in (compiled.collectives, wanted)
            for figure in (
                sum(one.times for one in found),
                sum(one.times * one.bytes for one in found) / 1e6,
            )
        ]
        rows.append(
            (
                compiled.name.removeprefix("body "),
                f"{(room.weight_bytes + room.pool_bytes) / 1e9:.2f}",
                f"{compiled.argument_bytes / 1e9:.2f}",
                f"{room.pool_bytes / 1e9:.2f}",
                f"{compiled.aliased_bytes / 1e9:.2f}",
                f"{compiled.temporary_bytes / 1e6:.1f}",
                *(f"{told[0]}", f"{told[2]}", f"{told[1]:.2f}", f"{told[3]:.2f}"),
                f"{compiled.seconds:.0f}",
            )
        )
    title = (
        f"\ncompiled for {FLAGS.check}, {plan.max_num_seqs} rows a replica; a chip has "
        f"{target.hbm_bytes / 1e9:.2f} GB for it"
    )
    return Table(title, heads, rows, left=[0]), faults


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, 1 for what --check found, or 2 with one line on stderr that names the
    fault and the remedy."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

# SPDX-License-Identifier: Apache-2.0
"""What a model takes on given chips, from its config alone: memory, pages, rooflines, a layout.

    python -m scripts.plan --model=M --chips=v5e:8|h100:8|cpu [--max_model_len=] [--max_num_seqs=]

All figures are bounds by the chips' public figures; nothing is run and no weights are read.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np
from absl import flags

from checkpoints import store
from engine import capacity
from engine.build import context_length, default_page_size
from engine.capacity import Parallel, Room, Shape
from engine.chips import CHIPS, Chip, parse_chips
from engine.config import EngineConfig
from engine.loading import read_config
from engine.memory import available_bytes
from engine.roofline import Step, Work, step
from scripts.benchmarks.report import Table, print_tables
from scripts.command_line import UsageError, given, run_command, usage_errors

DTYPES = ("float32", "bfloat16", "float16")
OPTIONS = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "memory_fraction",
)
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
    integer("max_num_seqs", "Requests that run at once; by default as many as fit.")
    integer("max_num_batched_tokens", "Tokens of a prefill chunk; 512 by default.")
    integer("page_size", "Tokens of a KV page, a power of two.")
    number("memory_fraction", "Share of the memory to use; 0.9 by default.")
    number("memory_gb", "Gigabytes of a chip, in the place of its public figure.")
    number("bandwidth_gb_s", "Gigabytes a second from its memory, likewise.")
    number("tflops", "Its 1e12 operations a second, likewise.")
    return values


FLAGS = define_flags()


class Plan(NamedTuple):
    """What the flags come to."""

    shape: Shape
    chip: Chip
    chip_name: str
    num_chips: int
    usable_bytes: int  # of a chip
    max_num_seqs: int
    most_requests: int | None  # None: as many as fit


def main() -> None:
    for name in ("model", "chips"):
        if not FLAGS[name].value:
            raise UsageError(f"--{name} is missing; --help shows the flags")
    with usage_errors():
        plan = make_plan()
        advised = capacity.advise(plan.shape, plan.usable_bytes, plan.num_chips, plan.max_num_seqs)
        if advised is None:
            raise UsageError(does_not_fit(plan))
    print_tables(
        [
            model_table(plan),
            kv_table(plan),
            layout_table(plan, advised),
            steps_table(plan, advised),
        ]
    )


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
        for parallel in capacity.layouts(plan.shape.config, plan.num_chips)
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
        if found := capacity.least_chips(plan.shape, memory, plan.max_num_seqs):
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


def layout_table(plan: Plan, advised: Room) -> Table:
    def row(parallel: Parallel) -> tuple[str, ...]:
        found = capacity.room(plan.shape, plan.usable_bytes, parallel)
        return (
            *(str(length) for length in parallel),
            f"{found.weight_bytes / 1e9:.2f}",
            f"{found.pool_bytes / 1e9:.2f}",
            str(found.pages),
            str(found.batch),
            "advised" if parallel == advised.parallel else "",
        )

    heads = (
        *Parallel._fields,
        "weights, GB a chip",
        "pool, GB a chip",
        "pages a replica",
        f"requests of {plan.shape.max_model_len}",
        "",
    )
    rows = [row(parallel) for parallel in capacity.layouts(plan.shape.config, plan.num_chips)]
    title = f"\nlayouts on {FLAGS.chips}, of which {plan.usable_bytes / 1e9:.2f} GB a chip are used"
    return Table(title, heads, rows)


def works(plan: Plan, advised: Room) -> Iterator[tuple[str, Work]]:
    """Yields the steps to show: chunks of prompts, one in each replica, and decodes."""
    longest = plan.shape.max_model_len
    chunk = min(plan.shape.step_tokens, longest)
    replicas = advised.parallel.replicas
    yield f"prefill, tokens 0 to {chunk}", Work(replicas, chunk, 0)
    if longest > chunk:
        yield f"prefill, to token {longest}", Work(replicas, chunk, longest - chunk)
    batch = min(advised.batch, plan.most_requests or advised.batch)
    for requests in dict.fromkeys((1, batch)):
        yield f"decode at token {longest}", Work(requests, 1, longest - 1)


def steps_table(plan: Plan, advised: Room) -> Table:
    heads = (
        *("step", "requests", "TFLOP", "compute, ms", "weights, GB", "weights, ms"),
        *("KV, GB", "KV, ms", "links, ms", "bound by", "tokens/s at most"),
    )
    rows = [
        step_row(name, work.requests, step(plan.shape, advised.parallel, plan.chip, work))
        for name, work in works(plan, advised)
    ]
    title = (
        f"\nrooflines of a chip at {plan.chip.flops / 1e12:g} TFLOP/s and "
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
        f"{found.links_s * 1e3:.2f}",
        found.bound,
        f"{found.tokens_per_s:.0f}",
    )


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, or 2 with one line on stderr that names the fault and the remedy."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

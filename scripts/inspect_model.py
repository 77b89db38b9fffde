# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model, and where its checkpoint has them; or what differs between two models.

    python -m scripts.inspect_model --model=M [--other=M2 [--values]]

Without --values no weights are read.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from absl import flags

from checkpoints import store
from engine.listing import (
    Parameter,
    difference,
    differing_fields,
    origin,
    parameters_of,
    unused_tensors,
)
from engine.loading import Model, open_model, stored_dtype
from scripts.benchmarks.report import Table, print_tables
from scripts.command_line import UsageError, run_command, usage_errors

MOST_SHOWN = 60  # characters of a field's value


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    model = "A GGUF file, a Hugging Face or Orbax folder, a known name, or owner/name of the hub."
    flags.DEFINE_string("model", None, model, flag_values=values)
    flags.DEFINE_string("other", None, "Another, to compare it with.", flag_values=values)
    flags.DEFINE_bool("values", False, "Compare the numbers too.", flag_values=values)
    return values


FLAGS = define_flags()


class Opened:
    """A model and its parameters in the type that its checkpoint has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model: Model = open_model(store.resolve(name))
        self.dtype = stored_dtype(self.model.checkpoint)
        self.parameters: dict[str, Parameter] = parameters_of(self.model, self.dtype)


def main() -> None:
    if not FLAGS.model:
        raise UsageError("--model is missing; --help shows the flags")
    if FLAGS.values and not FLAGS.other:
        raise UsageError("--values compares two models; name the second with --other")
    with usage_errors():
        ours = Opened(FLAGS.model)
        if not FLAGS.other:
            print_tables([parameter_table(ours)])
            print(totals(ours))
            return
        theirs = Opened(FLAGS.other)
        print_tables([field_table(ours, theirs), difference_table(ours, theirs)])


def parameter_table(opened: Opened) -> Table:
    rows = [
        (
            name,
            "x".join(map(str, parameter.spec.shape)),
            parameter.spec.dtype.name,
            ", ".join(axis or "-" for axis in parameter.spec.axes),
            str(parameter.num_bytes),
            stored_types(opened.model, parameter),
            origin(parameter.source),
        )
        for name, parameter in opened.parameters.items()
    ]
    heads = ("parameter", "shape", "dtype", "axes", "bytes", "stored", "from")
    return Table("", heads, rows, left=[0, 3, 5, 6])


def stored_types(model: Model, parameter: Parameter) -> str:
    """Returns the types in which a parameter's tensors are stored."""
    tensors = model.checkpoint.tensors
    return ", ".join(dict.fromkeys(tensors[name].dtype for name in parameter.source.names))


def totals(opened: Opened) -> str:
    checkpoint, config = opened.model.checkpoint, opened.model.config
    numbers = sum(p.num_bytes // p.spec.dtype.itemsize for p in opened.parameters.values())
    num_bytes = sum(parameter.num_bytes for parameter in opened.parameters.values())
    unused = unused_tensors(checkpoint, opened.parameters)
    left = f"; not used: {', '.join(unused)}" if unused else ""
    return (
        f"{opened.name}: {config.family}, {config.num_layers} layers, a {checkpoint.kind} "
        f"checkpoint; {len(opened.parameters)} parameters of {numbers} numbers and {num_bytes} "
        f"bytes, from {len(checkpoint.tensors) - len(unused)} of {len(checkpoint.tensors)} "
        f"tensors{left}"
    )


def field_table(ours: Opened, theirs: Opened) -> Table:
    rows = [
        (name, shown(one), shown(two))
        for name, one, two in differing_fields(ours.model.config, theirs.model.config)
    ]
    title = f"{len(rows)} fields of the config differ"
    return Table(title, ("field", ours.name, theirs.name), rows, left=[0, 1, 2])


def shown(value: Any) -> str:
    """Returns a field's value, the long ones cut."""
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 4]} ..."


def difference_table(ours: Opened, theirs: Opened) -> Table:
    """Returns what differs of the parameters: where they are, their shapes, their numbers."""
    rows = []
    for name in dict.fromkeys([*ours.parameters, *theirs.parameters]):
        one, two = ours.parameters.get(name), theirs.parameters.get(name)
        if one is None or two is None:
            rows.append((name, f"only in {theirs.name if one is None else ours.name}", "", ""))
        elif one.spec.shape != two.spec.shape:
            rows.append((name, f"shape {one.spec.shape} and {two.spec.shape}", "", ""))
        elif FLAGS.values:
            found = difference(name, (ours.model, one), (theirs.model, two))
            if found.absolute != 0:  # so is one that is not a number
                rows.append((name, "values", f"{found.absolute:.3g}", f"{found.relative:.3g}"))
    total = len({*ours.parameters, *theirs.parameters})
    what = "in place, shape or values" if FLAGS.values else "in place or shape"
    title = f"\n{len(rows)} of {total} parameters differ {what}"
    return Table(title, ("parameter", "differs", "absolute", "relative"), rows, left=[0, 1])


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, or 2 with one line on stderr that names the fault and the remedy."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

# SPDX-License-Identifier: Apache-2.0
"""Measures block sizes of kernels on the TPU or GPU at hand, and keeps the best.

    python -m scripts.tune_kernels [--operations=paged_attention,...] [--shapes=llama,decode]
        [--repeats=N] [--folder=F]

For each shape of a published model (those whose name has one of the texts of --shapes in it), it
halves and doubles one size at a time, starting from what the kernel's rule gives, until nothing is
more than 2% faster. Sizes that the kernel declines, that do not compile, or whose result is another
are passed over, and counted. What is best goes to OPERATION/tuned.json in --folder, by default
beside the kernels, where they look for it; what is there of other shapes and chips is kept.
"""

import datetime
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from absl import flags

from pallas_kernels import tuning
from pallas_kernels.backends import KINDS, Backend, Declined, choose, kernels_only
from pallas_kernels.tuning import Asked
from scripts.benchmarks.kernel_timing import (
    IN_PLACE,
    Contender,
    Program,
    compiled,
    difference,
    first_line,
    long_enough,
    timed,
    timed_twice,
)
from scripts.benchmarks.rounds import Run, medians, quiet_rounds
from scripts.check_kernels import OPERATIONS
from scripts.command_line import UsageError, replaced_file, run_command, usage_errors

GAIN = 1.02  # that a step must bring: less is noise
TOLERANCE = 0.02  # of the largest number: sums in another order, in bfloat16
CHOICES = {"stages": (1, 2, 3, 4, 5), "warps": (2, 4, 8)}  # others are halved and doubled


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_list("operations", list(OPERATIONS), "Operations.", flag_values=values)
    flags.DEFINE_list("shapes", [], "Texts, one of which a shape's name has.", flag_values=values)
    text = "Runs of each candidate, of which the median counts."
    flags.DEFINE_integer("repeats", 5, text, lower_bound=1, flag_values=values)
    text = "Where to keep what is best."
    flags.DEFINE_string("folder", str(tuning.FOLDER), text, flag_values=values)
    return values


FLAGS = define_flags()


class Tuned(NamedTuple):
    """The best sizes of a shape with their evidence, and how many candidates were passed over."""

    asked: Asked
    blocks: Mapping[str, int]
    seconds: float
    untuned_seconds: float
    passed_over: Mapping[str, int]  # by why: "declined", "failed", "wrong"
    tried: int


class Candidate(NamedTuple):
    """Sizes with their program and the seconds of a call."""

    blocks: Mapping[str, int]
    contender: Contender
    program: Program
    seconds: float


def main() -> None:
    if unknown := [one for one in FLAGS.operations if one not in OPERATIONS]:
        known = ", ".join(OPERATIONS)
        raise UsageError(f"--operations={unknown[0]} is not known; name some of {known}")
    shapes = list(chosen_shapes(FLAGS.operations, FLAGS.shapes))
    if not shapes:
        raise UsageError(
            f"--shapes={','.join(FLAGS.shapes)} names no shape of {', '.join(FLAGS.operations)}; "
            "leave it out for all"
        )
    backend = find_backend()
    folder = Path(FLAGS.folder)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--folder={folder} is no folder that can be written; name one")
    for operation, name, shape in shapes:
        print(f"{operation}, {name}: ", end="", flush=True)
        try:
            tuned = tune(operation, shape, backend, FLAGS.repeats)
        except Untunable as reason:
            print(reason)
            continue
        keep(folder, tuned)
        print(told(tuned), flush=True)


def chosen_shapes(
    operations: Sequence[str], texts: Sequence[str]
) -> Iterator[tuple[str, str, Any]]:
    """Yields (operation, name, shape) of what is to be tuned."""
    for operation in operations:
        cases = importlib.import_module(f"pallas_kernels.{operation}.cases")
        for name, shape in cases.SHAPES.items():
            if not texts or any(text in name for text in texts):
                yield operation, name, shape


def find_backend() -> Backend:
    """Returns the kernels of the device at hand; raises UsageError where there are none."""
    device = jax.devices()[0]
    backend = choose("auto", device.platform, device.device_kind)
    if backend.kind == "xla":
        raise UsageError(
            f"there is no TPU or GPU here, only {device.platform}; kernels are measured where they "
            "are to run"
        )
    if not backend.chip:
        raise UsageError(
            f"{device.device_kind!r} is no chip that sizes are kept for; those are "
            f"{', '.join(KINDS)}: add it to KINDS of pallas_kernels/backends.py"
        )
    return backend


class Untunable(Exception):
    """A shape has no sizes to choose, or cannot be measured. Its text says why."""


def tune(operation: str, shape: Any, backend: Backend, repeats: int) -> Tuned:
    """Returns the best sizes of a shape; raises Untunable if there are none."""
    search = Search(operation, shape, backend, repeats)
    best = search.rule
    while True:
        better = search.better(best)
        if better is None:
            break
        best = better
    try:
        seconds, untuned = search.compare(best)
    except Exception as error:  # a candidate may leave a GPU of no use to this process
        raise Untunable(f"the best sizes fail: {first_line(error)}") from error
    if seconds * GAIN > untuned:  # the rule's are as good
        best, seconds = search.rule, untuned
    return Tuned(
        search.asked, best.blocks, seconds, untuned, search.passed_over, len(search.seen) - 1
    )


class Search:
    """Candidates for the sizes of one shape.

    rule: what the kernel takes by itself. seen: all sizes that were looked at. passed_over: how
    many of them were of no use, by why.
    """

    def __init__(self, operation: str, shape: Any, backend: Backend, repeats: int) -> None:
        self._repeats = repeats
        self._with_sizes = partial(with_sizes, operation, shape, backend)
        self.asked = asked_by(operation, shape, backend)
        self.passed_over = dict.fromkeys(("declined", "failed", "wrong"), 0)
        contender = self._with_sizes(self.asked.rule)
        try:
            program, self._wanted = long_enough(contender)
            seconds = self._median(contender, program)
        except Exception as error:  # of any of the compilers' own kinds
            raise Untunable(f"the rule's sizes fail: {first_line(error)}") from error
        if difference(self._wanted, self._wanted) != 0:
            raise Untunable("the rule's sizes give what is not finite")
        self.rule = Candidate(self.asked.rule, contender, program, seconds)
        self.seen = {key_of(self.asked.rule)}

    def _median(self, contender: Contender, program: Program) -> float:
        runs: dict[str, Run] = {"": partial(timed, contender, program)}
        rounds, _ = quiet_rounds(runs, [], self._repeats, 0)
        return float(medians([one[""] for one in rounds])["seconds"])

    def better(self, best: Candidate) -> Candidate | None:
        """Returns a neighbour of `best` that is faster by more than GAIN, or None.

        A size that helped is moved on in its direction before others are looked at.
        """
        found = best
        for name in best.blocks:
            for direction in (-1, 1):
                while True:
                    value = moved(name, found.blocks[name], direction)
                    if value is None:
                        break
                    tried = self.measure({**found.blocks, name: value})
                    if tried is None or tried.seconds * GAIN > found.seconds:
                        break
                    found = tried
        return None if found is best else found

    def measure(self, blocks: Mapping[str, int]) -> Candidate | None:
        """Returns what these sizes give, or None: they are of no use, or have been looked at."""
        if key_of(blocks) in self.seen:
            return None
        self.seen.add(key_of(blocks))
        contender = self._with_sizes(blocks)
        try:
            program = compiled(contender, self.rule.program.calls)
            _, result = timed_twice(contender, program)
            if not difference(result, self._wanted) <= TOLERANCE:
                self.passed_over["wrong"] += 1
                return None
            del result
            return Candidate(blocks, contender, program, self._median(contender, program))
        except Declined:
            self.passed_over["declined"] += 1
        except Exception:  # of any of the compilers' own kinds
            self.passed_over["failed"] += 1
        return None

    def compare(self, best: Candidate) -> tuple[float, float]:
        """Returns the seconds of `best` and of the rule's sizes, measured in turn."""
        if best is self.rule:
            return best.seconds, best.seconds
        runs: dict[str, Run] = {
            "best": partial(timed, best.contender, best.program),
            "rule": partial(timed, self.rule.contender, self.rule.program),
        }
        rounds, _ = quiet_rounds(runs, [], self._repeats, 0)
        best_s, rule_s = (medians([one[name] for one in rounds])["seconds"] for name in runs)
        return float(best_s), float(rule_s)


def asked_by(operation: str, shape: Any, backend: Backend) -> Asked:
    """Returns what a kernel asks for sizes of; raises Untunable if it does not."""
    cases = importlib.import_module(f"pallas_kernels.{operation}.cases")
    call, arguments = cases.abstract_call(shape, backend)
    try:
        with tuning.trial() as asked, kernels_only():
            jax.eval_shape(call, *arguments)
    except Declined as reason:
        raise Untunable(f"declined: {reason}") from None
    if not asked:
        raise Untunable("there are no sizes to choose")
    return asked[-1]


def with_sizes(
    operation: str, shape: Any, backend: Backend, blocks: Mapping[str, int]
) -> Contender:
    """Returns a kernel with these sizes, which it asks for as it is traced, in any call."""
    cases = importlib.import_module(f"pallas_kernels.{operation}.cases")
    call, _ = cases.abstract_call(shape, backend)
    make = jax.jit(lambda: cases.concrete(shape, backend, np.random.default_rng(0)))

    def tried(*arguments: Any) -> Any:
        with tuning.trial(blocks), kernels_only():
            return call(*arguments)

    return Contender(tried, make, operation in IN_PLACE)


def key_of(blocks: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(blocks.items()))


def moved(name: str, value: int, direction: int) -> int | None:
    """Returns the next smaller or larger size, or None: an odd one cannot be halved."""
    if name in CHOICES:
        ahead = [one for one in CHOICES[name] if (one - value) * direction > 0]
        return min(ahead, key=lambda one: abs(one - value), default=None)
    if direction > 0:
        return 2 * value
    return value // 2 if value % 2 == 0 and value > 0 else None


def keep(folder: Path, tuned: Tuned) -> None:
    """Writes the sizes into the operation's file; an entry of the same key makes way."""
    asked = tuned.asked
    entry = {
        "chip": asked.chip,
        "shape": dict(asked.shape),
        "dtype": asked.dtype,
        "blocks": dict(tuned.blocks),
        "seconds": float(f"{tuned.seconds:.4g}"),
        "untuned_seconds": float(f"{tuned.untuned_seconds:.4g}"),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }
    path = folder / asked.operation / tuning.FILE
    with usage_errors(f"--folder={folder}: "):
        path.parent.mkdir(parents=True, exist_ok=True)
        tuning.entries.cache_clear()
        found = tuning.entries(asked.operation, folder) | tuning.by_key([entry])
    with replaced_file("folder", str(path)) as file:
        file.write(tuning.to_text(found))
    tuning.entries.cache_clear()


def told(tuned: Tuned) -> str:
    """Returns the line of what was found."""
    sizes = ", ".join(f"{name}={size}" for name, size in tuned.blocks.items())
    gain = tuned.untuned_seconds / tuned.seconds
    passed = ", ".join(f"{count} {why}" for why, count in tuned.passed_over.items() if count)
    line = f"{sizes}: {tuned.seconds * 1e6:.1f} us, {gain:.2f} x the rule's; {tuned.tried} tried"
    return f"{line} ({passed})" if passed else line


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command."""
    run_command(main, FLAGS, __doc__ or "", argv)


if __name__ == "__main__":
    run()

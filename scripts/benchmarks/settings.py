# SPDX-License-Identifier: Apache-2.0
"""The benchmark's flags, checked, as one record that a suite is given."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from engine import LLM
from scripts.benchmarks.peer import ROOT, PeerPlan, planned_peers
from scripts.command_line import (
    ENGINE_OPTIONS,
    UsageError,
    define_engine_flags,
    given,
    usage_errors,
)

LENGTHS = ROOT / "tests" / "data" / "sharegpt_lengths_200.jsonl"
PROSE = ROOT / "tests" / "data" / "prose.txt"


class Shape(NamedTuple):
    """Prompts at once, and the tokens of each."""

    requests: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt_tokens}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and on what."""

    model: str
    options: dict[str, Any]  # of the engine, as given
    repeats: int | None  # None: the suite's own
    most_void: int  # rounds done again, for each measurement, before giving up on quiet
    counts: list[int]
    shapes: list[Shape]
    fields: list[str]
    prefix_tokens: int
    peers: list[PeerPlan]
    peer_python: str | None
    num_requests: int
    request_rate: float
    arrival_seed: int
    lengths: Path
    text: Path

    def load(self, **options: Any) -> LLM:
        """Returns the model with the engine's options, those given winning over `options`.

        All of its programs are loaded, so that nothing runs beside what is measured. Nothing is
        kept of requests unless `options` say so: repeated prompts are to be computed.
        """
        with usage_errors():
            llm = LLM(self.model, **{"prefix_cache": False} | options | self.options)
        llm.engine.worker.programs.wait()
        return llm

    def load_rows(self, rows: int, **options: Any) -> LLM:
        """Returns the model with room for `rows` requests at once."""
        most = self.options.get("max_num_seqs", rows)
        if most < rows:
            raise UsageError(
                f"--max_num_seqs={most} is under the {rows} requests that are to run at once; "
                "raise it, or ask for fewer"
            )
        return self.load(max_num_seqs=rows, **options)


def define_flags(suites: list[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    define_engine_flags(values)

    def text(name: str, default: str | None, meaning: str) -> None:
        flags.DEFINE_string(name, default, meaning, flag_values=values)

    def integer(name: str, default: int | None, low: int, meaning: str) -> None:
        flags.DEFINE_integer(name, default, meaning, lower_bound=low, flag_values=values)

    flags.DEFINE_enum("suite", "decode", suites, "What to measure.", flag_values=values)
    integer("repeats", None, 1, "Rounds of each measurement; the suite's own if not given.")
    integer("most_void", 10, 0, "Rounds done again for quiet, for each measurement.")
    text("output", None, "Where to write the figures, as JSON.")
    text("charts", None, "Folder for the figures as PNG charts.")
    flags.DEFINE_list(
        "requests",
        ["1", "8", "32"],
        "Requests at once: decode, peers, sampling, steps.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "num_pages_compare", False, "decode: compare two sizes of the pool.", flag_values=values
    )
    shapes = ["1x64", "1x512", "8x64", "32x64", "1x2048"]
    flags.DEFINE_list("shapes", shapes, "prefill: prompts x tokens of each.", flag_values=values)
    flags.DEFINE_list(
        "fields", [], "sampling, prefix, kernels: only these, such as mixed.", flag_values=values
    )
    integer("num_requests", 200, 1, "serving, scoring, prefix: how many requests, or choices.")
    integer("prefix_tokens", 1500, 1, "prefix: tokens of what is shared or resumed.")
    flags.DEFINE_float(
        "request_rate",
        math.inf,
        "serving: requests a second; inf: all at once.",
        flag_values=values,
    )
    integer("arrival_seed", 0, 0, "serving: seed of the arrivals.")
    text("lengths", str(LENGTHS), 'serving: lines of {"prompt_len": N, "output_len": M}.')
    text("text", str(PROSE), "serving: the text that prompts are cut from.")
    text("peer_python", None, "Python of an environment with the peers.")
    text("peer_model", None, "Hugging Face folder for transformers.")
    text("peer_gguf", None, "GGUF file for llama.cpp.")
    return values


def read_settings(values: flags.FlagValues) -> Settings:
    """Returns the settings of the flags; raises UsageError naming the one that cannot be."""
    peers = planned_peers(values.peer_model, values.peer_gguf)
    if bool(peers) != (values.peer_python is not None):
        raise UsageError(
            "--peer_python goes together with --peer_model, --peer_gguf or both; give all or none"
        )
    if not values.request_rate > 0:
        raise UsageError(
            f"--request_rate={values.request_rate} must be above 0; leave it out for all at once"
        )
    return Settings(
        model=values.model,
        options=given(values, ENGINE_OPTIONS),
        repeats=values.repeats,
        most_void=values.most_void,
        counts=[shape.requests for shape in read_shapes("requests", values.requests, "1,8,32", 1)],
        fields=values.fields,
        prefix_tokens=values.prefix_tokens,
        shapes=read_shapes("shapes", values.shapes, "1x64,8x64", 2),
        peers=peers,
        peer_python=values.peer_python,
        num_requests=values.num_requests,
        request_rate=values.request_rate,
        arrival_seed=values.arrival_seed,
        lengths=Path(values.lengths),
        text=Path(values.text),
    )


def read_shapes(flag: str, texts: list[str], example: str, parts: int) -> list[Shape]:
    """Returns what lists such as 1,8 or 1x64,8x64 spell; raises UsageError naming the flag."""
    try:
        numbers = [[int(part) for part in text.split("x")] for text in texts]
    except ValueError:
        numbers = []
    if not numbers or any(len(n) != parts or min(n) < 1 for n in numbers):
        raise UsageError(f"--{flag} must be numbers from 1 with commas between, such as {example}")
    return [Shape(*n, *[0] * (2 - parts)) for n in numbers]

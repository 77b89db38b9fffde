# SPDX-License-Identifier: Apache-2.0
"""Generates text from prompts.

    python -m scripts.generate --model=M (--prompt=TEXT ... | --input=F.jsonl|F.txt|-)
        [--output=F.jsonl] [--report=F.json]

Without --output the texts are streamed to stdout; a summary goes to stderr.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from absl import flags

from engine import LLM, RequestOutput
from engine.config import EngineConfig
from engine.metrics import summarize
from engine.request import Logprob
from scripts.command_line import (
    ENGINE_OPTIONS,
    define_engine_flags,
    given,
    replaced_file,
    run_command,
    to_json,
    usage_errors,
)
from scripts.prompts import Row, read_rows

SAMPLING_FLAGS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "ignore_eos",
    "logprobs",
)


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define_engine_flags(values)

    def text(name: str, meaning: str) -> None:
        flags.DEFINE_string(name, None, meaning, flag_values=values)

    def integer(name: str, default: int | None, meaning: str) -> None:
        flags.DEFINE_integer(name, default, meaning, flag_values=values)

    def number(name: str, meaning: str) -> None:
        flags.DEFINE_float(name, None, meaning, flag_values=values)

    flags.DEFINE_multi_string("prompt", None, "A prompt; may be repeated.", flag_values=values)
    text("input", "Prompts: F.jsonl, F.txt or - for standard input.")
    text("output", "Where to write the results, as JSON lines.")
    text("report", "Where to write the summary, as JSON.")
    integer("max_tokens", 128, "Most tokens of an output; 0 only scores the prompt.")
    number("temperature", "0 is greedy; the default is 1.")
    integer("top_k", None, "Keep the k likeliest tokens; 0 or -1 is off.")
    number("top_p", "Keep the likeliest tokens with this share; 1 is off.")
    integer("seed", None, "Seed of the sampling.")
    flags.DEFINE_bool("ignore_eos", None, "Go on past the model's end.", flag_values=values)
    integer("logprobs", None, "Likeliest tokens to report at each position.")
    flags.DEFINE_bool("progress", True, "Show progress with --output.", flag_values=values)
    return values


FLAGS = define_flags()


def main() -> None:
    model = FLAGS.model
    options = given(FLAGS, ENGINE_OPTIONS)
    output, report = FLAGS.output, FLAGS.report
    with usage_errors():
        EngineConfig(model=model, **options)
    rows = read_rows(FLAGS.prompt, FLAGS.input, given(FLAGS, SAMPLING_FLAGS))
    with contextlib.ExitStack() as files:
        # Opened before the model, so that a wrong path costs no work.
        results = files.enter_context(replaced_file("output", output)) if output else None
        summary = files.enter_context(replaced_file("report", report)) if report else None
        started = time.monotonic()
        llm = None
        if rows:
            with usage_errors():
                llm = LLM(model, **options)
        start_s = time.monotonic() - started
        if llm is None:
            outputs = []
        elif results is None:
            outputs = stream_to_stdout(llm, rows)
        else:
            prompts, params = [row.prompt for row in rows], [row.params for row in rows]
            with usage_errors():
                outputs = llm.generate(prompts, params, progress=FLAGS.progress)
            for index, (row, result) in enumerate(zip(rows, outputs, strict=True)):
                results.write(to_json(result_row(index, row, result)) + "\n")
        figures = summarize(outputs, time.monotonic() - started - start_s)
        stats = {} if llm is None else llm.engine.stats()
        print_summary(figures, stats, start_s)
        if summary is not None:
            whole = {"model": model, "options": options, "start_s": start_s}
            summary.write(to_json(whole | {"summary": figures, "engine": stats}) + "\n")


def stream_to_stdout(llm: LLM, rows: Sequence[Row]) -> list[RequestOutput]:
    """Writes the texts to stdout as they come, in input order; returns the results.

    One request writes its text alone. Several run together; each is headed by its index and
    prompt, and one whose turn has not come is held back.
    """
    outputs: dict[int, RequestOutput] = {}
    held = [""] * len(rows)
    if len(rows) > 1:
        held = [f"[{index}] {row.prompt}" for index, row in enumerate(rows)]
    turn = 0
    for index, text, output in run_all(llm, rows):
        held[index] += text
        if output is not None:
            outputs[index] = output
            held[index] += "\n"
        while turn < len(rows):
            sys.stdout.write(held[turn])
            held[turn] = ""
            if turn not in outputs:
                break
            turn += 1
        sys.stdout.flush()
    return [outputs[index] for index in range(len(rows))]


def run_all(llm: LLM, rows: Sequence[Row]) -> Iterator[tuple[int, str, RequestOutput | None]]:
    """Yields (index, new text, the whole result once finished) until every row is done."""
    requests = []
    for index, row in enumerate(rows):
        with usage_errors(f"prompt {index}: "):
            requests.append(llm.make_request(row.prompt, row.params))
    running = {}
    for index, (request, text) in enumerate(requests):
        with usage_errors(f"prompt {index}: "):
            running[llm.engine.add_request(request, text)] = index
    while running:
        for delta in llm.engine.step():
            yield running[delta.request_id], delta.text, delta.output
            if delta.output is not None:
                del running[delta.request_id]


def result_row(index: int, row: Row, result: RequestOutput) -> dict[str, Any]:
    """Returns the output row of one request."""
    [completion] = result.outputs
    fields: dict[str, Any] = {
        "index": index,
        "prompt": row.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [position_row(position) for position in completion.logprobs]
    if result.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [position_row(position) for position in result.prompt_logprobs]
    if result.metrics is not None:
        fields["metrics"] = dataclasses.asdict(result.metrics)
    return fields


def position_row(position: dict[int, Logprob] | None) -> dict[str, dict[str, Any]] | None:
    """Returns one position's log-probabilities as JSON has them: ids are text, records objects."""
    if position is None:
        return None
    return {str(token): entry._asdict() for token, entry in position.items()}


def print_summary(figures: dict[str, Any], stats: dict[str, Any], start_s: float) -> None:
    """Prints a run's figures to stderr; a figure without data is a dash."""

    def shown(value: float | None, unit: str, scale: float = 1) -> str:
        return "-" if value is None else f"{value * scale:.1f} {unit}"

    def spread(name: str) -> str:
        return ", ".join(
            f"{share} {shown(value, 'ms', 1000)}" for share, value in figures[name].items()
        )

    lines = [
        f"{figures['requests']} requests, {figures['failed']} failed; "
        f"{figures['prompt_tokens']} prompt and {figures['output_tokens']} output tokens "
        f"in {figures['elapsed_s']:.1f} s: {shown(figures['output_tokens_per_s'], 'tokens/s')}",
        f"TTFT {spread('ttft_s')}; TPOT {spread('tpot_s')}",
        f"started in {start_s:.1f} s; {stats.get('programs_compiled', 0)} programs compiled, "
        f"{stats.get('programs_loaded', 0)} loaded",
    ]
    print("\n".join(lines), file=sys.stderr)


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, or 2 with one line on stderr that names the fault and the remedy."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

# SPDX-License-Identifier: Apache-2.0
"""Generates text from prompts.

    python -m scripts.generate --model=M (--prompt=TEXT ... | --input=F.jsonl|F.txt|-)
        [--chat | --score] [--output=F.jsonl] [--report=F.json]
    python -m scripts.generate --model=M --explain

Without --output the texts are streamed to stdout; a summary goes to stderr. Interrupted, it writes
what is finished. A line of F.jsonl is {"prompt": text or ids}, {"messages": [...]} for a chat, or,
with --score, {"context": ..., "continuation": ...}; and any sampling field, which wins over flags.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from absl import flags

from engine import LLM, RequestOutput
from engine.api import Samples, merge_samples
from engine.config import EngineConfig
from engine.metrics import summarize
from engine.request import CompletionOutput, Logprob
from scripts.command_line import (
    ENGINE_OPTIONS,
    Interrupted,
    UsageError,
    define_engine_flags,
    given,
    replaced_file,
    run_command,
    to_json,
    usage_errors,
)
from scripts.explain import explain
from scripts.prompts import Row, read_rows
from scripts.sampling_flags import define_sampling_flags, given_fields


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define_engine_flags(values)
    define_sampling_flags(values, max_tokens=128)

    def text(name: str, meaning: str) -> None:
        flags.DEFINE_string(name, None, meaning, flag_values=values)

    def switch(name: str, default: bool, meaning: str) -> None:
        flags.DEFINE_bool(name, default, meaning, flag_values=values)

    flags.DEFINE_multi_string("prompt", None, "A prompt; may be repeated.", flag_values=values)
    text("input", "Prompts: F.jsonl, F.txt or - for standard input.")
    text("output", "Where to write the results, as JSON lines.")
    text("report", "Where to write the summary, as JSON.")
    switch("chat", False, "A prompt is what the user says; lines may have messages.")
    switch("score", False, "Lines have a context and a continuation, whose tokens are scored.")
    switch("explain", False, "Print the plan: model, memory, pages, programs; then end.")
    switch("progress", True, "Show progress with --output.")
    return values


FLAGS = define_flags()


class Writer(Protocol):
    """Where lines go."""

    def write(self, text: str, /) -> Any: ...


def main() -> None:
    model = FLAGS.model
    options = given(FLAGS, ENGINE_OPTIONS)
    with usage_errors():
        EngineConfig(model=model, **options)
    if FLAGS.chat and FLAGS.score:
        raise UsageError("--chat and --score do not go together; give one of them")
    if FLAGS.explain:
        with usage_errors():
            print("\n".join(explain(LLM(model, **options))))
        return
    mode = "chat" if FLAGS.chat else "score" if FLAGS.score else "prompt"
    rows = read_rows(FLAGS.prompt, FLAGS.input, given_fields(FLAGS), mode)
    with contextlib.ExitStack() as files:
        # Opened before the model, so that a wrong path costs no work.
        results = (
            files.enter_context(replaced_file("output", FLAGS.output)) if FLAGS.output else None
        )
        summary = (
            files.enter_context(replaced_file("report", FLAGS.report)) if FLAGS.report else None
        )
        started = time.monotonic()
        llm = None
        if rows:
            with usage_errors():
                llm = LLM(model, **options)
        start_s = time.monotonic() - started
        if FLAGS.score:
            write_scores(llm, rows, results or sys.stdout)
            return
        outputs = run_rows(llm, rows, results) if llm is not None else {}
        figures = summarize(list(outputs.values()), time.monotonic() - started - start_s)
        stats = {} if llm is None else llm.engine.stats()
        print_summary(figures, stats, start_s)
        if summary is not None:
            whole = {"model": model, "options": options, "start_s": start_s}
            summary.write(to_json(whole | {"summary": figures, "engine": stats}) + "\n")
    if len(outputs) < len(rows):
        raise Interrupted(f"{len(outputs)} of {len(rows)} requests were finished")


def run_rows(llm: LLM, rows: Sequence[Row], results: Writer | None) -> dict[int, RequestOutput]:
    """Runs the rows, and writes those that finished: all, unless it is interrupted."""
    prepared = prepare_rows(llm, rows)
    shown = Shown(rows, prepared) if results is None else None
    outputs: dict[int, RequestOutput] = {}
    ended: dict[int, list[RequestOutput]] = {index: [] for index in range(len(rows))}
    running = {}
    try:
        for index, (requests, text) in enumerate(prepared):
            for request in requests:
                with usage_errors(f"prompt {index}: "):
                    running[llm.engine.add_request(request, text)] = index
        while running:
            for delta in llm.engine.step():
                index = running[delta.request_id]
                if shown is not None:
                    shown.add(index, delta.index, delta.text, delta.output is not None)
                if delta.output is not None:
                    del running[delta.request_id]
                    ended[index].append(delta.output)
                    if len(ended[index]) == len(prepared[index][0]):
                        outputs[index] = merge_samples(ended[index])
            if shown is None and FLAGS.progress:
                sys.stderr.write(f"\r{len(outputs)}/{len(rows)} requests")
    except KeyboardInterrupt:
        pass  # what is finished is written, and the caller says that it is not all
    finally:
        if shown is None and FLAGS.progress:
            sys.stderr.write("\n")
    for index in sorted(outputs):
        if results is not None:
            results.write(to_json(result_row(index, rows[index], outputs[index])) + "\n")
    return outputs


def prepare_rows(llm: LLM, rows: Sequence[Row]) -> list[Samples]:
    """Returns the requests of all rows, checked before any of them runs."""
    prepared = []
    for index, row in enumerate(rows):
        with usage_errors(f"prompt {index}: "):
            params = llm.default_params.replace(row.fields)
            if row.kind == "chat":
                prepared.append(llm.prepare_chat(row.asked, params, row.template))
            else:
                prepared.append(llm.prepare(row.asked, params))
    return prepared


class Shown:
    """Texts on stdout as they come, in input order.

    One output is written alone. Several run together; each is headed by its index and prompt, and
    one whose turn has not come is held back.
    """

    def __init__(self, rows: Sequence[Row], prepared: Sequence[Samples]) -> None:
        self._order = [
            (i, n) for i, (requests, _) in enumerate(prepared) for n in range(len(requests))
        ]
        self._held = dict.fromkeys(self._order, "")
        if len(self._order) > 1:
            for index, sample in self._order:
                several = len(prepared[index][0]) > 1
                name = f"{index}.{sample}" if several else f"{index}"
                self._held[index, sample] = f"[{name}] {said(rows[index])}"
        self._ended: set[tuple[int, int]] = set()
        self._turn = 0

    def add(self, index: int, sample: int, text: str, ended: bool) -> None:
        """Takes what came for one output, and writes what may be written now."""
        self._held[index, sample] += text
        if ended:
            self._held[index, sample] += "\n"
            self._ended.add((index, sample))
        while self._turn < len(self._order):
            key = self._order[self._turn]
            sys.stdout.write(self._held[key])
            self._held[key] = ""
            if key not in self._ended:
                break
            self._turn += 1
        sys.stdout.flush()


def said(row: Row) -> str:
    """Returns what heads a row's text: its prompt, or what was last said in a chat."""
    if row.kind == "chat":
        return f"{row.asked[-1].get('content')}\n"
    return f"{row.asked}"


def write_scores(llm: LLM | None, rows: Sequence[Row], results: Writer) -> None:
    """Writes one line a pair: its tokens, their log-probabilities, the sum, and if it is greedy."""
    with usage_errors():
        scores = llm.score([row.asked for row in rows], FLAGS.progress) if llm else []
    for index, score in enumerate(scores):
        results.write(to_json({"index": index, **dataclasses.asdict(score)}) + "\n")


def result_row(index: int, row: Row, result: RequestOutput) -> dict[str, Any]:
    """Returns the output row of one request; of several outputs, each has a place in "outputs"."""
    key = "messages" if row.kind == "chat" else "prompt"
    fields: dict[str, Any] = {"index": index, key: row.asked}
    completions = [completion_row(completion) for completion in result.outputs]
    fields |= completions[0] if len(completions) == 1 else {"outputs": completions}
    if result.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [position_row(position) for position in result.prompt_logprobs]
    fields["seed"] = result.seed
    if result.metrics is not None:
        fields["metrics"] = dataclasses.asdict(result.metrics)
    return fields


def completion_row(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [position_row(position) for position in completion.logprobs]
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

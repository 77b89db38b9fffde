# SPDX-License-Identifier: Apache-2.0
"""Generates text from prompts.

    python -m scripts.generate --model=M (--prompt=TEXT ... | --input=F.jsonl|F.txt|-)
        [--chat | --score | --embed] [--output=F.jsonl] [--report=F.json]
    python -m scripts.generate --model=M --explain

Without --output the texts are streamed to stdout; a summary goes to stderr. Interrupted, it writes
what is finished. A line of F.jsonl is {"prompt": text or ids}, {"messages": [...]} for a chat, or,
with --score, {"context": ..., "continuation": ...}; and any sampling field, which wins over flags.
With --embed, each prompt gives a vector.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from absl import flags

from engine import LLM, RequestOutput
from engine.api import POOLINGS, Samples, merge_samples
from engine.config import EngineConfig
from engine.metrics import summarize
from scripts.command_line import (
    ENGINE_OPTIONS,
    Interrupted,
    UsageError,
    define_engine_flags,
    given,
    make_cpu_devices,
    replaced_file,
    run_command,
    to_json,
    usage_errors,
)
from scripts.explain import explain
from scripts.prompts import UNSAMPLED, Row, read_rows
from scripts.replicas import check_replicas, join_parts, part_name, wait_for_leaders
from scripts.results import print_summary, result_row
from scripts.sampling_flags import define_sampling_flags, given_fields
from sharding.processes import Group, LostProcess, group_of

MODES = ("chat", "score", "embed")


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
    switch("embed", False, "Write a vector a prompt, of its hidden states.")
    flags.DEFINE_enum(
        "pooling", "mean", list(POOLINGS), "embed: of which states.", flag_values=values
    )
    switch("normalize", False, "embed: make each vector's length 1.")
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
        group = group_of(EngineConfig(model=model, **options).replicas)
    make_cpu_devices(options.get("mesh", ""), group.size)
    mode = chosen_mode()
    if not FLAGS.explain:
        check_replicas(group, FLAGS.output, FLAGS.input)
    if group.rank > 0:
        with usage_errors(), LLM(model, **options) as llm:
            llm.follow()
    elif FLAGS.explain:
        with usage_errors(), LLM(model, **options) as llm:
            print("\n".join(explain(llm)))
    else:
        lead(model, options, mode, group)


def lead(model: str, options: dict[str, Any], mode: str, group: Group) -> None:
    """Runs this replica's share of the rows, and writes the results."""
    rows = read_rows(FLAGS.prompt, FLAGS.input, sampling_fields(mode), mode)
    share = range(len(rows))[group.number :: group.count]
    outputs: dict[int, RequestOutput] = {}
    lost: LostProcess | None = None
    with contextlib.ExitStack() as files:
        # Opened before the model, so that a wrong path costs no work.
        results, summary = (
            files.enter_context(replaced_file(flag, part_name(path, group))) if path else None
            for flag, path in {"output": FLAGS.output, "report": FLAGS.report}.items()
        )
        started = time.monotonic()
        llm = None
        if rows or group.size > 1:
            with usage_errors():
                llm = files.enter_context(LLM(model, **options))
        start_s = time.monotonic() - started
        if llm is not None and mode in UNSAMPLED:
            write = write_scores if mode == "score" else write_vectors
            write(llm, {index: rows[index].asked for index in share}, results or sys.stdout)
        elif llm is not None:
            prepared = prepare_rows(llm, rows, share)
            wait_for_leaders(group)
            outputs, lost = run_rows(llm, rows, prepared, results)
        if mode not in UNSAMPLED:
            figures = summarize(list(outputs.values()), time.monotonic() - started - start_s)
            stats = {} if llm is None else llm.engine.stats()
            print_summary(figures, stats, start_s)
            if summary is not None:
                whole = {"model": model, "options": options, "start_s": start_s}
                summary.write(to_json(whole | {"summary": figures, "engine": stats}) + "\n")
    if lost is not None:
        raise lost
    join_parts(group, FLAGS.output, FLAGS.report)
    if mode not in UNSAMPLED and len(outputs) < len(share):
        raise Interrupted(f"{len(outputs)} of {len(share)} requests were finished")


def chosen_mode() -> str:
    """Returns what the flags ask for: "prompt", or one of MODES."""
    asked = [mode for mode in MODES if FLAGS[mode].value]
    if len(asked) > 1:
        names = " and ".join(f"--{mode}" for mode in asked)
        raise UsageError(f"{names} do not go together; give one of them")
    mode = asked[0] if asked else "prompt"
    if FLAGS.report and mode in UNSAMPLED:
        raise UsageError(f"--report is of generated text; leave it out with --{mode}")
    return mode


def sampling_fields(mode: str) -> dict[str, Any]:
    """Returns the sampling fields of the flags; raises UsageError where none plays a part."""
    fields = given_fields(FLAGS)
    if mode not in UNSAMPLED:
        return fields
    if asked := [name for name in fields if FLAGS[name].present]:
        raise UsageError(f"--{asked[0]} plays no part with --{mode}; leave it out")
    return {}


def run_rows(
    llm: LLM, rows: Sequence[Row], prepared: dict[int, Samples], results: Writer | None
) -> tuple[dict[int, RequestOutput], LostProcess | None]:
    """Runs what is prepared, and writes what finished: all, unless it is interrupted.

    Or a process is lost, which is returned too.
    """
    lost = None
    shown = Shown(rows, prepared) if results is None else None
    outputs: dict[int, RequestOutput] = {}
    ended: dict[int, list[RequestOutput]] = {index: [] for index in prepared}
    running = {}
    try:
        for index, (requests, text) in prepared.items():
            for request in requests:
                with usage_errors(f"prompt {index}: "):
                    added = llm.engine.add_request(request, text, streams=shown is not None)
                    running[added] = index
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
                sys.stderr.write(f"\r{len(outputs)}/{len(prepared)} requests")
    except KeyboardInterrupt:
        pass  # what is finished is written, and the caller says that it is not all
    except LostProcess as error:
        lost = error
    finally:
        if shown is None and FLAGS.progress:
            sys.stderr.write("\n")
    for index in sorted(outputs):
        if results is not None:
            results.write(to_json(result_row(index, rows[index], outputs[index])) + "\n")
    return outputs, lost


def prepare_rows(llm: LLM, rows: Sequence[Row], share: Sequence[int]) -> dict[int, Samples]:
    """Returns the requests of the rows of `share`, checked before any of them runs."""
    prepared = {}
    for index in share:
        row = rows[index]
        with usage_errors(f"prompt {index}: "):
            params = llm.default_params.replace(row.fields)
            if row.kind == "chat":
                prepared[index] = llm.prepare_chat(row.asked, params, row.template)
            else:
                prepared[index] = llm.prepare(row.asked, params)
    return prepared


class Shown:
    """Texts on stdout as they come, in input order.

    One output is written alone. Several run together; each is headed by its index and prompt, and
    one whose turn has not come is held back.
    """

    def __init__(self, rows: Sequence[Row], prepared: dict[int, Samples]) -> None:
        self._order = [
            (i, n) for i, (requests, _) in prepared.items() for n in range(len(requests))
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


def write_scores(llm: LLM, pairs: dict[int, Any], results: Writer) -> None:
    """Writes one line a pair: its tokens, their log-probabilities, the sum, and if it is greedy.

    `pairs`, and `prompts` below: by their indices.
    """
    with usage_errors():
        scores = llm.score(list(pairs.values()), FLAGS.progress)
    for index, score in zip(pairs, scores, strict=True):
        results.write(to_json({"index": index, **dataclasses.asdict(score)}) + "\n")


def write_vectors(llm: LLM, prompts: dict[int, Any], results: Writer) -> None:
    """Writes one line a prompt: its vector."""
    with usage_errors():
        asked = list(prompts.values())
        vectors = llm.embed(asked, FLAGS.pooling, FLAGS.normalize, FLAGS.progress)
    for index, vector in zip(prompts, vectors, strict=True):
        results.write(to_json({"index": index, "embedding": vector.tolist()}) + "\n")


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, or 2 with one line on stderr that names the fault and the remedy."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

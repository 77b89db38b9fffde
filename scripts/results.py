# SPDX-License-Identifier: Apache-2.0
"""What the command writes: a row of JSON for each request, and a run's figures."""

import dataclasses
import sys
from typing import Any

from engine import RequestOutput
from engine.request import CompletionOutput, Logprob
from scripts.prompts import Row


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

# SPDX-License-Identifier: Apache-2.0
"""The promise of `deterministic=True`, tried at each start before anybody relies on it."""

import functools
import uuid
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from engine.loop import Engine
from engine.params import SamplingParams
from engine.request import Request

_LENGTHS = (5, 1, 70, 17, 33)
_NEW_TOKENS = 4


def check_rows(engine: Engine, vocabulary: int, rows: int, max_model_len: int) -> None:
    """Raises ValueError unless a few requests give the same bits in any rows, and alone."""
    rng = np.random.default_rng(0)
    longest = max_model_len - _NEW_TOKENS
    if longest < 1:
        return
    lengths = [min(length, longest) for length in _LENGTHS[:rows]]
    prompts = [rng.integers(0, vocabulary, length).tolist() for length in lengths]
    orders = [range(len(prompts)), reversed(range(len(prompts)))]
    orders += [[index] for index in range(len(prompts))]
    # In a space of its own, since each run is to compute all of it.
    spaces = [f"check {index} {uuid.uuid4().hex}" for index in range(len(orders))]
    together, *runs = map(functools.partial(_run, engine, prompts), orders, spaces)
    for run in runs:
        if any(together[index] != result for index, result in run.items()):
            raise ValueError(
                f"deterministic=True: on {jax.devices()[0].device_kind} a row's numbers depend on "
                "its place in the batch; leave the setting out"
            )
    engine.clear_cache(spaces)


def _run(
    engine: Engine, prompts: Sequence[list[int]], order: Iterable[int], space: str
) -> dict[int, tuple]:
    """Returns {index: tokens and log-probabilities} of the prompts, which run together."""
    params = SamplingParams(max_tokens=_NEW_TOKENS, logprobs=1)
    running: dict[int, int] = {}
    results: dict[int, tuple] = {}
    for index in order:
        ids = prompts[index]
        request = Request(
            prompt_token_ids=ids,
            params=params,
            limit=len(ids) + _NEW_TOKENS,
            seed=index,
            cache_space=space,
        )
        running[engine.add_request(request)] = index
    while len(results) < len(running):
        for delta in engine.step():
            if delta.output is not None:
                [completion] = delta.output.outputs
                ids, entries = completion.token_ids, completion.logprobs or []
                values = [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]
                results[running[delta.request_id]] = ids, values
    return results

# SPDX-License-Identifier: Apache-2.0
"""The definitions of times, on timelines short enough to work out by hand."""

import random

import numpy as np
import pytest

from engine.metrics import percentile, request_metrics, summarize
from engine.params import SamplingParams
from engine.request import CompletionOutput, Request, RequestOutput


def make_request(times, first=1.5, **fields):
    return Request(
        id=0,
        prompt_token_ids=[1, 2],
        params=SamplingParams(),
        limit=20,
        seed=0,
        arrival_s=1.0,
        first_scheduled_s=first,
        token_times=times,
        **fields,
    )


def make_output(times, reason="length"):
    tokens = list(range(len(times)))
    return RequestOutput(
        request_id=0,
        prompt=None,
        prompt_token_ids=[1, 2],
        prompt_logprobs=None,
        outputs=[CompletionOutput(0, "", tokens, None, reason, None)],
        metrics=request_metrics(make_request(times)),
        finished=True,
        seed=0,
    )


def test_times_of_a_request():
    metrics = request_metrics(make_request([2.0, 2.5, 4.0], preemptions=2, cached_tokens=1))
    assert metrics.queue_s == 0.5
    assert metrics.ttft_s == 1.0
    assert metrics.tpot_s == 1.0
    assert metrics.itl_s == [0.5, 1.5]
    assert metrics.e2e_s == 3.0
    assert (metrics.cached_tokens, metrics.preemptions) == (1, 2)
    assert metrics.e2e_s == metrics.ttft_s + 2 * metrics.tpot_s


def test_one_token_has_no_time_per_token():
    metrics = request_metrics(make_request([2.0]))
    assert (metrics.ttft_s, metrics.tpot_s, metrics.itl_s, metrics.e2e_s) == (1.0, None, [], 1.0)


def test_no_token_has_no_first_token_and_no_step_no_queue():
    metrics = request_metrics(make_request([], first=None, finished_s=3.0))
    assert (metrics.queue_s, metrics.ttft_s, metrics.tpot_s, metrics.e2e_s) == (None,) * 3 + (2.0,)


def test_percentiles_are_those_of_numpy():
    rng = random.Random(0)
    for n in (1, 2, 3, 10, 101):
        values = [rng.random() for _ in range(n)]
        for share in (0, 5, 50, 95, 99.9, 100):
            expected = np.percentile(values, share)
            assert percentile(values, share) == pytest.approx(expected, rel=1e-12)
    assert percentile([], 50) is None
    with pytest.raises(ValueError, match="share=101 must be from 0 to 100"):
        percentile([1.0], 101)


def test_summary_of_a_run():
    outputs = [make_output([2.0, 3.0]), make_output([3.0]), make_output([9.0], "abort")]
    summary = summarize(outputs, 2.0)
    assert summary == {
        "requests": 3,
        "failed": 1,
        "prompt_tokens": 6,
        "output_tokens": 4,
        "elapsed_s": 2.0,
        "output_tokens_per_s": 2.0,
        "ttft_s": {"p50": 1.5, "p95": pytest.approx(1.95)},
        "tpot_s": {"p50": 1.0, "p95": 1.0},
    }


def test_summary_of_nothing():
    summary = summarize([], 0.0)
    assert summary["output_tokens_per_s"] is None
    assert summary["ttft_s"] == {"p50": None, "p95": None}

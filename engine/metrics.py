# SPDX-License-Identifier: Apache-2.0
"""Times of requests and of a run: one place for every definition."""

from collections.abc import Sequence
from typing import Any

from engine.request import Request, RequestMetrics, RequestOutput

FAILED = ("abort", "error")  # ends that say nothing about speed


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the `share` (0 to 100) percentile, linear between neighbours; None of nothing."""
    if not 0 <= share <= 100:
        raise ValueError(f"share={share} must be from 0 to 100; the median is 50")
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def request_metrics(request: Request) -> RequestMetrics:
    """Returns the times of `request` from its time stamps.

    With arrival t_a and token times t_1..t_n: TTFT = t_1 - t_a, TPOT = (t_n - t_1) / (n - 1),
    ITL = the gaps, E2E = t_n - t_a, so that E2E = TTFT + (n - 1) TPOT.
    """
    times, arrival = request.token_times, request.arrival_s
    end = times[-1] if times else request.finished_s
    started = request.first_scheduled_s
    return RequestMetrics(
        queue_s=None if started is None else started - arrival,
        ttft_s=times[0] - arrival if times else None,
        tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        itl_s=[after - before for before, after in zip(times, times[1:], strict=False)],
        e2e_s=None if end is None else end - arrival,
        cached_tokens=request.cached_tokens or 0,
        preemptions=request.preemptions,
    )


def summarize(outputs: Sequence[RequestOutput], elapsed_s: float) -> dict[str, Any]:
    """Returns a run's figures: counts, output tokens a second, TTFT and TPOT at p50 and p95.

    Percentiles are over the requests that were not aborted and did not fail; requests of one
    token have no TPOT. A figure without data is None.
    """
    good = [o for o in outputs if not any(c.finish_reason in FAILED for c in o.outputs)]
    tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    times = [o.metrics for o in good if o.metrics is not None]
    summary: dict[str, Any] = {
        "requests": len(outputs),
        "failed": len(outputs) - len(good),
        "prompt_tokens": sum(len(o.prompt_token_ids) for o in outputs),
        "output_tokens": tokens,
        "elapsed_s": elapsed_s,
        "output_tokens_per_s": tokens / elapsed_s if elapsed_s > 0 else None,
    }
    for name in ("ttft_s", "tpot_s"):
        values = [v for m in times if (v := getattr(m, name)) is not None]
        summary[name] = {f"p{share}": percentile(values, share) for share in (50, 95)}
    return summary

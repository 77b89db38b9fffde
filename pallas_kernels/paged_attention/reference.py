# SPDX-License-Identifier: Apache-2.0
"""The specification of paged attention: one query at a time, in float64 NumPy."""

import numpy as np


def paged_attention_reference(
    q_BTNH, pool, rows, window, *, scale, softcap=None, sinks_N=None, values=None
):
    """Returns float64 [B, T, N, V]; tokens beyond a row's count are zero. See `Rows`."""
    q_BTNH, pool = np.asarray(q_BTNH, np.float64), np.asarray(pool, np.float64)
    B, T, N, H = q_BTNH.shape
    _, K, W, _ = pool.shape
    first, last = values or (H, 2 * H)
    out = np.zeros((B, T, N, last - first))
    for b in range(B):
        start, count = int(rows.start_B[b]), int(rows.count_B[b])
        pages = np.asarray(rows.table_BJ[b])
        for t in range(count):
            depth = t if rows.depth_BT is None else int(rows.depth_BT[b, t])
            seen = [c for c in range(start) if start + depth - c < window]
            for j in range(count):
                if rows.ancestors_BT is None:
                    visible, distance = j <= t, t - j
                else:
                    visible = bool((int(rows.ancestors_BT[b, t]) >> j) & 1)
                    distance = depth - int(rows.depth_BT[b, j])
                if visible and distance < window:
                    seen.append(start + j)
            cells = np.array(seen)
            kv = pool[pages[cells // W], :, cells % W]  # [S, K, 2H]
            for n in range(N):
                logits = kv[:, n // (N // K), :H] @ q_BTNH[b, t, n] * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                sink = -np.inf if sinks_N is None else float(sinks_N[n])
                high = max(logits.max(), sink)
                weights = np.exp(logits - high)
                total = weights.sum() + np.exp(sink - high)
                out[b, t, n] = (weights / total) @ kv[:, n // (N // K), first:last]
    return out

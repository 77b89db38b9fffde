# SPDX-License-Identifier: Apache-2.0
"""The specification of attention over a run of cells, in float64 NumPy."""

import numpy as np


def flash_attention_reference(
    q_TNH,
    cell_SKC,
    place_T,
    place_S,
    window,
    *,
    scale,
    softcap=None,
    sinks_N=None,
    values=None,
    first=0,
):
    """Returns (out_TNV, lse_TN), float64; the log-sum-exp of nothing is -inf, and its output 0."""
    q_TNH, cell_SKC = np.asarray(q_TNH, np.float64), np.asarray(cell_SKC, np.float64)
    (T, N, H), K = q_TNH.shape, cell_SKC.shape[1]
    begin, end = values or (H, 2 * H)
    out_TNV, lse_TN = np.zeros((T, N, end - begin)), np.full((T, N), -np.inf)
    for t in range(T):
        distance_S = int(place_T[t]) - np.asarray(place_S)
        seen = (distance_S >= 0) & (distance_S < window) & (np.asarray(place_S) >= first)
        cells = cell_SKC[seen]
        for n in range(N):
            head = n // (N // K)
            logits = cells[:, head, :H] @ q_TNH[t, n] * scale
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            sink = -np.inf if sinks_N is None else float(sinks_N[n])
            high = np.max(logits, initial=sink)
            if np.isneginf(high):
                continue
            weights = np.exp(logits - high)
            total = weights.sum() + np.exp(sink - high)
            out_TNV[t, n] = (weights / total) @ cells[:, head, begin:end]
            lse_TN[t, n] = high + np.log(total)
    return out_TNV, lse_TN

# SPDX-License-Identifier: Apache-2.0
"""The specification of ring attention: all tokens on one device, in float64 NumPy."""

import numpy as np


def ring_attention_reference(
    q_TNH, k_TKH, v_TKV, window, *, scale, softcap=None, sinks_N=None, first=0
):
    """Returns float64 [T, N, V]: causal attention among the tokens of a run from `first` on."""
    q_TNH, k_TKH, v_TKV = (np.asarray(x, np.float64) for x in (q_TNH, k_TKH, v_TKV))
    T, N, _ = q_TNH.shape
    K = k_TKH.shape[1]
    out_TNV = np.zeros((T, N, v_TKV.shape[-1]))
    for t in range(first, T):
        seen = np.arange(max(first, t - window + 1), t + 1)
        for n in range(N):
            logits = k_TKH[seen, n * K // N] @ q_TNH[t, n] * scale
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            sink = -np.inf if sinks_N is None else float(sinks_N[n])
            high = max(logits.max(), sink)
            weights = np.exp(logits - high)
            total = weights.sum() + np.exp(sink - high)
            out_TNV[t, n] = (weights / total) @ v_TKV[seen, n * K // N]
    return out_TNV

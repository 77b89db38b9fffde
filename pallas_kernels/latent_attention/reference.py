# SPDX-License-Identifier: Apache-2.0
"""The specification of latent attention: one query at a time, in float64 NumPy."""

import numpy as np

from pallas_kernels.paged_attention.reference import Found, dequantized, seen_cells


def latent_attention_reference(
    q_BTNC, pages, rows, window, *, rank, scale, softcap=None, sinks_N=None
) -> Found:
    """Returns what each query gets from the cells that it sees: `rank` numbers of a latent."""
    q_BTNC = np.asarray(q_BTNC, np.float64)
    B, T, N, C = q_BTNC.shape
    pool_PWC = dequantized(pages, rank)[:, 0, :, :C]
    W = pool_PWC.shape[1]
    found = Found(
        np.zeros((B, T, N, rank)),
        np.full((B, T, N), -np.inf),
        np.zeros((B, 1, rows.table_BJ.shape[1] * W)),
    )
    for b in range(B):
        table = np.asarray(rows.table_BJ[b])
        for t in range(int(rows.count_B[b])):
            cells = np.array(seen_cells(rows, b, t, window))
            latent_SR, rope_SX = np.split(pool_PWC[table[cells // W], cells % W], [rank], axis=1)
            for n in range(N):
                plain, rope = np.split(q_BTNC[b, t, n], [rank])
                logits = (latent_SR @ plain + rope_SX @ rope) * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                sink = -np.inf if sinks_N is None else float(sinks_N[n])
                lse = np.logaddexp.reduce([*logits, sink])
                weights = np.exp(logits - lse)
                found.out[b, t, n] = weights @ latent_SR
                found.lse[b, t, n] = lse
                found.mass[b, 0, cells] += weights
    return found

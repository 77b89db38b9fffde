# SPDX-License-Identifier: Apache-2.0
"""The specification of paged attention: one query at a time, in float64 NumPy."""

from typing import NamedTuple

import numpy as np


class Found(NamedTuple):
    """What attention gives, float64: out [B, T, N, V], zero beyond a row's count; the log-sum-exp
    of each query's logits [B, T, N], -inf of none; the weights that cells get, [B, K, J * W]."""

    out: np.ndarray
    lse: np.ndarray
    mass: np.ndarray


def paged_attention_reference(
    q_BTNH, pages, rows, window, *, scale, softcap=None, sinks_N=None, values=None
) -> Found:
    """Returns what each query gets from the cells that it sees. See `Rows` and `Pages`."""
    q_BTNH = np.asarray(q_BTNH, np.float64)
    B, T, N, H = q_BTNH.shape
    first, last = values or (H, 2 * H)
    pool = dequantized(pages, first or last)
    _, K, W, _ = pool.shape
    found = Found(
        np.zeros((B, T, N, last - first)),
        np.full((B, T, N), -np.inf),
        np.zeros((B, K, rows.table_BJ.shape[1] * W)),
    )
    for b in range(B):
        table = np.asarray(rows.table_BJ[b])
        for t in range(int(rows.count_B[b])):
            cells = np.array(seen_cells(rows, b, t, window), int)
            where = table[cells // W], slice(None), cells % W
            kv = pool[where]  # [S, K, C]
            for n in range(N):
                head = n // (N // K)
                logits = kv[:, head, :H] @ q_BTNH[b, t, n] * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                if pages.bias_PKW is not None:
                    logits = logits + np.asarray(pages.bias_PKW, np.float64)[where][:, head]
                sink = -np.inf if sinks_N is None else float(sinks_N[n])
                high = np.max(logits, initial=sink)
                if np.isneginf(high):
                    continue
                weights = np.exp(logits - high)
                total = weights.sum() + np.exp(sink - high)
                found.out[b, t, n] = (weights / total) @ kv[:, head, first:last]
                found.lse[b, t, n] = high + np.log(total)
                found.mass[b, head, cells] += weights / total
    return found


def dequantized(pages, split: int) -> np.ndarray:
    """Returns the numbers of all cells, float64 [P, K, W, C]."""
    numbers = np.asarray(pages.cells).astype(np.float64)
    if pages.scale_PK2W is None:
        return numbers
    scales = np.asarray(pages.scale_PK2W, np.float64)
    before, behind = numbers[..., :split], numbers[..., split:]
    scaled = before * scales[:, :, 0, :, None], behind * scales[:, :, 1, :, None]
    return np.concatenate(scaled, axis=-1)


def seen_cells(rows, b: int, t: int, window: int) -> list[int]:
    """Returns the cells that query t of row b sees."""
    start, count = int(rows.start_B[b]), int(rows.count_B[b])
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
    return [cell for cell in seen if rows.end_B is None or cell < int(rows.end_B[b])]

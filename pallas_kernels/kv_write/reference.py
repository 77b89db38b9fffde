# SPDX-License-Identifier: Apache-2.0
"""The specification of writing cells: one number after the other, in NumPy."""

import numpy as np


def kv_write_reference(pages, cell_TKC, page_T, offset_T, split=None):
    """Returns (cells, scale_PK2W or None, bias_PKW or None); what page 0 holds means nothing."""
    cells = np.array(pages.cells)
    scales = None if pages.scale_PK2W is None else np.array(pages.scale_PK2W)
    bias = None if pages.bias_PKW is None else np.array(pages.bias_PKW)
    for t in range(len(page_T)):
        page, offset = int(page_T[t]), int(offset_T[t])
        for head in range(cells.shape[1]):
            numbers = np.asarray(cell_TKC[t, head], np.float32)
            numbers = np.where(np.isfinite(numbers), numbers, np.float32(0))
            if scales is not None:
                numbers, scales[page, head, :, offset] = _codes(numbers, split, cells.dtype)
            cells[page, head, offset, : len(numbers)] = numbers.astype(cells.dtype)
            cells[page, head, offset, len(numbers) :] = 0
            if bias is not None:
                bias[page, head, offset] = 0
    return cells, scales, bias


def _codes(numbers, split, dtype):
    """Returns (codes, two scales) of a cell."""
    most = np.float32(127 if dtype == np.int8 else 448)  # 448: the largest float8_e4m3fn
    parts, scales = [], []
    for part in (numbers[:split], numbers[split:]):
        scale = np.max(np.abs(part), initial=np.float32(0)) / most
        code = part / (scale if scale > 0 else np.float32(1))
        parts.append(np.clip(np.round(code) if dtype == np.int8 else code, -most, most))
        scales.append(scale)
    return np.concatenate(parts), scales

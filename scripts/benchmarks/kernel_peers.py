# SPDX-License-Identifier: Apache-2.0
"""jax's own kernels of the same purpose as ours, for the suite kernels.

A peer has the numbers of our arguments in the layout that it wants; putting them into it is not
measured. One that does not do what a shape asks for says why.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from jax.experimental.pallas.ops.gpu import decode_attention as gpu_decode
from jax.experimental.pallas.ops.gpu import paged_attention as gpu_paged
from jax.experimental.pallas.ops.tpu import flash_attention as tpu_flash
from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox_gmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as tpu_paged
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from pallas_kernels.backends import VMEM_BYTES, choose
from pallas_kernels.paged_attention.rows import NO_WINDOW
from pallas_kernels.pages import gather_pages
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, centered

SCALE = 0.1  # of logits, as in all cases of attention
BLOCK_CELLS = 512  # of a TPU's block, as wide as our own
GPU_BLOCK_CELLS = 128


class Declines(Exception):
    """A peer does not do what a shape asks for."""


class Peer(NamedTuple):
    """How another kernel does our call: `call(*arrange(*arguments))` gives our first result."""

    arrange: Callable[..., tuple[Any, ...]]
    call: Callable[..., Any]


def need(condition: bool, reason: str) -> None:
    """Raises Declines for what a peer cannot do."""
    if not condition:
        raise Declines(reason)


def plain_pages(shape: Any, *, window: bool = False) -> None:
    """Raises Declines for pages that peers do not read."""
    need(shape.codes is None, "its codes have no scale for each cell")
    need(not shape.tree, "it knows no trees")
    need(window or shape.window == NO_WINDOW, "it knows no windows")


def ragged_paged(shape: Any) -> Peer:
    """Returns jax's ragged paged attention: chunks and decodes over pages, heads by token."""
    plain_pages(shape, window=True)
    B, T, H = shape.rows, shape.width, shape.head_width

    def arrange(q_BTNH: Any, pages: Any, rows: Any, window: Any) -> tuple[Any, ...]:
        P, K, W, _ = pages.cells.shape
        cells = pages.cells[..., : 2 * H].reshape(P, K, W, 2, H)
        kv_pages = cells.transpose(0, 2, 1, 3, 4).reshape(P, W, 2 * K, H)
        ends = jnp.arange(B + 1, dtype=jnp.int32) * T
        lengths, count = rows.start_B + rows.count_B, jnp.full((1,), B, jnp.int32)
        return q_BTNH.reshape(B * T, -1, H), kv_pages, lengths, rows.table_BJ, ends, count

    def call(*arguments: Any) -> Any:
        window = None if shape.window == NO_WINDOW else shape.window
        given = {"sm_scale": SCALE, "sliding_window": window, "soft_cap": shape.softcap}
        return ragged_paged_attention(*arguments, **given, **ragged_blocks(shape)).reshape(
            B, T, -1, H
        )

    return Peer(arrange, call)


def ragged_blocks(shape: Any) -> dict[str, int]:
    """Returns the block sizes to name: none on a TPU, where the kernel has a table of its own.

    The table goes by the device at hand; compiled for one that is not there, a kernel gets what it
    falls back on for contexts of 4,096. Its default limit of vector memory is too low for both.
    """
    device = jax.devices()[0]
    if device.platform == "tpu":
        room = choose("auto", device.platform, device.device_kind).vmem_bytes
        return {"vmem_limit_bytes": room * 15 // 16}
    pages = min(4096, shape.context) // shape.page
    queries = min(32, shape.rows * shape.width)
    return {
        "vmem_limit_bytes": VMEM_BYTES["v5p"] * 15 // 16,  # the least of those compiled for
        "num_kv_pages_per_block": pages,
        "num_queries_per_block": queries,
    }


def halves(shape: Any, pages: Any) -> list[Any]:
    """Returns keys and values of pages apart, [K, P, W, H] each."""
    H = shape.head_width
    return [pages.cells[..., at : at + H].transpose(1, 0, 2, 3) for at in (0, H)]


def paged_tpu(shape: Any) -> Peer:
    """Returns jax's paged attention for TPU: decodes."""
    plain_pages(shape)
    need(shape.width == 1, "it does decodes only")
    block = max(1, min(BLOCK_CELLS, shape.context) // shape.page)

    def arrange(q_BTNH: Any, pages: Any, rows: Any, window: Any) -> tuple[Any, ...]:
        return q_BTNH[:, 0], *halves(shape, pages), rows.start_B + 1, rows.table_BJ

    def call(q_BNH: Any, *others: Any) -> Any:
        out_BNH = tpu_paged(
            (q_BNH * SCALE).astype(q_BNH.dtype),  # it does not scale
            *others,
            pages_per_compute_block=block,
            attn_logits_soft_cap=shape.softcap,
        )
        return out_BNH[:, None]

    return Peer(arrange, call)


def paged_gpu(shape: Any, *, interpret: bool = False) -> Peer:
    """Returns jax's paged attention for GPU: decodes."""
    plain_pages(shape)
    need(shape.width == 1, "it does decodes only")
    pages = shape.context // shape.page
    splits = max(d for d in (16, 8, 4, 2, 1) if pages % d == 0)

    def arrange(q_BTNH: Any, pages: Any, rows: Any, window: Any) -> tuple[Any, ...]:
        return q_BTNH[:, 0], *halves(shape, pages), rows.table_BJ, rows.start_B + 1

    def call(q_BNH: Any, *others: Any) -> Any:
        out_BNH = gpu_paged.paged_attention(
            (q_BNH * SCALE).astype(q_BNH.dtype),
            *others,
            pages_per_compute_block=max(1, GPU_BLOCK_CELLS // shape.page),
            k_splits=splits,
            attn_logits_soft_cap=shape.softcap,
            interpret=interpret,
        )
        return out_BNH[:, None]

    return Peer(arrange, call)


def decode_gpu(shape: Any, *, interpret: bool = False) -> Peer:
    """Returns jax's decode attention for GPU: one token a row, over cells in a row, no pages."""
    plain_pages(shape)
    need(shape.width == 1, "it does decodes only")
    need(shape.softcap is None, "it does not cap logits")
    H = shape.head_width

    def arrange(q_BTNH: Any, pages: Any, rows: Any, window: Any) -> tuple[Any, ...]:
        cells = gather_pages(pages.cells, rows.table_BJ)
        return q_BTNH[:, 0], cells[..., :H], cells[..., H : 2 * H], rows.start_B + 1

    def call(q_BNH: Any, k_BKSH: Any, v_BKSH: Any, length_B: Any) -> Any:
        # It has heads in front of cells itself; XLA drops the two swaps.
        k, v = (cells.swapaxes(1, 2) for cells in (k_BKSH, v_BKSH))
        out_BNH = gpu_decode.gqa(
            q_BNH, k, v, kv_seq_len=length_B, sm_scale=SCALE, interpret=interpret
        )
        return out_BNH[:, None]

    return Peer(arrange, call)


def plain_run(shape: Any) -> None:
    """Raises Declines for runs that peers do not do."""
    need(shape.latent is None, "its values are as wide as its keys")
    need(shape.queries == shape.cells, "its queries begin where its keys do")


def run_halves(shape: Any, cell_SKC: Any, *, repeated: bool) -> list[Any]:
    """Returns keys and values [S, K, H] or, repeated for each query head, [S, N, H]."""
    H, (N, K) = shape.head_width, shape.heads
    found = [cell_SKC[..., at : at + H] for at in (0, H)]
    return [jnp.repeat(half, N // K, axis=1) for half in found] if repeated else found


def flash_tpu(shape: Any) -> Peer:
    """Returns jax's flash attention for TPU, which has a KV head for each query head."""
    plain_run(shape)
    block = min(BLOCK_CELLS, shape.queries)
    sizes = tpu_flash.BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1)

    def arrange(q_TNH: Any, cell_SKC: Any, *_: Any) -> tuple[Any, ...]:
        arrays = q_TNH, *run_halves(shape, cell_SKC, repeated=True)
        return tuple(array.transpose(1, 0, 2)[None] for array in arrays)

    def call(*arguments: Any) -> Any:
        out = tpu_flash.flash_attention(*arguments, causal=True, sm_scale=SCALE, block_sizes=sizes)
        return out[0].transpose(1, 0, 2)

    return Peer(arrange, call)


def mha_gpu(shape: Any, *, interpret: bool = False) -> Peer:
    """Returns jax's attention for GPU, which has a KV head for each query head."""
    plain_run(shape)

    def arrange(q_TNH: Any, cell_SKC: Any, *_: Any) -> tuple[Any, ...]:
        return tuple(a[None] for a in (q_TNH, *run_halves(shape, cell_SKC, repeated=True)))

    def call(*arguments: Any) -> Any:
        mha = functools.partial(gpu_attention.mha, sm_scale=SCALE, causal=True)
        sizes = gpu_attention.BlockSizes(block_q=128, block_k=64)
        return mha(*arguments, None, block_sizes=sizes, interpret=interpret)[0]

    return Peer(arrange, call)


def cudnn(shape: Any, *, implementation: Any = "cudnn") -> Peer:
    """Returns cuDNN's attention, by way of jax.nn."""
    plain_run(shape)

    def arrange(q_TNH: Any, cell_SKC: Any, *_: Any) -> tuple[Any, ...]:
        return tuple(a[None] for a in (q_TNH, *run_halves(shape, cell_SKC, repeated=False)))

    def call(*arguments: Any) -> Any:
        return jax.nn.dot_product_attention(
            *arguments, scale=SCALE, is_causal=True, implementation=implementation
        )[0]

    return Peer(arrange, call)


def one_layer(x_SD: Any, weight: Any, layer: Any, sizes_E: Any) -> tuple[Any, ...]:
    """Returns the arguments of a product with the matrices of one layer."""
    return x_SD, weight[layer], sizes_E


def gmm(case: Any, *, interpret: bool = False) -> Peer:
    """Returns megablox's grouped product."""
    need(case.codes is None, "it multiplies no codes")
    S = sum(case.sizes)
    rows = next((size for size in (512, 256, 128, 64, 32, 16, 8) if S % size == 0), S)
    mean = -(-S // len(case.sizes))
    rows = min(rows, max(128, 1 << (mean - 1).bit_length()))
    # Its default, 128 of each, is far from its best.
    tiling = rows, min(1024, case.inputs), min(1024, case.outputs)

    def call(x_SD: Any, weight: Any, sizes_E: Any) -> Any:
        return megablox_gmm(
            x_SD, weight, sizes_E, jnp.float32, tiling, None, None, False, interpret
        )

    return Peer(one_layer, call)


def ragged_dot(case: Any) -> Peer:
    """Returns jax.lax's ragged dot, with the matrices of one layer."""
    need(case.codes is None, "it multiplies no codes")

    def call(x_SD: Any, weight: Any, sizes_E: Any) -> Any:
        return jax.lax.ragged_dot(x_SD, weight, sizes_E, preferred_element_type=jnp.float32)

    return Peer(one_layer, call)


def plain_matmul(case: Any) -> Peer:
    """Returns XLA's product with the matrix that the codes stand for, in the rows' dtype."""

    def arrange(x_TD: Any, weight: QuantizedWeight) -> tuple[Any, ...]:
        codes_FD, zeros_FG = centered(weight)
        (F, D), G = codes_FD.shape, weight.groups
        numbers = codes_FD.astype(jnp.float32).reshape(F, G, D // G)
        if zeros_FG is not None:
            numbers = numbers - zeros_FG[..., None]
        matrix_FD = (numbers * weight.scales[..., None]).reshape(F, D).astype(x_TD.dtype)
        return x_TD, matrix_FD

    def call(x_TD: Any, matrix_FD: Any) -> Any:
        contracted = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x_TD, matrix_FD, contracted, preferred_element_type=jnp.float32)

    return Peer(arrange, call)


PEERS: dict[str, dict[str, Mapping[str, Callable[[Any], Peer]]]] = {
    "tpu": {
        "paged_attention": {
            "jax ragged_paged_attention": ragged_paged,
            "jax paged_attention": paged_tpu,
        },
        "flash_attention": {"jax flash_attention": flash_tpu},
        "grouped_matmul": {"jax megablox gmm": gmm},
        "quantized_matmul": {"plain matmul": plain_matmul},
    },
    "gpu": {
        "paged_attention": {
            "jax paged_attention": paged_gpu,
            "jax decode_attention, no pages": decode_gpu,
        },
        "flash_attention": {"jax mha": mha_gpu, "cudnn": cudnn},
        "grouped_matmul": {"ragged_dot": ragged_dot},
        "quantized_matmul": {"plain matmul": plain_matmul},
    },
}

# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a step meet those of their sequences: pages are written, then attended over.

Letters: T tokens of a step or of one group's rows, flat; B rows of a group, U tokens a row; G page
groups, J pages a row, W cells a page; C numbers of a cell.
"""

import itertools

import jax
import jax.numpy as jnp

from engine.buckets import Group
from engine.kv import place_set, place_view
from engine.step_config import StepConfig
from engine.tokens import Tokens, own_tokens, ring_places
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import Rows, paged_attention
from pallas_kernels.pages import NULL_PAGE, Pages
from pallas_kernels.ring_attention import Past, ring_attention
from sharding import Axis
from sharding.layouts import order_of


def page_of_cells(tokens: Tokens, group: Group, page_size: int, stripes: Axis) -> jax.Array:
    """Returns page_GT, the page that each token's KV is written to.

    The null page if the token is idle, or its page is another device's of `stripes`: places of a
    table are dealt out in pages, as `paged_attention` has it.
    """
    index_GT = tokens.cell_GT // page_size
    place_GBU = (index_GT // stripes.ways).reshape(len(index_GT), group.rows, -1)
    J = tokens.rows_G.table_BJ.shape[-1]
    page_GBU = jnp.take_along_axis(
        tokens.rows_G.table_BJ, jnp.clip(place_GBU, 0, J - 1), axis=2, mode="promise_in_bounds"
    )
    own_GT = tokens.valid_T[None] & (index_GT % stripes.ways == stripes.here())
    return jnp.where(own_GT, page_GBU.reshape(tokens.cell_GT.shape), NULL_PAGE)


def paged_attend(cfg: StepConfig, body: tuple[Group, ...], parts: list[Tokens]):
    """Returns the `Attend` of a step: write this step's K and V, then attend over the pages."""
    W, stripes = cfg.layout.page_size, cfg.axis("sequence")
    page_GT = jnp.concatenate(
        [page_of_cells(t, group, W, stripes) for t, group in zip(parts, body, strict=True)], axis=1
    )
    offset_GT = jnp.concatenate([t.cell_GT % W for t in parts], axis=1)
    tables = [t.rows_G for t in parts]
    if cfg.model.stages > 1:  # a group of null pages, for turns of a stage without a layer
        page_GT, offset_GT = one_more(page_GT), one_more(offset_GT)
        tables = [
            r._replace(table_BJ=one_more(r.table_BJ), start_B=one_more(r.start_B)) for r in tables
        ]
    layout = cfg.layout
    ends = list(itertools.accumulate(own_tokens(group, cfg) for group in body))
    owns = [slice(first, last) for first, last in itertools.pairwise([0, *ends])]
    offsets = [t.offset for t in parts]

    @jax.jit  # unrolled layers share one trace
    def store_and_attend(array, q_TNH, cell_TKC, sinks_N, page_T, offset_T, window, group_rows):
        # All that is new before anyone looks: what is read and then written would be copied.
        for group, own in zip(body, owns, strict=True):
            # Those of a ring come page by page, whatever its layout.
            run = W if group.kind == "ring" else group.width
            array = write(array, cell_TKC[own], page_T[own], offset_T[own], run, cfg)
        outputs = []
        for group, rows, own, offset in zip(body, group_rows, owns, offsets, strict=True):
            if offset is not None:
                array, out_TNV = ring_attend(
                    cfg, group, offset, array, q_TNH[own], cell_TKC[own], sinks_N, window, rows
                )
                outputs.append(out_TNV)
                continue
            q_BUNH = q_TNH[own].reshape(group.rows, group.width, *q_TNH.shape[1:])
            out_BUNV, _ = paged_attention(
                q_BUNH,
                Pages(array),
                rows,
                window,
                scale=cfg.model.attention_scale,
                softcap=cfg.model.attention_softcap,
                sinks_N=sinks_N,
                values=layout.values,
                stripes=stripes,
                backend=cfg.attention,
                operation="paged_attention" if layout.values[0] else "latent_attention",
            )
            outputs.append(out_BUNV.reshape(-1, *out_BUNV.shape[2:]))
        return array, jnp.concatenate(outputs)

    def attend(pool, layer, heads):
        array, offset = place_view(pool, layer.place)
        rows = [
            r._replace(table_BJ=r.table_BJ[layer.group] + offset, start_B=r.start_B[layer.group])
            for r in tables
        ]
        cell_TKC = heads.k_TKH
        if heads.v_TKY is not None:
            cell_TKC = jnp.concatenate([heads.k_TKH, heads.v_TKY], axis=-1)
        window = jnp.asarray(layer.window, jnp.int32)
        page_T, offset_T = page_GT[layer.group], offset_GT[layer.group]
        # The null page of a place is a page like others: only the very first is nobody's.
        page_T = jnp.where(page_T != NULL_PAGE, page_T + offset, NULL_PAGE)
        array, out_TNV = store_and_attend(
            array, heads.q_TNH, cell_TKC, heads.sinks_N, page_T, offset_T, window, rows
        )
        return place_set(pool, layer.place, array), out_TNV

    return attend


def write(
    array: jax.Array,
    cell_TKC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    run: int,
    cfg: StepConfig,
) -> jax.Array:
    """Returns the pages with new cells, whose tokens come in runs of `run`."""
    return kv_write(Pages(array), cell_TKC, page_T, offset_T, run=run, backend=cfg.attention).cells


def one_more(array: jax.Array) -> jax.Array:
    """Returns an array with zeros behind the last of its first axis."""
    return jnp.concatenate([array, jnp.zeros_like(array[:1])])


def ring_attend(
    cfg: StepConfig,
    group: Group,
    offset: jax.Array,
    array: jax.Array,
    q_TNH: jax.Array,
    cell_TKC: jax.Array,
    sinks_N: jax.Array | None,
    window: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, jax.Array]:
    """Returns (pages, out_TNV) of this device's tokens of a ring: among themselves, and over what
    was stored before.

    In layouts other than "striped" a token's page may be another device's: it is written there.
    """
    axis, W, layout = cfg.axis("sequence"), cfg.layout.page_size, cfg.layout
    places = ring_places(group, cfg)
    order_T = order_of(cfg.ring_layout, group.width, axis.ways, W)
    if cfg.ring_layout != "striped":
        array = write_run(array, axis.gather(cell_TKC, 0)[order_T], rows, offset, cfg)
    before = rows._replace(end_B=rows.start_B + offset)
    out_TNV = ring_attention(
        q_TNH,
        cell_TKC.astype(array.dtype),
        places,
        axis,
        window,
        scale=cfg.model.attention_scale,
        softcap=cfg.model.attention_softcap,
        sinks_N=sinks_N,
        values=layout.values,
        first=offset,
        past=Past(Pages(array), before, order_T),
        backend=cfg.attention,
    )
    return array, out_TNV


def write_run(
    array: jax.Array, cell_TKC: jax.Array, rows: Rows, offset: jax.Array, cfg: StepConfig
) -> jax.Array:
    """Returns the pages with those cells of a run, in order, whose pages are this device's."""
    axis, W = cfg.axis("sequence"), cfg.layout.page_size
    place_T = jnp.arange(len(cell_TKC), dtype=jnp.int32)
    index_T = (rows.start_B[0] + place_T) // W
    own_T = (index_T % axis.ways == axis.here()) & (place_T >= offset)
    own_T = own_T & (place_T < rows.count_B[0])
    inside_T = jnp.clip(index_T // axis.ways, 0, rows.table_BJ.shape[1] - 1)
    page_T = jnp.where(own_T, rows.table_BJ[0][inside_T], NULL_PAGE)
    offset_T = (rows.start_B[0] + place_T) % W
    return write(array, cell_TKC, page_T, offset_T, len(cell_TKC), cfg)


def whole_runs(x_TD: jax.Array, body: tuple[Group, ...], cfg: StepConfig) -> jax.Array:
    """Returns x_TD with all tokens of a ring, in order, on every device."""
    axis, first, parts = cfg.axis("sequence"), 0, []
    for group in body:
        count = own_tokens(group, cfg)
        part_TD = x_TD[first : first + count]
        if group.kind == "ring":
            order_T = order_of(cfg.ring_layout, group.width, axis.ways, cfg.layout.page_size)
            part_TD = axis.gather(part_TD, 0)[order_T]
        parts.append(part_TD)
        first += count
    return jnp.concatenate(parts)

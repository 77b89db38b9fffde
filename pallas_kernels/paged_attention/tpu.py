# SPDX-License-Identifier: Apache-2.0
"""Paged attention for TPU: a row's pages stream through vector memory, each fetched once.

Tiling. The grid is (cores, rows, tiles of a row's queries). A program has all query heads of its
tile:
those of one KV head lie in a matrix of X rows, heads major, and meet blocks of `pages` pages, S
cells, by an online softmax (FlashAttention-2, arXiv 2307.08691; Milakov and Gimelshein, arXiv
1805.02867). Only blocks within the row's context and window are visited, and of a
block only such pages are fetched.

Pipeline. Pages lie anywhere in the pool, so they are fetched by hand into one of two buffers while
the other is worked on; at its last block a program fetches the first block of the next program of
its core that has any, so that the memory is never idle between rows. A page is `[K, W, C]` in a
piece: one copy a page, for all heads. Codes become numbers, and their scales multiply logits and
weights, in registers.

Lanes. A register has 128. Queries are filled up with zeros to whole registers of a cell, so that a
key that ends within one meets zeros there, and the values' lanes are cut out at the end: no cell
is ever shifted, whatever the head size.

Memory. `vmem_bytes` is the formula; a call that would not fit is declined.

Letters beside those of the package: X queries of a KV head in a tile, S cells of a block, Y lanes
of a cell that keys reach, Z lanes that values reach.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import TWO_CORES, Backend
from pallas_kernels.paged_attention.rows import Call, Rows
from pallas_kernels.pages import Pages
from pallas_kernels.softmax import LOWEST, softmax_end, softmax_step
from pallas_kernels.tpu_tiles import LANES, SUBLANES, dot, lacking, limit, room, up
from pallas_kernels.tuning import block_sizes

# Tables of page numbers are in scalar memory, of which a core has 1 MiB.
TABLE_BYTES = 512 * 1024
BLOCK_BYTES = 512 * 1024  # of pages, at which a copy's start no longer shows
MOST_CELLS = 1024  # of a block: its logits are in registers and vector memory
MOST_QUERIES = 512  # of a KV head in a tile


class Tile(NamedTuple):
    """The sizes of a call; all static."""

    rows: int  # of a core
    cores: int
    queries: int  # of a row in a tile
    tiles: int  # of a row
    query_heads: int
    kv_heads: int
    page: int  # cells
    cell: int  # numbers
    table: int  # places of a row's table, a multiple of `pages`
    pages: int  # of a block
    keys: int  # lanes of a cell that keys reach
    values: tuple[int, int]  # lanes that values reach, whole registers
    latent: int | None  # the numbers that are a latent, and the value; None: K beside V
    page_dtype: Any
    dtype: Any
    scaled: bool
    biased: bool
    tree: bool
    ways: int
    scale: float
    softcap: float | None
    mass: bool

    @property
    def X(self) -> int:  # noqa: N802 - the letter
        return self.query_heads // self.kv_heads * self.queries

    @property
    def S(self) -> int:  # noqa: N802 - the letter
        return self.pages * self.page

    @property
    def width(self) -> int:
        """Lanes of the output."""
        return self.values[1] - self.values[0]

    @property
    def sides(self) -> int:
        """Numbers that a cell of a head has beside it: scales, bias."""
        return 2 * self.scaled + self.biased

    def page_bytes(self) -> int:
        """What a visit of a page fetches."""
        cell = self.cell * jnp.dtype(self.page_dtype).itemsize + 4 * self.sides
        return self.kv_heads * self.page * cell

    def vmem_bytes(self) -> int:
        """What a program takes of the vector memory.

        A quarter is for what the compiler has beside: of several heads at once, as it likes.
        """
        rows = up(self.X, 2 * SUBLANES)
        buffers = 2 * self.pages * self.page_bytes()
        queries = 2 * self.kv_heads * rows * up(self.keys, LANES) * 4
        outputs = 2 * self.kv_heads * rows * (up(self.width, LANES) + LANES) * 4
        sums = self.kv_heads * rows * (up(self.width, LANES) + 2 * LANES) * 4
        temporaries = 4 * rows * self.S * 4 + 2 * self.S * up(self.cell, LANES) * 4
        mass = 2 * self.kv_heads * self.table * self.page * 4 if self.mass else 0
        return (buffers + queries + outputs + sums + temporaries + mass) * 5 // 4

    def smaller(self) -> "Tile | None":
        """Returns a tile that takes less; None if there is none."""
        if not self.tree and self.queries > SUBLANES:
            queries = -(-self.queries // 2)
            return self._replace(queries=queries, tiles=-(-self.queries * self.tiles // queries))
        if self.pages % 2 or self.S % (2 * LANES):
            return None
        return self._replace(pages=self.pages // 2)


def rule(T: int, N: int, K: int, W: int, C: int, page_dtype: Any) -> dict[str, int]:
    """Returns the block sizes of shapes that nobody measured."""
    page_bytes = K * W * C * jnp.dtype(page_dtype).itemsize
    pages = max(1, min(BLOCK_BYTES // page_bytes, MOST_CELLS // W))
    pages = 1 << (pages.bit_length() - 1)
    while pages * W % LANES:  # whole registers of logits
        pages *= 2
    queries = max(1, min(T, MOST_QUERIES // (N // K)))
    return {"pages": pages, "queries": queries}


def declines(
    q_BTNH: jax.Array, pages: Pages, rows: Rows, call: Call, backend: Backend
) -> str | None:
    """Returns why these arguments are not for this kernel, or None."""
    W, C = pages.cells.shape[2:]
    if W & (W - 1):
        return f"page_size={W} is no power of two"
    if backend.interpret:
        return None
    if C % LANES:
        return f"cells of {C} numbers; whole registers of {LANES} are needed"
    least = SUBLANES * 4 // jnp.dtype(pages.cells.dtype).itemsize
    if W % least:
        return f"page_size={W} of {pages.cells.dtype}; a multiple of {least} is needed"
    if (pages.scale_PK2W is not None or pages.bias_PKW is not None) and W % LANES:
        return f"page_size={W} with scales or a bias; a multiple of {LANES} is needed"
    return lacking(tile_of(q_BTNH, pages, rows, call, backend).vmem_bytes(), backend)


def tile_of(q_BTNH: jax.Array, pages: Pages, rows: Rows, call: Call, backend: Backend) -> Tile:
    """Returns the sizes of a call: those that it names, that were measured, or of the rule."""
    B, T, N, H = q_BTNH.shape
    _, K, W, C = pages.cells.shape
    sizes = call.blocks
    if sizes is None:
        shape = {"T": T, "N": N, "K": K, "H": H, "W": W, "C": C}
        dtype = f"{jnp.dtype(q_BTNH.dtype).name}/{jnp.dtype(pages.cells.dtype).name}"
        fallback = rule(T, N, K, W, C, pages.cells.dtype)
        sizes = block_sizes(call.operation, backend.chip, shape, dtype, fallback)
    tree = rows.ancestors_BT is not None
    queries = T if tree else min(T, sizes["queries"])
    tile = Tile(
        rows=B,
        cores=2 if backend.chip in TWO_CORES else 1,
        queries=queries,
        tiles=-(-T // queries),
        query_heads=N,
        kv_heads=K,
        page=W,
        cell=C,
        table=up(rows.table_BJ.shape[1], sizes["pages"]),
        pages=sizes["pages"],
        keys=min(C, up(H, LANES)),
        values=(call.values[0] // LANES * LANES, min(C, up(call.values[1], LANES))),
        latent=call.latent,
        page_dtype=pages.cells.dtype,
        dtype=q_BTNH.dtype,
        scaled=pages.scale_PK2W is not None,
        biased=pages.bias_PKW is not None,
        tree=tree,
        ways=call.ways,
        scale=call.scale,
        softcap=call.softcap,
        mass=call.mass,
    )
    while call.blocks is None and tile.vmem_bytes() > room(backend):
        if (smaller := tile.smaller()) is None:
            break
        tile = smaller
    return tile


def attend(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    stripe: jax.Array | int,
    call: Call,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BTNV, lse_BTN), float32: over the pages of this device, without sinks.

    The log-sum-exp of a query that sees nothing is LOWEST, and its output 0.
    """
    tile = tile_of(q_BTNH, pages, rows, call, backend)
    at_once = max(1, TABLE_BYTES // (4 * tile.table))
    outputs = [
        _attend_some(q_BTNH[first : first + at_once], pages, some, window, stripe, tile, backend)
        for first, some in pieces(rows, at_once)
    ]
    out_BTNZ, lse_BTN = (jnp.concatenate(parts) for parts in zip(*outputs, strict=True))
    first, last = (lane - tile.values[0] for lane in call.values)
    return out_BTNZ[..., first:last], lse_BTN


def mass(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    window: jax.Array | int,
    stripe: jax.Array | int,
    lse_BTN: jax.Array,
    call: Call,
    backend: Backend,
) -> jax.Array:
    """Returns mass_BKS, float32: the weights that each cell of a row's table gets in all."""
    tile = tile_of(q_BTNH, pages, rows, call, backend)
    at_once = max(1, TABLE_BYTES // (4 * tile.table))
    found = [
        _attend_some(
            q_BTNH[first : first + at_once],
            pages,
            some,
            window,
            stripe,
            tile,
            backend,
            lse_BTN[first : first + at_once],
        )
        for first, some in pieces(rows, at_once)
    ]
    return jnp.concatenate(found)[..., : rows.table_BJ.shape[1] * tile.page]


def pieces(rows: Rows, at_once: int) -> list[tuple[int, Rows]]:
    """Returns (first, rows) of so many rows at a time: their tables fit the scalar memory."""

    def some(first: int) -> Rows:
        return jax.tree.map(lambda x: x[first : first + at_once], rows)

    return [(first, some(first)) for first in range(0, rows.table_BJ.shape[0], at_once)]


def _attend_some(q_BTNH, pages, rows, window, stripe, tile: Tile, backend: Backend, lse_BTN=None):
    """Returns what `attend` or, given the log-sum-exps, `mass` does for rows of one call."""
    (B, T, N, _), K, G = q_BTNH.shape, tile.kv_heads, tile.query_heads // tile.kv_heads
    cores = min(tile.cores, B)
    spare = -B % cores  # idle rows
    if spare:
        widen = lambda x: jnp.pad(x, ((0, spare), *((0, 0),) * (x.ndim - 1)))  # noqa: E731
        q_BTNH, rows, lse_BTN = jax.tree.map(widen, (q_BTNH, rows, lse_BTN))
    tile = tile._replace(rows=(B + spare) // cores, cores=cores)
    q_BIKXY = by_tile(q_BTNH, tile, tile.keys)
    inputs = [q_BIKXY]
    specs = [_of_program(tile, tile.keys)]
    if lse_BTN is not None:
        inputs.append(by_tile(lse_BTN[..., None], tile, 1))
        specs.append(_of_program(tile, 1))
    hbm = [pages.cells]
    buffers = [pltpu.VMEM((2, tile.pages, K, tile.page, tile.cell), tile.page_dtype)]
    if tile.scaled:
        hbm.append(pages.scale_PK2W)
        buffers.append(pltpu.VMEM((2, K, 2, tile.S), jnp.float32))
    if tile.biased:
        hbm.append(pages.bias_PKW)
        buffers.append(pltpu.VMEM((2, K, tile.S), jnp.float32))
    specs += [pl.BlockSpec(memory_space=pl.ANY)] * len(hbm)
    if lse_BTN is None:
        out_shape = [
            jax.ShapeDtypeStruct((B + spare, tile.tiles, K, tile.X, width), jnp.float32)
            for width in (tile.width, 1)
        ]
        out_specs = [_of_program(tile, tile.width), _of_program(tile, 1)]
        sums = [pltpu.VMEM((K, tile.X, width), jnp.float32) for width in (LANES, LANES, tile.width)]
    else:
        cells = tile.table * tile.page
        out_shape = [jax.ShapeDtypeStruct((B + spare, K, cells), jnp.float32)]
        out_specs = [pl.BlockSpec((1, K, cells), lambda c, r, i, *_: (c * tile.rows + r, 0, 0))]
        sums = []
    scalars = _scalars(rows, window, stripe, tile)
    blocks = [*zip(specs, inputs, strict=False), *zip(out_specs, out_shape, strict=True)]
    most = limit(tile.vmem_bytes(), backend, blocks, [*buffers, *sums])
    pairs = B * tile.tiles * tile.queries * N * tile.table * tile.page
    results = pl.pallas_call(
        functools.partial(
            _kernel, tile=tile, sides=len(hbm) - 1, scalars=len(scalars), gives_mass=not sums
        ),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, tile.rows, tile.tiles),
            in_specs=specs,
            out_specs=out_specs,
            scratch_shapes=[
                *buffers,
                *sums,
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((2,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=most,
        ),
        # Of full tables: what is really there is known to the kernel only.
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (tile.keys + tile.width),
            transcendentals=pairs,
            bytes_accessed=B * tile.tiles * tile.table * tile.page_bytes()
            + sum(array.size * array.dtype.itemsize for array in inputs)
            + sum(shape.size * shape.dtype.itemsize for shape in out_shape),
        ),
        interpret=backend.interpret,
        name="attention_mass" if lse_BTN is not None else "paged_attention",
    )(*scalars, *inputs, *hbm)
    if lse_BTN is not None:
        return results[0][:B]
    by_token = [of_tiles(result[:B], tile, T, G) for result in results]
    return by_token[0], by_token[1][..., 0]


def _of_program(tile: Tile, width: int) -> pl.BlockSpec:
    """Returns the block of a program in an array by tiles."""
    shape = (1, 1, tile.kv_heads, tile.X, width)
    return pl.BlockSpec(shape, lambda c, r, i, *_: (c * tile.rows + r, i, 0, 0, 0))


def by_tile(x_BTNY: jax.Array, tile: Tile, width: int) -> jax.Array:
    """Returns [B, tiles, K, X, width]: those of a KV head in a tile together, zeros behind."""
    B, T, N, Y = x_BTNY.shape
    K, tiles, queries = tile.kv_heads, tile.tiles, tile.queries
    x = jnp.pad(x_BTNY, ((0, 0), (0, tiles * queries - T), (0, 0), (0, width - Y)))
    x = x.reshape(B, tiles, queries, K, N // K, width).transpose(0, 1, 3, 4, 2, 5)
    return x.reshape(B, tiles, K, tile.X, width)


def of_tiles(x_BIKXZ: jax.Array, tile: Tile, T: int, G: int) -> jax.Array:
    """Returns [B, T, N, Z] of what is by tile."""
    B, tiles, K, _, Z = x_BIKXZ.shape
    x = x_BIKXZ.reshape(B, tiles, K, G, tile.queries, Z).transpose(0, 1, 4, 2, 3, 5)
    return x.reshape(B, tiles * tile.queries, K * G, Z)[:, :T]


def _scalars(rows: Rows, window, stripe, tile: Tile) -> list[jax.Array]:
    """Returns what the kernel reads from scalar memory."""
    J = rows.table_BJ.shape[1]
    table_BJ = jnp.pad(rows.table_BJ, ((0, 0), (0, tile.table - J)))
    settings = jnp.stack([jnp.asarray(window, jnp.int32), jnp.asarray(stripe, jnp.int32)])
    scalars = [table_BJ.reshape(-1), rows.start_B, rows.count_B, rows.ends(), settings]
    if tile.tree:
        assert rows.depth_BT is not None and rows.ancestors_BT is not None, "trees have both"
        scalars += [rows.depth_BT.reshape(-1), rows.ancestors_BT.reshape(-1)]
    return scalars


class _Context(NamedTuple):
    """What a kernel reads, and its sizes."""

    tile: Tile
    table: Any
    start: Any
    count: Any
    end: Any
    settings: Any
    tree: tuple[Any, ...]
    pools: tuple[Any, ...]  # cells, and what there is of scales and bias
    buffers: tuple[Any, ...]
    arrived: Any  # semaphores, one a buffer

    def places(self, b, i):
        """Returns (first, last + 1) of the table's places that a program looks into."""
        tile, start, count, stop = self.tile, self.start[b], self.count[b], self.end[b]
        done = 0 if tile.tree else i * tile.queries  # queries of earlier tiles
        end = jnp.minimum(start + done + tile.queries, stop)
        least = jnp.maximum(start + done - self.settings[0] + 1, 0)
        stripe, ways = self.settings[1], tile.ways
        first = (least // tile.page - stripe + ways - 1) // ways
        last = (-(-end // tile.page) - stripe + ways - 1) // ways
        last = jnp.minimum(last, tile.table)
        return first, jnp.where(count > done, jnp.maximum(last, first), first)

    def blocks(self, b, i):
        """Returns (first, last + 1) of the blocks that a program looks into."""
        first, last = self.places(b, i)
        begin = first // self.tile.pages
        return begin, jnp.where(last > first, -(-last // self.tile.pages), begin)

    def following(self, b, i, end):
        """Returns (row, tile, whether there is one) of the next program of a core, whose rows end
        at `end`, that looks into any block."""
        tile = self.tile

        def after(b, i):
            wraps = i + 1 == tile.tiles
            b, i = jnp.where(wraps, b + 1, b), jnp.where(wraps, 0, i + 1)
            begin, stop = self.blocks(jnp.minimum(b, end - 1), i)
            return b, i, (b < end) & (stop <= begin)

        first = after(b, i)
        b, i, _ = jax.lax.while_loop(lambda found: found[2], lambda f: after(f[0], f[1]), first)
        return b, i, b < end

    def each_page(self, b, i, block, buffer, act: Callable[[Any], None]) -> None:
        """Calls `act` with every copy that brings a block into a buffer."""
        tile, begin = self.tile, block * self.tile.pages
        first, last = self.places(b, i)

        def one(place, nothing):
            page = self.table[b * tile.table + place]
            for copy in page_copies(self, page, buffer, place - begin):
                act(copy)
            return nothing

        stop = jnp.minimum(last, begin + tile.pages)
        jax.lax.fori_loop(jnp.maximum(first, begin), stop, one, 0)


def page_copies(at: _Context, page, buffer, j) -> list[Any]:
    """Returns the copies that bring a page into place j of a buffer."""
    tile, arrived = at.tile, at.arrived.at[buffer]
    targets = [at.buffers[0].at[buffer, j]]
    lanes = pl.ds(pl.multiple_of(j * tile.page, tile.page), tile.page)
    if tile.scaled:
        targets.append(at.buffers[1].at[buffer, :, :, lanes])
    if tile.biased:
        targets.append(at.buffers[-1].at[buffer, :, lanes])
    return [
        pltpu.make_async_copy(pool.at[page], target, arrived)
        for pool, target in zip(at.pools, targets, strict=True)
    ]


def _kernel(*refs, tile: Tile, sides: int, scalars: int, gives_mass: bool) -> None:
    table, start, count, end, settings, *tree = refs[:scalars]
    refs = refs[scalars:]
    q_ref, refs = refs[0], refs[1:]
    lse_ref, refs = (refs[0], refs[1:]) if gives_mass else (None, refs)
    pools, refs = refs[: sides + 1], refs[sides + 1 :]
    outs, refs = refs[: 1 if gives_mass else 2], refs[1 if gives_mass else 2 :]
    buffers, refs = refs[: sides + 1], refs[sides + 1 :]
    *sums, arrived, turn = refs
    at = _Context(tile, table, start, count, end, settings, tuple(tree), pools, buffers, arrived)
    core, row, i = (pl.program_id(axis) for axis in range(3))
    b = core * tile.rows + row
    first, last = at.blocks(b, i)
    fetch = lambda b, i, block, buffer: at.each_page(b, i, block, buffer, lambda c: c.start())  # noqa: E731

    @pl.when((row == 0) & (i == 0))
    def _():
        turn[0] = 0  # the buffer of the next block
        turn[1] = 0  # whether it is on its way

    @pl.when((last > first) & (turn[1] == 0))
    def _():
        fetch(b, i, first, turn[0])

    if gives_mass:

        @pl.when(i == 0)
        def _():
            outs[0][...] = jnp.zeros_like(outs[0])

    else:
        high, total, out = sums
        high[...] = jnp.full_like(high, LOWEST)
        total[...] = jnp.zeros_like(total)
        out[...] = jnp.zeros_like(out)

    def one(block, _):
        buffer = turn[0]

        @pl.when(block + 1 < last)
        def _():
            fetch(b, i, block + 1, 1 - buffer)

        @pl.when(block + 1 == last)
        def _():
            next_b, next_i, is_any = at.following(b, i, (core + 1) * tile.rows)
            turn[1] = is_any.astype(jnp.int32)

            @pl.when(is_any)
            def _():
                fetch(next_b, next_i, at.blocks(next_b, next_i)[0], 1 - buffer)

        at.each_page(b, i, block, buffer, lambda copy: copy.wait())
        cell_1S, seen_XS = seen(at, b, i, block)
        clear_unseen(at, b, i, block, buffer)
        for head in range(tile.kv_heads):
            logits_XS = logits_of(at, q_ref, buffer, head)
            logits_XS = jnp.where(seen_XS, logits_XS, LOWEST)
            if gives_mass:
                add_mass(outs[0], lse_ref, logits_XS, at, b, i, head, block)
            else:
                add_block(sums, logits_XS, at, buffer, head)
        turn[0] = 1 - buffer
        return 0

    jax.lax.fori_loop(first, last, one, 0)
    if not gives_mass:
        out_ref, lse_out = outs
        out_ref[0, 0], lse_out[0, 0] = softmax_end(out[...], high[:, :, :1], total[:, :, :1])


def cells_of(at: _Context, block, shape: tuple[int, ...], axis: int):
    """Returns the cell that each place along an axis of a block is, int32."""
    tile, index = at.tile, jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    if tile.ways == 1:
        return block * tile.S + index
    shift = tile.page.bit_length() - 1
    place = block * tile.pages + (index >> shift)
    return ((place * tile.ways + at.settings[1]) << shift) + (index & (tile.page - 1))


def seen(at: _Context, b, i, block):
    """Returns (cell_1S, whether each query of a tile sees each cell), by the rule of `Rows`."""
    tile = at.tile
    cell_1S = cells_of(at, block, (1, tile.S), 1)
    start, window = at.start[b], at.settings[0]
    own_1S = cell_1S - start
    used_1S = cell_1S < at.end[b]
    if tile.queries == 1 and not tile.tree:
        token = i  # one query a tile
        distance = token - own_1S
        return cell_1S, used_1S & (distance >= 0) & (distance < window)
    token_X1 = jax.lax.broadcasted_iota(jnp.int32, (tile.X, 1), 0) % tile.queries
    if not tile.tree:
        distance_XS = token_X1 + i * tile.queries - own_1S
        return cell_1S, used_1S & (distance_XS >= 0) & (distance_XS < window)
    depth, ancestors = at.tree
    depth_X1, bits_X1, depth_1S = (jnp.zeros_like(x) for x in (token_X1, token_X1, own_1S))
    for t in range(tile.queries):
        place = b * tile.queries + t
        depth_X1 = jnp.where(token_X1 == t, depth[place], depth_X1)
        bits_X1 = jnp.where(token_X1 == t, ancestors[place], bits_X1)
        depth_1S = jnp.where(own_1S == t, depth[place], depth_1S)
    new_1S = own_1S >= 0
    depth_1S = jnp.where(new_1S, depth_1S, own_1S)
    bit_XS = (bits_X1 >> jnp.clip(own_1S, 0, 31)) & 1
    return cell_1S, used_1S & (depth_X1 - depth_1S < window) & (~new_1S | (bit_XS == 1))


def clear_unseen(at: _Context, b, i, block, buffer) -> None:
    """Zeros what of a block no query sees: a weight of 0 does not silence NaN or infinity.

    That is in the first and the last pages of a context only. Integers have neither.
    """
    tile = at.tile
    if jnp.issubdtype(tile.page_dtype, jnp.integer):
        return
    end, least = at.end[b], jnp.maximum(at.start[b] - at.settings[0] + 1, 0)
    first, last = at.places(b, i)

    def clear(j, nothing):
        place = block * tile.pages + j
        cell = (place * tile.ways + at.settings[1]) * tile.page
        is_there = (place >= first) & (place < last)
        whole = is_there & (cell >= least) & (cell + tile.page <= end)

        @pl.when(jnp.logical_not(whole))
        def _():
            cell_W1 = cell + jax.lax.broadcasted_iota(jnp.int32, (tile.page, 1), 0)
            seen_W1 = (cell_W1 >= least) & (cell_W1 < end) & is_there
            page_KWC = at.buffers[0][buffer, j]
            cleared = jnp.where(seen_W1[None], page_KWC.astype(jnp.float32), 0.0)
            at.buffers[0][buffer, j] = cleared.astype(tile.page_dtype)

        return nothing

    jax.lax.fori_loop(0, tile.pages, clear, 0)


def numbers_of(at: _Context, buffer, head: int, lanes: tuple[int, int]):
    """Returns the numbers of a head's cells in a block, [S, lanes], in the queries' dtype."""
    tile = at.tile
    codes = at.buffers[0][buffer, :, head, :, lanes[0] : lanes[1]]
    codes_SC = codes.reshape(tile.S, lanes[1] - lanes[0])
    if tile.page_dtype == tile.dtype:
        return codes_SC
    return codes_SC.astype(jnp.float32).astype(tile.dtype)


def logits_of(at: _Context, q_ref, buffer, head: int):
    """Returns the logits of a head's queries over the cells of a block, biases added."""
    tile = at.tile
    q_XY = q_ref[0, 0, head]
    cells_SY = numbers_of(at, buffer, head, (0, tile.keys))
    if not tile.scaled:
        logits_XS = dot(q_XY, cells_SY)
    elif tile.latent is None:
        logits_XS = dot(q_XY, cells_SY) * at.buffers[1][buffer, head, 0:1]
    else:  # the key goes on behind the latent, with a scale of its own
        is_latent_1Y = jax.lax.broadcasted_iota(jnp.int32, (1, tile.keys), 1) < tile.latent
        scale_2S = at.buffers[1][buffer, head]
        logits_XS = dot(jnp.where(is_latent_1Y, q_XY, 0), cells_SY) * scale_2S[0:1]
        logits_XS += dot(jnp.where(is_latent_1Y, 0, q_XY), cells_SY) * scale_2S[1:2]
    logits_XS *= tile.scale
    if tile.softcap is not None:
        logits_XS = tile.softcap * jnp.tanh(logits_XS / tile.softcap)
    if tile.biased:
        logits_XS += jnp.maximum(at.buffers[-1][buffer, head : head + 1], LOWEST)
    return logits_XS


def add_block(sums, logits_XS, at: _Context, buffer, head: int) -> None:
    """Adds a block's cells to the sums of an online softmax."""
    high, total, out = sums
    tile = at.tile
    now_X1, sum_X1, keep_X1, weight_XS = softmax_step(
        high[head, :, :1], total[head, :, :1], logits_XS
    )
    high[head] = jnp.broadcast_to(now_X1, high.shape[1:])
    total[head] = jnp.broadcast_to(sum_X1, total.shape[1:])
    if tile.scaled:
        side = 1 if tile.latent is None else 0
        scaled_XS = weight_XS * at.buffers[1][buffer, head, side : side + 1]
        weight_XS = jnp.where(weight_XS > 0, scaled_XS, 0.0)  # beside no page anything may stand
    value_SZ = numbers_of(at, buffer, head, tile.values)
    out[head] = out[head] * keep_X1 + dot(weight_XS.astype(tile.dtype), value_SZ, contract=0)


def add_mass(mass_ref, lse_ref, logits_XS, at: _Context, b, i, head: int, block) -> None:
    """Adds the weights that the queries of a tile give to the cells of a block."""
    tile = at.tile
    token_X1 = jax.lax.broadcasted_iota(jnp.int32, (tile.X, 1), 0) % tile.queries
    real_X1 = token_X1 + i * tile.queries < at.count[b]
    weight_XS = jnp.exp(logits_XS - lse_ref[0, 0, head])
    weight_XS = jnp.where(real_X1 & (logits_XS > LOWEST / 2), weight_XS, 0.0)
    lanes = pl.ds(pl.multiple_of(block * tile.S, tile.S), tile.S)
    mass_ref[0, head : head + 1, lanes] += jnp.sum(weight_XS, axis=0, keepdims=True)

# SPDX-License-Identifier: Apache-2.0
"""Page groups of a model, and the pool that their pages share.

Layers of one KV kind (full attention, or one window) share page ids in groups of equal size; a
page holds the cells of one group's layers, one place each. All groups use one pool and one id
space, so a page freed by a windowed layer may serve a full one next. Where layers are unrolled
the pool is a tuple of one array `[P, K, W, C]` a place (a stacked one would be copied there);
where they are scanned it is one array `[place, P, K, W, C]` in the scan's carry.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.models.config import ModelConfig
from engine.models.stages import stage_layers
from engine.pages import PageGroup
from pallas_kernels.pages import page_bytes, page_shape
from sharding import Spec

TPU_LANES = 128  # of a register, and of a row in memory

Pool = Any  # tuple of arrays, or one array: see above


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Which group and place each layer's KV lives in, and how big a page is.

    `group_of_layer[l]` and `place_of_layer[l]` are unique together on a device; `places` is the
    size that all groups are padded to (the last group of a kind may leave places unused).
    """

    groups: tuple[PageGroup, ...]
    group_of_layer: tuple[int, ...]
    place_of_layer: tuple[int, ...]
    places: int
    kv_heads: int
    cell_width: int  # numbers of a cell of one head, with what fills it up
    values: tuple[int, int]  # which of them are the value
    page_size: int
    dtype: np.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all places together."""
        return self.places * page_bytes(self.kv_heads, self.page_size, self.cell_width, self.dtype)

    @property
    def heads_axis(self) -> str | None:
        """The logical axis of KV heads; the one of a latent belongs to all query heads."""
        return "kv_heads" if self.values[0] > 0 else None

    def page_spec(self) -> Spec:
        """Returns the spec of one page by itself, all places together, one of each device."""
        shape = page_shape(self.kv_heads, self.page_size, self.cell_width)
        axes = ("page_parts", self.heads_axis, None, None)
        return Spec((self.places, *shape), axes, self.dtype)

    def pool_spec(self, num_pages: int) -> Spec:
        """Returns the spec of one place of the pool."""
        shape = (num_pages, *page_shape(self.kv_heads, self.page_size, self.cell_width))
        return Spec(shape, ("pages", self.heads_axis, None, None), self.dtype)


def lanes_of(platform: str) -> int:
    """Returns what the numbers of a cell are filled up to a multiple of, on a platform."""
    return TPU_LANES if platform == "tpu" else 1


def kv_layout(
    config: ModelConfig, page_size: int, dtype: np.dtype, stages: int = 1, lanes: int = 1
) -> KVLayout:
    """Returns the page groups of `config`: as many places as the rarest KV kind has layers.

    With several `stages` a page's places are shared out over the devices that have the layers, and
    those of the layout are the most that one has. A cell is filled up to a multiple of `lanes`.
    """
    kinds: dict[int | None, list[int]] = {window: [] for window in config.windows}
    for layer, window in enumerate(config.windows):
        kinds[window].append(layer)
    places = min(len(layers) for layers in kinds.values())
    groups: list[PageGroup] = []
    where: dict[int, tuple[int, int]] = {}
    for window, layers in kinds.items():
        for first in range(0, len(layers), places):
            for place, layer in enumerate(layers[first : first + places]):
                where[layer] = (len(groups), place)
            groups.append(PageGroup(window=window))
    for stage in stage_layers(config.num_layers, stages) if stages > 1 else ():
        for group in range(len(groups)):
            layers = [layer for layer in stage if where[layer][0] == group]
            where |= {layer: (group, place) for place, layer in enumerate(layers)}
    places = 1 + max(place for _, place in where.values())
    H, latent = config.head_width, config.latent
    values = (H, 2 * H) if latent is None else (0, latent.rank)
    width = 2 * H if latent is None else latent.cell_width
    return KVLayout(
        groups=tuple(groups),
        group_of_layer=tuple(where[layer][0] for layer in range(config.num_layers)),
        place_of_layer=tuple(where[layer][1] for layer in range(config.num_layers)),
        places=places,
        kv_heads=config.kv_heads if latent is None else 1,
        cell_width=-(-width // lanes) * lanes,
        values=values,
        page_size=page_size,
        dtype=np.dtype(dtype),
    )


def place_view(pool: Pool, place: Any) -> tuple[jax.Array, Any]:
    """Returns (array [P', K, W, 2H], page offset) in which the pages of `place` are found.

    A tuple is indexed; a stacked pool is seen as one long run of pages, so that nothing is sliced.
    """
    if isinstance(pool, tuple):
        return pool[place], 0
    places, num_pages = pool.shape[:2]
    return pool.reshape(places * num_pages, *pool.shape[2:]), place * num_pages


def place_set(pool: Pool, place: Any, array: jax.Array) -> Pool:
    """Returns `pool` with the view of `place` replaced by the updated `array`."""
    if isinstance(pool, tuple):
        return (*pool[:place], array, *pool[place + 1 :])
    return array.reshape(pool.shape)


def copy_pages(pool: Pool, from_C: jax.Array, to_C: jax.Array) -> Pool:
    """Returns `pool` with pages from_C copied to to_C, in every place; none of to_C is read."""
    if isinstance(pool, tuple):
        return tuple(array.at[to_C].set(array[from_C]) for array in pool)

    # One by one: XLA for TPU makes a copy of the whole pool for a gather and a scatter of it.
    def copy(index, pool):
        page = jax.lax.dynamic_slice_in_dim(pool, from_C[index], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, to_C[index], axis=1)

    return jax.lax.fori_loop(0, from_C.shape[0], copy, pool)


def take_pages(pool: Pool, page_C: jax.Array) -> tuple[jax.Array, ...]:
    """Returns each of the pages page_C by itself, [place, K, W, C]."""
    if isinstance(pool, tuple):
        places = jnp.stack([array[page_C] for array in pool], axis=1)
        return tuple(places[index] for index in range(page_C.shape[0]))
    return tuple(pool[:, page_C[index]] for index in range(page_C.shape[0]))


def put_pages(pool: Pool, page_C: jax.Array, pages: tuple[jax.Array, ...]) -> Pool:
    """Returns `pool` with its pages page_C as `take_pages` gave them."""
    if isinstance(pool, tuple):
        places = jnp.stack(pages)
        return tuple(array.at[page_C].set(places[:, i]) for i, array in enumerate(pool))
    return pool.at[:, page_C].set(jnp.stack(pages, axis=1))


def empty_pool(layout: KVLayout, num_pages: int, *, stacked: bool) -> Pool:
    """Returns a pool of zeros."""
    shape = layout.pool_spec(num_pages).shape
    if stacked:
        return jnp.zeros((layout.places, *shape), layout.dtype)
    return tuple(jnp.zeros(shape, layout.dtype) for _ in range(layout.places))

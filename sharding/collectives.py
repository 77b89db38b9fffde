# SPDX-License-Identifier: Apache-2.0
"""Where a device stands on a mesh axis, as its program sees it, and sums over that axis.

Programs run inside `shard_map` over the whole mesh: each device sees its own parts, and nothing
moves between devices but what is asked for here. An axis of one way asks for nothing, so the same
functions run outside of a mesh too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Axis(NamedTuple):
    """A mesh axis, or several as one, of so many ways."""

    names: tuple[str, ...] = ()
    ways: int = 1

    def here(self) -> jax.Array:
        """Returns where this device stands, int32 in [0, ways)."""
        if self.ways == 1:
            return jnp.int32(0)
        return jax.lax.axis_index(self.names).astype(jnp.int32)

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum of all devices' `x`."""
        return jax.lax.psum(x, self.names) if self.ways > 1 else x

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the elementwise highest of all devices' `x`."""
        return jax.lax.pmax(x, self.names) if self.ways > 1 else x

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns all devices' `x`, one after the other along `axis`."""
        if self.ways == 1:
            return x
        return jax.lax.all_gather(x, self.names, axis=axis, tiled=True)


ALONE = Axis()

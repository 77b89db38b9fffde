# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a long run each device of a mesh axis has.

"striped": pages are dealt out in turn (striped attention, arXiv 2311.09431), which is also how the
pages of a request are. "contiguous": one piece each. "zig-zag": two pieces each, the r-th and the
r-th from the end, which evens out causal work as stripes do. Tokens of a device are in rising
order in each.
"""

from typing import Any

import jax.numpy as jnp

LAYOUTS = ("striped", "contiguous", "zig-zag")


def check_layout(layout: str, tokens: int, ways: int, page: int) -> None:
    """Raises ValueError unless `tokens` can be laid out over `ways` devices so."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known; use one of {', '.join(LAYOUTS)}")
    if tokens % (ways * page * (2 if layout == "zig-zag" else 1)):
        raise ValueError(
            f"{tokens} tokens cannot be laid out {layout} over {ways} devices in pages of {page}"
        )


def places_of(layout: str, tokens: int, ways: int, page: int, device: Any) -> Any:
    """Returns int32 [tokens // ways], the places of a device's tokens in the run, rising."""
    own = tokens // ways
    index = jnp.arange(own, dtype=jnp.int32)
    if layout == "striped":
        return (index // page * ways + device) * page + index % page
    if layout == "contiguous":
        return device * own + index
    half = own // 2
    return jnp.where(index < half, device * half, (2 * ways - 2 - device) * half) + index


def order_of(layout: str, tokens: int, ways: int, page: int) -> Any:
    """Returns int32 [tokens]: where each place of the run stands among all devices' tokens."""
    places = [places_of(layout, tokens, ways, page, jnp.int32(d)) for d in range(ways)]
    return jnp.argsort(jnp.concatenate(places)).astype(jnp.int32)

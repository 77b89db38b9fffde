# SPDX-License-Identifier: Apache-2.0
"""What chips can do, by their public figures: what plans are reckoned with."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One chip: bytes of its memory (None: what the machine has free), bytes a second from memory,
    operations a second in bfloat16 without sparsity, bytes a second that it sends to others over
    all its links, where that is from, and the numbers that a row in its memory is filled up to a
    multiple of."""

    memory_bytes: int | None
    bandwidth: float
    flops: float
    link_bandwidth: float
    source: str
    lanes: int = 1


TPU = "docs.cloud.google.com/tpu/docs/"
NVIDIA = "www.nvidia.com/en-us/data-center/"

# Makers give the bandwidth of links in both directions together, so half of it stands here, and
# NVIDIA gives operations with sparsity first. TPUs: a GB is taken as 1e9 bytes, as it is written.
CHIPS = {
    "v5e": Chip(16_000_000_000, 819e9, 197e12, 200e9, f"{TPU}v5e", 128),
    "v5p": Chip(95 * 2**30, 2765e9, 459e12, 600e9, f"{TPU}v5p", 128),
    "v6e": Chip(32_000_000_000, 1600e9, 918e12, 400e9, f"{TPU}v6e", 128),
    "a100": Chip(80_000_000_000, 2039e9, 312e12, 300e9, f"{NVIDIA}a100 (SXM, 80 GB)"),
    "h100": Chip(80_000_000_000, 3350e9, 989e12, 450e9, f"{NVIDIA}h100 (SXM)"),
    "h200": Chip(141_000_000_000, 4800e9, 989e12, 450e9, f"{NVIDIA}h200 (SXM)"),
    # Two cores of a server: reads measured by scripts.benchmark, and about 2 x 16 x 3 GHz in
    # float32. Other machines differ; their own figures are better.
    "cpu": Chip(None, 22e9, 0.1e12, 1e9, "a machine of two cores"),
}


def parse_chips(text: str) -> tuple[str, int]:
    """Returns (name, count) of "NAME:COUNT", or of NAME, which is one; ValueError for all else."""
    name, colon, count = text.partition(":")
    if name not in CHIPS:
        raise ValueError(
            f"chips={text!r} is not known; use NAME:COUNT with one of {', '.join(CHIPS)}"
        )
    if colon and not (count.isascii() and count.isdigit() and int(count)):
        raise ValueError(f"chips={text!r} must have a count of at least 1; use {name}:8, say")
    if name == "cpu" and colon and int(count) > 1:
        raise ValueError(f"chips={text!r}: a machine's cores are one device; use cpu")
    return name, int(count) if colon else 1

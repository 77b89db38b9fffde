# SPDX-License-Identifier: Apache-2.0
"""A writer of model folders in Hugging Face layout: settings, tokenizer, safetensors in shards."""

import json
import pathlib
from typing import Any

import numpy as np

from checkpoints.checkpoint import DTYPES, Checkpoint, num_bytes, total_bytes
from checkpoints.folder import new_folder, write_settings
from checkpoints.huggingface import INDEX, WEIGHTS

DEFAULT_SHARD_BYTES = 2_000_000_000


def write_huggingface(
    checkpoint: Checkpoint, target: pathlib.Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Writes the checkpoint's tensors, as `read` gives them, and its settings to a new folder.

    One file where all tensors fit `max_shard_bytes`, else shards of at most that (a larger tensor
    has a shard of its own) and their index. The folder appears when it is whole; raises OSError
    where `target` is there already or the disk has no room. The host holds one tensor at a time.
    """
    shards = plan_shards(checkpoint, max_shard_bytes)
    with new_folder(target, total_bytes(checkpoint)) as folder:
        write_settings(folder, checkpoint)
        for file, names in shards.items():
            _write_shard(folder / file, checkpoint, names)
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            total = {"total_size": total_bytes(checkpoint)}
            index = {"metadata": total, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def plan_shards(checkpoint: Checkpoint, max_shard_bytes: int) -> dict[str, list[str]]:
    """Returns {file name: tensor names}, tensors in the checkpoint's order."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name in checkpoint.tensors:
        size = num_bytes(checkpoint.tensors[name])
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    stem = pathlib.Path(WEIGHTS).stem
    return {
        f"{stem}-{number:05}-of-{len(shards):05}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def _write_shard(file: pathlib.Path, checkpoint: Checkpoint, names: list[str]) -> None:
    """Writes a safetensors file: the header's length (8 bytes), the header as JSON, the data.

    Wider types come first, so that every tensor begins at a multiple of its element.
    """
    widths = {name: np.dtype(DTYPES[checkpoint.tensors[name].dtype]).itemsize for name in names}
    names = sorted(names, key=lambda name: -widths[name])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        info, size = checkpoint.tensors[name], num_bytes(checkpoint.tensors[name])
        offsets = [at, at + size]
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": offsets}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for name in names:
            info, array = checkpoint.tensors[name], checkpoint.read(name)
            assert (array.shape, array.dtype) == (info.shape, DTYPES[info.dtype]), name
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

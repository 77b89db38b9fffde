# SPDX-License-Identifier: Apache-2.0
"""A writer of the model folders that `checkpoints.orbax` reads.

Imported apart, since Orbax takes a second to import and reading does without it.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp

from checkpoints.checkpoint import Checkpoint, total_bytes
from checkpoints.folder import new_folder, write_settings
from checkpoints.orbax import FORMAT_VERSION, MANIFEST, PARAMETERS, first_line

# Arrays are stored in chunks of this size, so that a part of one can be read.
_CHUNK_BYTES = 64 << 20


def write_orbax(checkpoint: Checkpoint, target: pathlib.Path) -> None:
    """Writes the checkpoint's tensors, as `read` gives them, and its settings to a new folder.

    `config["dtype"]` names the type of its tensors. The folder appears when it is whole; raises
    OSError where `target` is there already or the disk has no room. The host holds one tensor at a
    time.
    """
    with new_folder(target, total_bytes(checkpoint)) as folder:
        write_settings(folder, checkpoint)
        manifest = {"format_version": FORMAT_VERSION, "dtype": checkpoint.config["dtype"]}
        (folder / MANIFEST).write_text(json.dumps(manifest))
        tree = {name: _Unread(checkpoint, name) for name in checkpoint.tensors}
        arguments = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tree}
        save = ocp.args.PyTreeSave(tree, save_args=arguments)
        with _quiet_orbax(), ocp.Checkpointer(_handler()) as checkpointer:
            checkpointer.save((folder / PARAMETERS).absolute(), args=save)


def _handler() -> ocp.PyTreeCheckpointHandler:
    one_by_one = _OneByOne(deepcopy_host_arrays=False)
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,  # the reader relies on it
        use_compression=False,  # weights do not compress
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((_Unread, one_by_one)),
    )


@dataclasses.dataclass(frozen=True)
class _Unread:
    """A tensor that is read when its turn comes to be written: a leaf of the tree."""

    checkpoint: Checkpoint
    name: str


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Writes each tensor before it reads the next, where Orbax would hold and write all at once.

    So the host holds one, and no write goes on behind the back of one that has failed.
    """

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
        for value, info, arg in zip(values, infos, args, strict=True):
            array = value.checkpoint.read(value.name)
            for commit in await super().serialize([array], [info], [arg]):
                try:
                    commit.result()
                except ValueError as error:  # TensorStore's only exception
                    what = f"tensor {value.name!r} cannot be written: {first_line(error)}"
                    raise OSError(what) from None
        return []

    def memory_size(self, values: Any) -> list[tuple[int, int]]:
        """Returns what Orbax logs as bytes written and read; none are known before the turn."""
        return [(0, 0)] * len(values)


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Keeps Orbax from logging what is no news, and tracebacks of errors that are raised too."""
    log = logging.getLogger("absl")
    log.addFilter(_nothing)
    try:
        yield
    finally:
        log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False

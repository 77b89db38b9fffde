# SPDX-License-Identifier: Apache-2.0
"""Several processes that run one engine: one decides, and what it decides they all do.

The leader has requests, the tokenizer, the schedulers and the trees; it sends each step's `Work`
before it dispatches its own. The others have a worker only, and follow. No code and no pickle is
sent: names, numbers and integer arrays.
"""

import atexit
import collections
import dataclasses
import hashlib
import importlib.metadata
import signal
import threading
from typing import Any

import jax
import msgpack
import numpy as np

from checkpoints.checkpoint import Checkpoint
from engine.buckets import Group, Head
from engine.config import EngineConfig
from engine.expert_places import Placement
from engine.moves import Move
from engine.program_store import source_fingerprint
from engine.worker import Made, Work, Worker
from sharding.processes import Channel, differences, lost, tell_failure

_AHEAD = 2  # steps that one who follows has dispatched and not seen the end of
_ARRAY = 1  # of a message's own types, the one there is
_SAMPLE = 4  # tensors of a checkpoint whose numbers are compared


def encode(kind: str, work: Work | None) -> bytes:
    """Returns a message: what a worker is to do, and with what."""
    return msgpack.packb((kind, work), default=_from_array)


def decode(message: bytes) -> tuple[str, Work | None]:
    """Returns what `encode` made a message of."""
    kind, fields = msgpack.unpackb(message, ext_hook=_to_array, use_list=False)
    if fields is None:
        return kind, None
    work = Work(*fields)
    each = dict(score_head=Head, head=Head, place=Placement)
    found = {name: getattr(work, name) for name in each}
    work = work._replace(
        moves=tuple([Move(*move) for move in moves] for moves in work.moves),
        body=None if work.body is None else tuple(Group(*group) for group in work.body),
        **{name: each[name](*value) for name, value in found.items() if value is not None},
    )
    return kind, work


def _from_array(array: np.ndarray) -> msgpack.ExtType:
    """Returns what an array is in a message; msgpack asks for whatever it does not know."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} is nothing to send to another process")
    packed = msgpack.packb((array.dtype.str, array.shape, array.tobytes()))
    return msgpack.ExtType(_ARRAY, packed)


def _to_array(code: int, packed: bytes) -> np.ndarray:
    """Returns the array of a message."""
    dtype, shape, numbers = msgpack.unpackb(packed)
    return np.frombuffer(numbers, np.dtype(dtype)).reshape(shape)


class Leader:
    """Tells the other processes of a group what its own worker does."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._has_ended = False
        # Whoever leads and forgets to close its engine lets the others go when it ends.
        atexit.register(self.end)

    def tell(self, kind: str, work: Work | None = None) -> None:
        """Sends a message; raises LostProcess when it cannot be sent."""
        if self._has_ended:
            raise RuntimeError("the engine is closed; make another")
        self._channel.send(encode(kind, work))

    def end(self) -> None:
        """Has the others end; once."""
        if not self._has_ended:
            self._has_ended = True
            atexit.unregister(self.end)
            self._channel.end(encode("end", None))

    def give_up(self, reason: str) -> None:
        """Has all other processes end with a reason, where they next wait."""
        self._has_ended = True
        atexit.unregister(self.end)
        tell_failure(reason)


def follow(worker: Worker, channel: Channel) -> None:
    """Does what the leader tells, until it ends.

    Raises LostProcess when a process is lost. An interrupt is for the leader to answer, which the
    keyboard's reaches too.
    """
    pending: collections.deque[Made] = collections.deque()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        while True:
            kind, work = decode(channel.receive())
            if kind == "end":
                break
            if work is None:
                getattr(worker, kind)()
            elif (made := worker.run(work)) is not None:
                pending.append(made)
                if len(pending) > _AHEAD:
                    jax.block_until_ready(pending.popleft().done)
    except jax.errors.JaxRuntimeError as error:
        raise lost(error) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def check_agreement(channel: Channel, config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises ValueError in all processes where one has other settings, versions or weights."""
    told = differences(channel.agree("settings", declared(config, checkpoint)))
    if told:
        raise ValueError(f"the processes are not started alike: {told}; give all of them the same")


def declared(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """Returns, a line each, what processes that run one engine must have alike.

    Of the model that is what it says, not where it is.
    """
    settings: dict[str, Any] = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name != "model"
    }
    for name in ("jax", "jaxlib"):
        settings[name] = importlib.metadata.version(name)
    settings["source"] = source_fingerprint()[:16]
    settings["checkpoint"] = checkpoint_digest(checkpoint)
    return "\n".join(f"{name}={value!r}" for name, value in settings.items())


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Returns a digest of a checkpoint's settings, its tensors' names and shapes, and the numbers
    of a few: reading all of them takes as long as a start."""
    settings = sorted(checkpoint.config.items(), key=lambda item: item[0])
    digest = hashlib.sha256(repr(settings).encode())
    by_size = sorted(checkpoint.tensors, key=lambda name: (size_of(checkpoint, name), name))
    digest.update(repr([(name, checkpoint.tensors[name]) for name in by_size]).encode())
    middle = len(by_size) // 2
    for name in dict.fromkeys([*by_size[:_SAMPLE], *by_size[middle : middle + 1]]):
        digest.update(np.ascontiguousarray(checkpoint.read(name)).tobytes())
    return digest.hexdigest()[:16]


def size_of(checkpoint: Checkpoint, name: str) -> int:
    """Returns how many numbers a tensor has."""
    return int(np.prod(checkpoint.tensors[name].shape, dtype=np.int64))

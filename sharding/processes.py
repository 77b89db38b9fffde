# SPDX-License-Identifier: Apache-2.0
"""Processes that run one engine together: who they are, and what they say to each other.

They are started by `jax.distributed`, whose key-value store, kept by process 0, carries what they
say: host data, a message a step. Several groups of them may each run an engine of their own.
"""

import collections
import contextlib
import dataclasses
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import jax
from jax._src import distributed  # the store has no public door

_SLICE_S = 2.0  # of a wait, after which is looked whether somebody has failed
_KEPT = 64  # messages in a folder, which is deleted whole
_FAILED = "headrace/failed"


class LostProcess(RuntimeError):
    """The processes cannot go on together. Its text says who ended, and why."""


def lost(error: Exception) -> LostProcess:
    """Returns what an error of the devices means where other processes have some of them."""
    return LostProcess(
        f"a step failed, in this process or in another: {str(error).splitlines()[0]}"
    )


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of one engine: the `number`-th `size` of `count` times as many.

    rank: this process's place in it; that of rank 0 leads. Processes count from 0 in all.
    """

    rank: int = 0
    size: int = 1
    number: int = 0
    count: int = 1

    @property
    def leaders(self) -> "Group":
        """The processes that lead, one of each group, for the one that leads this."""
        return Group(self.number, self.count, -1)

    @property
    def processes(self) -> range:
        """The numbers of its processes."""
        return range(self.number * self.size, (self.number + 1) * self.size)

    def devices(self) -> list[jax.Device]:
        """Returns the devices of its processes."""
        if num_processes() == 1:
            return list(jax.local_devices())
        return [device for device in jax.devices() if device.process_index in self.processes]


def num_processes() -> int:
    """Returns how many processes there are, without looking for devices."""
    return distributed.global_state.num_processes


def _store() -> Any:
    """Returns the door to the key-value store of all processes."""
    return distributed.global_state.client


def process_id() -> int:
    """Returns which of them this is."""
    return distributed.global_state.process_id


def group_of(count: int) -> Group:
    """Returns this process's group when there are `count`; ValueError if they are not even."""
    everyone, here = num_processes(), process_id()
    if everyone % count:
        raise ValueError(
            f"replicas={count} must divide the number of processes, {everyone}; see "
            "python -m scripts.launch"
        )
    size = everyone // count
    return Group(here % size, size, here // size, count)


class Channel:
    """What the processes of a group say to each other, one engine's after the other.

    Every wait ends with LostProcess when a process has said that it failed, or is lost.
    """

    _made: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self, group: Group) -> None:
        self.group = group
        self._store = _store()
        # The processes of a group make their channels in the same order.
        name = f"{group.number} of {group.count}"
        self._folder = f"headrace/{name}/{Channel._made[name]}"
        Channel._made[name] += 1
        self._step = 0
        self._deleted = 0  # folders of messages
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="messages", daemon=True)
        self._failure: LostProcess | None = None

    def agree(self, name: str, mine: str) -> list[str]:
        """Returns what each process gives under `name`, by rank; it waits for all of them."""
        self._set(f"{name}/{self.group.rank}", mine.encode())
        everyone = f"{name}/all"
        if self.group.rank == 0:
            texts = [self._get(f"{name}/{rank}") for rank in range(self.group.size)]
            self._set(everyone, b"".join(len(text).to_bytes(8) + text for text in texts))
        return [text.decode() for text in _split(self._get(everyone))]

    def send(self, message: bytes) -> None:
        """Has the others receive the next message; returns before they have it.

        LostProcess if one before could not be sent.
        """
        if self._failure is not None:
            raise self._failure
        if self._sender.ident is None:
            self._sender.start()
        self._outbox.put(message)

    def _send_all(self) -> None:
        """The sender's thread: until None comes, or one message cannot be sent."""
        while (message := self._outbox.get()) is not None:
            try:
                self._send(message)
            except LostProcess as error:
                self._failure = error
                return

    def _send(self, message: bytes) -> None:
        self._set(self._message(self._step), message)
        self._step += 1
        if self._step % _KEPT != 1:
            return
        with _losses():
            read = self._store.key_value_dir_get(f"{self._folder}/read/")
            if len(read) == self.group.size - 1:
                for folder in range(self._deleted, min(int(count) for _, count in read)):
                    self._store.key_value_delete(f"{self._folder}/{folder}/")
                    self._deleted = folder + 1

    def receive(self) -> bytes:
        """Returns the next message, when it is there."""
        message = self._get(self._message(self._step))
        self._step += 1
        if self._step % _KEPT == 0:
            self._set(f"read/{self.group.rank}", str(self._step // _KEPT).encode())
        return message

    def _message(self, step: int) -> str:
        return f"{step // _KEPT}/{step}"

    def _set(self, key: str, value: bytes) -> None:
        with _losses():
            self._store.key_value_set_bytes(f"{self._folder}/{key}", value, allow_overwrite=True)

    def _get(self, key: str) -> bytes:
        """Returns the value of a key when it is there."""
        while True:
            with _losses():
                try:
                    wait_ms = int(_SLICE_S * 1000)
                    return self._store.blocking_key_value_get_bytes(
                        f"{self._folder}/{key}", wait_ms
                    )
                except jax.errors.JaxRuntimeError as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                check_failures()

    def end(self, message: bytes) -> None:
        """Sends the last message, which is in the store when this returns.

        From this thread: others are ended before what runs at exit.
        """
        if self._sender.ident is not None:
            self._outbox.put(None)
            self._sender.join()
        if self._failure is not None:
            raise self._failure
        self._send(message)


def _split(joined: bytes) -> Iterator[bytes]:
    """Yields the texts that stand behind their lengths."""
    while joined:
        length = 8 + int.from_bytes(joined[:8])
        yield joined[8:length]
        joined = joined[length:]


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    """Turns errors of the store, which is lost with process 0, into LostProcess."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        raise LostProcess(f"process 0 cannot be reached: {first}") from error


def check_failures() -> None:
    """Raises LostProcess if some process has said that it failed."""
    with _losses():
        reasons = _store().key_value_dir_get(_FAILED)
    if reasons:
        raise LostProcess(reasons[0][1])


def tell_failure(reason: str) -> None:
    """Has all other processes end where they next wait, the first one's reason being told."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was first, or it is lost
        _store().key_value_set(f"{_FAILED}/reason", f"process {process_id()} ended: {reason}")


def finish() -> None:
    """Returns when all processes have come here; LostProcess if one failed before."""
    Channel(Group(process_id(), num_processes())).agree("finish", "")


def leave(code: int, reason: str) -> NoReturn:
    """Ends this process, and has the others end for this `reason`.

    It runs nothing at exit: what jax does there waits for processes that wait for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    tell_failure(reason)
    if process_id() == 0:
        time.sleep(2 * _SLICE_S)  # the store ends with this process: the others are to read first
    os._exit(code)


def differences(texts: Sequence[str]) -> str:
    """Returns what lines of other processes' texts are not those of the first, as one line."""
    first = texts[0].splitlines()
    found = []
    for rank, text in enumerate(texts):
        lines = text.splitlines()
        other = [line for line in lines if line not in first]
        missing = [line for line in first if line not in lines]
        if other or missing:
            found.append(
                f"process {rank} has {', '.join(other) or 'nothing'} where process 0 has "
                f"{', '.join(missing) or 'nothing'}"
            )
    return "; ".join(found)

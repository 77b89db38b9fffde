# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: made once, kept in the user's cache folder, and loaded again.

A program's identity is everything that decides its code: the step's static configuration, the
shapes and shardings of its arguments, our own source, the versions of jax and the machine. A warm
start finds each one by that key and neither traces nor compiles.
"""

import atexit
import dataclasses
import hashlib
import importlib.metadata
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

import pallas_kernels
import sharding
from engine.log import logger
from engine.memo import keep

# XLA's lowering recurses deeply over unrolled layers; the default stack of a thread is too small.
THREAD_STACK_BYTES = 64 * 2**20
DIGEST_BYTES = 32  # a stored executable begins with its sha256, so that a torn one is not loaded


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, the abstract values of its arguments, and the shardings of its results.

    The function is what one device of the mesh does, with its parts of the arguments, to make its
    parts of the results. Arguments in the host's memory are brought to the device first.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Any  # abstract values, with shardings
    donated: tuple[int, ...] = ()

    def lower(self) -> jax.stages.Lowered:
        """Returns the program traced and lowered for its arguments' devices."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.results)
        parts = jax.tree.map(lambda leaf: leaf.sharding.spec, (self.arguments, self.results))
        mesh = jax.tree.leaves(shardings)[0].mesh
        local = jax.shard_map(
            self.function, mesh=mesh, in_specs=parts[0], out_specs=parts[1], check_vma=False
        )

        def program(*arguments):
            return local(*jax.tree.map(on_device, arguments, self.arguments))

        jitted = jax.jit(program, donate_argnums=self.donated, out_shardings=shardings)
        return jitted.lower(*self.arguments)

    def compile(self) -> jax.stages.Compiled:
        """Returns the program compiled for its arguments' devices."""
        mesh = jax.tree.leaves(self.results)[0].sharding.mesh
        return self.lower().compile(compiler_options(mesh.devices.flat[0].platform))


def on_device(array: jax.Array, abstract: Any) -> jax.Array:
    """Returns an argument of a program in the device's memory."""
    if abstract.sharding.memory_kind in (None, "device"):
        return array
    return jax.device_put(array, jax.memory.Space.Device)


def compiler_options(platform: str) -> dict[str, Any] | None:
    """Returns what XLA is to do otherwise than it does by itself on a platform.

    On TPUs it would bring a whole parameter into vector memory before a program begins, even the
    embedding, of which a step looks into some rows. On GPUs of several processes it would share out
    its trials of kernels among them, and one that has a program already would be waited for.
    """
    if platform == "tpu":
        return {"xla_max_cross_program_prefetches": 0}
    if jax.process_count() > 1 and platform in ("gpu", "cuda"):
        return {"xla_gpu_shard_autotuning": False}
    return None


@cache
def source_fingerprint() -> str:
    """Returns a digest of the source of every package that device code comes from."""
    digest = hashlib.sha256()
    folders = [Path(__file__).parent]
    folders += [Path(next(iter(package.__path__))) for package in (pallas_kernels, sharding)]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def machine_fingerprint() -> str:
    """Returns what compiled code depends on beside its source: versions, flags and processor."""
    client = jax.devices()[0].client
    settings = ("jax_default_matmul_precision", "jax_enable_x64", "jax_threefry_partitionable")
    parts = [
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        client.platform,
        client.platform_version,
        f"process {jax.process_index()} of {jax.process_count()}",
    ]
    parts += [device.device_kind for device in jax.devices()]
    parts += [f"{name}={getattr(jax.config, name)}" for name in settings]
    parts += [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    if client.platform == "cpu" and Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        parts.append(next((line for line in lines if line.startswith(("flags", "Features"))), ""))
    return "\n".join(parts)


def describe(value: Any) -> str:
    """Returns a text that is equal only for equal static values and abstract arrays."""
    if isinstance(value, jax.ShapeDtypeStruct):
        where = None
        if value.sharding is not None:
            mesh = describe(getattr(value.sharding, "mesh", None))
            where = (value.sharding.spec, mesh, value.sharding.memory_kind, value.format.layout)
        return f"{value.shape}{value.dtype}{where}"
    if isinstance(value, np.ndarray):
        return f"{value.shape}{value.dtype}{hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, jax.sharding.Mesh):
        return f"{value.shape}{[device.id for device in value.devices.flat]}"
    if isinstance(value, partial):
        return f"{value.func.__qualname__}{describe(value.keywords)}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{describe(item)}" for key, item in value.items()) + "}"
    if dataclasses.is_dataclass(value) or isinstance(value, str | int | float | None):
        return repr(value)
    if isinstance(value, tuple | list):
        return "(" + ",".join(describe(item) for item in value) + ")"
    return getattr(value, "__qualname__", repr(value))


class ProgramStore:
    """Compiles programs, or loads them from `folder` when they were compiled before.

    `compiled` and `loaded` count what happened. The folder must be the user's own: a stored
    executable is machine code. It is made readable to its owner only, and one that others can
    write to is refused.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.compiled = 0
        self.loaded = 0
        self._lock = threading.Lock()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise PermissionError(
                    f"{folder} holds compiled code but is not yours alone; "
                    "set HEADRACE_CACHE to a folder that only you can write to"
                )
            folder.chmod(0o700)

    def get(self, program: Program) -> Callable[..., Any]:
        """Returns the executable of `program`; a damaged file is replaced."""
        path = self._path(program)
        if path is not None and path.exists():
            executable = self._load(program, path)
            if executable is not None:
                with self._lock:
                    self.loaded += 1
                return executable
        compiled = program.compile()
        with self._lock:
            self.compiled += 1
        if path is not None:
            payload, _, _ = serialize_executable.serialize(compiled)
            keep(path, hashlib.sha256(payload).digest() + payload)
        return compiled

    def has(self, program: Program) -> bool:
        """Returns whether `program` was compiled before and kept."""
        path = self._path(program)
        return path is not None and path.exists()

    def _path(self, program: Program) -> Path | None:
        return self.folder / f"{self.key(program)}.xla" if self.folder is not None else None

    def key(self, program: Program) -> str:
        """Returns the program's identity, a hexadecimal digest."""
        arguments = jax.tree.map(describe, (program.arguments, program.results))
        text = "\n".join(
            [
                source_fingerprint(),
                machine_fingerprint(),
                program.name,
                describe(program.function),
                str(arguments),
                str(program.donated),
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def _load(self, program: Program, path: Path) -> Callable[..., Any] | None:
        trees = (
            jax.tree.structure((program.arguments, {})),
            jax.tree.structure(program.results),
        )
        ordered = list(jax.tree.leaves(program.results)[0].sharding.mesh.devices.flat)
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return None  # cleared since we looked
        digest, payload = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            logger().warning("%s is damaged; %s is compiled again", path, program.name)
            return None
        return serialize_executable.deserialize_and_load(payload, *trees, execution_devices=ordered)


class Executables(Mapping[Any, Callable[..., Any]]):
    """The executables of many programs by key, made by threads in the background.

    Whoever asks for one that is not there yet makes it, or waits for the thread that does. `wait`
    returns when all are there. What a thread could not make fails again for whoever asks for it.
    `seconds` has, by name, what each that is there took to compile or load; they are made side by
    side, so the sum is more than the time that passed.
    """

    def __init__(
        self,
        store: ProgramStore,
        programs: dict[Any, Program],
        progress: Callable[[str], None],
        threads: int,
    ) -> None:
        self._store = store
        self._programs = programs
        self._progress = progress
        self._begin = time.monotonic()
        self.seconds: dict[str, float] = {}
        self._ready: dict[Any, Callable[..., Any]] = {}
        self._locks = {key: threading.Lock() for key in programs}
        self._todo = iter(list(programs))
        self._turn = threading.Lock()
        self._stopped = False
        before = threading.stack_size(THREAD_STACK_BYTES)
        self._threads = [
            threading.Thread(target=self._make, name=f"programs {n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        threading.stack_size(before)
        # A daemon thread inside the compiler must not outlive the interpreter.
        if self._threads:
            atexit.register(self.stop)

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        ready = self._ready.get(key)
        if ready is not None:
            return ready
        with self._locks[key]:
            if key not in self._ready:
                name, start = self._programs[key].name, time.monotonic()
                self._ready[key] = self._store.get(self._programs[key])
                now = time.monotonic()
                self.seconds[name] = now - start
                self._progress(
                    f"programs {len(self._ready)}/{len(self)} ({self._store.compiled} compiled, "
                    f"{self._store.loaded} loaded, {now - self._begin:.1f} s): {name}"
                )
        return self._ready[key]

    def name(self, key: Any) -> str:
        """Returns the name of a program."""
        return self._programs[key].name

    def __iter__(self) -> Iterator[Any]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    def _make(self) -> None:
        while not self._stopped:
            with self._turn:
                key = next(self._todo, None)
            if key is None:
                # Nothing to end any more, and nothing that keeps an engine in memory until exit.
                atexit.unregister(self.stop)
                return
            try:
                self[key]
            except Exception as error:  # whoever needs it gets it raised; the others are made
                logger().warning("%s cannot be made: %s", self._programs[key].name, error)

    def wait(self) -> None:
        """Returns when all are made; raises what making one of them raised."""
        for thread in self._threads:
            thread.join()
        for key in self:
            self[key]

    def stop(self) -> None:
        """Lets the threads end after what they are at."""
        self._stopped = True
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.stop)

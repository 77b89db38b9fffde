# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of an engine: compiled ahead of time, kept, and loaded again.

A program's identity is everything that decides its code: the step's static configuration, the
shapes and shardings of its arguments, our own source, the versions of jax and the machine. A warm
start finds each one by that key and neither traces nor compiles.
"""

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec

import pallas_kernels
import sharding
from engine.buckets import Group, Head, Ladder
from engine.kv import KVLayout, Pool
from engine.log import logger
from engine.sampling import TOP_LOGPROBS, Logprobs
from engine.state import State, empty_state
from engine.step import Hidden, StepConfig, run_body, run_head, run_score

# XLA's lowering recurses deeply over unrolled layers; the default stack of a thread is too small.
THREAD_STACK_BYTES = 64 * 2**20
DIGEST_BYTES = 32  # a stored executable begins with its sha256, so that a torn one is not loaded


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, the abstract values of its arguments, and the shardings of its results."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Any  # abstract values, with shardings
    donated: tuple[int, ...] = ()

    def lower(self) -> jax.stages.Lowered:
        """Returns the program traced and lowered for its arguments' devices."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.results)
        jitted = jax.jit(self.function, donate_argnums=self.donated, out_shardings=shardings)
        return jitted.lower(*self.arguments)


class ProgramFactory:
    """Builds the programs of one engine from its static configuration."""

    def __init__(self, cfg: StepConfig, params: Any, num_pages: int, *, stacked: bool) -> None:
        """`params` is the tree of abstract parameters (ShapeDtypeStruct with shardings)."""
        self.cfg = cfg
        self.params = params
        self.num_pages = num_pages
        self.stacked = stacked
        self.state = self._abstract_state()

    def _array(self, shape: Sequence[int], dtype: Any) -> Any:
        replicated = NamedSharding(self.cfg.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=replicated)

    def _abstract_state(self) -> State:
        cfg = self.cfg
        state = jax.eval_shape(self._empty_state)
        spec = cfg.layout.pool_spec(self.num_pages)
        pool: Pool
        if self.stacked:
            pool = cfg.rules.abstract(cfg.mesh, spec.stacked(cfg.layout.places))
        else:
            pool = (cfg.rules.abstract(cfg.mesh, spec),) * cfg.layout.places
        rest = jax.tree.map(lambda leaf: self._array(leaf.shape, leaf.dtype), state)
        return dataclasses.replace(rest, pool=pool)

    def _empty_state(self) -> State:
        rows = self.cfg.shape.num_rows + 1
        return empty_state(self.cfg.layout, self.num_pages, rows, stacked=self.stacked)

    def _hidden(self, prompt: bool) -> Hidden:
        S, D = self.cfg.shape.num_rows, self.cfg.model.width
        dtype = self.cfg.layout.dtype
        return Hidden(
            sampled_SD=self._array((S, D), dtype),
            row_S=self._array((S,), jnp.int32),
            prompt_CD=self._array((self.cfg.score_tokens, D), dtype) if prompt else None,
        )

    def _logprobs(self, rows: int) -> Logprobs:
        C = min(TOP_LOGPROBS, self.cfg.model.vocab_size)
        return Logprobs(
            logprob_B=self._array((rows,), jnp.float32),
            rank_B=self._array((rows,), jnp.int32),
            top_id_BC=self._array((rows, C), jnp.int32),
            top_logprob_BC=self._array((rows, C), jnp.float32),
        )

    def start(self) -> Program:
        """Returns the program that makes the state of an idle engine."""
        return Program("start", self._empty_state, (), self.state)

    def body(self, body: tuple[Group, ...]) -> Program:
        """Returns the body program of the row groups `body`."""
        groups = "+".join(f"{group.kind}{group.rows}x{group.width}" for group in body)
        packed = self._array((self.cfg.shape.size(body),), jnp.int32)
        hidden = self._hidden(prompt=any(group.kind != "decode" for group in body))
        return Program(
            f"body {groups}",
            partial(run_body, cfg=self.cfg, body=body),
            (self.params, self.state, packed),
            (self.state, hidden),
            donated=(1,),
        )

    def head(self, head: Head) -> Program:
        """Returns a head program; the score head reads the hidden rows of prompt chunks."""
        name = f"head {head.kind}{head.rows}"
        if head.kind == "score":
            hidden = self._hidden(prompt=True).prompt_CD
            wanted = self._array((2, head.rows), jnp.int32)
            function = partial(run_score, cfg=self.cfg)
            arguments = (self.params, hidden, wanted)
            return Program(name, function, arguments, self._logprobs(head.rows))
        tokens = self._array((head.rows,), jnp.int32)
        logprobs = self._logprobs(head.rows) if head.kind == "logprobs" else None
        # The head never reads the prompt's rows: it takes the rest, the same for every body.
        return Program(
            name,
            partial(run_head, cfg=self.cfg, kind=head.kind, rows=head.rows),
            (self.params, self.state, self._hidden(prompt=False)),
            (self.state, (tokens, logprobs)),
            donated=(1,),
        )


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
    parts = [
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        client.platform,
        client.platform_version,
    ]
    parts += [device.device_kind for device in jax.devices()]
    parts.append(os.environ.get("XLA_FLAGS", ""))
    if client.platform == "cpu" and Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        parts.append(next((line for line in lines if line.startswith(("flags", "Features"))), ""))
    return "\n".join(parts)


def describe(value: Any) -> str:
    """Returns a text that is equal only for equal static values and abstract arrays."""
    if isinstance(value, jax.ShapeDtypeStruct):
        spec = value.sharding.spec if value.sharding else None
        return f"{value.shape}{value.dtype}{spec}"
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

    def get(self, program: Program) -> Callable[..., Any]:
        """Returns the executable of `program`; a damaged file is replaced."""
        path = self._path(program)
        if path is not None and path.exists():
            executable = self._load(program, path)
            if executable is not None:
                with self._lock:
                    self.loaded += 1
                return executable
        compiled = program.lower().compile()
        with self._lock:
            self.compiled += 1
        if path is not None:
            payload, _, _ = serialize_executable.serialize(compiled)
            partial_file = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            partial_file.write_bytes(hashlib.sha256(payload).digest() + payload)
            os.replace(partial_file, path)
        return compiled

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
        devices = {d for leaf in jax.tree.leaves(program.results) for d in leaf.sharding.device_set}
        ordered = sorted(devices, key=lambda device: device.id)
        stored = path.read_bytes()
        digest, payload = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            logger().warning("%s is damaged; %s is compiled again", path, program.name)
            return None
        return serialize_executable.deserialize_and_load(payload, *trees, execution_devices=ordered)

    def get_all(
        self, programs: dict[Any, Program], progress: Callable[[str], None]
    ) -> dict[Any, Callable[..., Any]]:
        """Returns the executables of `programs` by key, made in parallel; `progress` gets lines."""
        begin = time.monotonic()
        done: dict[Any, Callable[..., Any]] = {}
        before = threading.stack_size(THREAD_STACK_BYTES)
        try:
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                futures = {pool.submit(self.get, program): key for key, program in programs.items()}
                for future in concurrent.futures.as_completed(futures):
                    key = futures[future]
                    done[key] = future.result()
                    seconds = time.monotonic() - begin
                    progress(
                        f"programs {len(done)}/{len(programs)} ({self.compiled} compiled, "
                        f"{self.loaded} loaded, {seconds:.1f} s): {programs[key].name}"
                    )
        finally:
            threading.stack_size(before)
        return done


@dataclasses.dataclass(frozen=True)
class Programs:
    """The executables a running engine calls, by what they are for."""

    start: Callable[..., Any]
    bodies: dict[tuple[Group, ...], Callable[..., Any]]
    heads: dict[Head, Callable[..., Any]]

    @property
    def count(self) -> int:
        """How many programs there are."""
        return 1 + len(self.bodies) + len(self.heads)


def build_programs(
    factory: ProgramFactory, ladder: Ladder, store: ProgramStore, progress: Callable[[str], None]
) -> Programs:
    """Returns all programs of the ladder, compiled or loaded."""
    wanted: dict[Any, Program] = {body: factory.body(body) for body in ladder.bodies}
    wanted |= {head: factory.head(head) for head in ladder.heads()}
    wanted["start"] = factory.start()
    done = store.get_all(wanted, progress)
    return Programs(
        start=done["start"],
        bodies={body: done[body] for body in ladder.bodies},
        heads={head: done[head] for head in ladder.heads()},
    )


def coarse_pages(pages: int) -> int:
    """Returns `pages` rounded down to a grid of two steps an octave, so that starts agree."""
    power = 1 << max(pages, 1).bit_length() - 1
    return power + power // 2 if pages >= power + power // 2 else power


def pool_pages(
    layout: KVLayout, *, tokens_wanted: int, free_bytes: int, limit_bytes: int | None
) -> int:
    """Returns the number of pages that hold `tokens_wanted` or as many as fit, on the grid.

    `tokens_wanted` counts tokens of all groups together. Raises ValueError when not even two
    pages fit.
    """
    budget = free_bytes if limit_bytes is None else min(free_bytes, limit_bytes)
    wanted = -(-tokens_wanted // layout.page_size) * len(layout.groups) + 1
    pages = min(wanted, budget // layout.page_bytes)
    if pages < 2:
        raise ValueError(
            f"the KV pool has {budget} bytes and one page takes {layout.page_bytes}; free memory, "
            "raise memory_fraction, or use a smaller page_size"
        )
    return coarse_pages(pages) if pages < wanted else wanted

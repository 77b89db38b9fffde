# SPDX-License-Identifier: Apache-2.0
"""From an EngineConfig to a running Engine: the choices made at start, in order."""

import dataclasses
import errno
import functools
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints import store
from engine.batch import BatchShape
from engine.buckets import Ladder
from engine.company import Leader, check_agreement
from engine.config import EngineConfig
from engine.deterministic import check_rows
from engine.disk_cache import DiskCache
from engine.expert_places import expert_places
from engine.fingerprint import kv_fingerprint
from engine.host_pages import page_places, stripes_of
from engine.kv import KVLayout, kv_layout, lanes_of
from engine.loading import (
    Model,
    abstract_parameters,
    check_model,
    generation_defaults,
    load_model,
    open_model,
    stored_dtype,
)
from engine.log import logger
from engine.loop import Engine
from engine.memo import Memo
from engine.memory import available_bytes, check_pages, default_pages, device_tree_bytes
from engine.models.config import ModelConfig
from engine.models.split import device_config, split_config, with_backend, with_slots
from engine.models.tree import fuse, is_fused, is_stacked
from engine.mover import Mover
from engine.pages import FilePool, PagePool
from engine.params import SamplingParams
from engine.program_store import ProgramStore, machine_fingerprint
from engine.programs import ProgramFactory, build_programs
from engine.rebalance import Balancer
from engine.scheduler import Scheduler
from engine.step_config import StepConfig
from engine.strict import CompileCounter
from engine.waiting import Admission, Tenants
from engine.worker import Worker
from pallas_kernels import backends
from sharding import (
    ALONE,
    EXPERT_PARALLEL,
    RULES,
    Axis,
    Rules,
    devices_along,
    make_mesh,
    parse_mesh,
)
from sharding.processes import Channel, Group, group_of


@dataclasses.dataclass(frozen=True)
class Built:
    """A running engine, and what was decided on the way to it."""

    engine: Engine
    model: Model
    max_model_len: int
    ladder: Ladder
    factory: ProgramFactory
    page: Any  # the abstract value of one of a partition in the host's memory
    fingerprint: Callable[[], str]  # of what the numbers in pages depend on
    store: ProgramStore
    default_params: SamplingParams
    phases: dict[str, float]  # seconds of the start, by phase, in order
    channel: Channel | None  # to the other processes that run it


class PhaseClock:
    """Seconds by phase, in order."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, phase: str) -> None:
        """Ends `phase`, which began where the one before ended."""
        now = time.monotonic()
        self.phases[phase] = now - self._last
        self._last = now


def build_engine(config: EngineConfig) -> Built:
    """Returns the engine of `config`, all weights loaded and all programs ready."""
    clock = PhaseClock()
    group = group_of(config.replicas)
    channel = Channel(group) if group.size > 1 else None
    model = open_model(store.resolve(config.model))
    if channel is not None:
        check_agreement(channel, config, model.checkpoint)
        check_alone(config)
    default_params = SamplingParams()
    if config.generation_config == "auto":
        default_params = generation_defaults(model)
    clock.end("open the model")
    platform = jax.default_backend()
    dtype = compute_dtype(config, model, platform)
    max_model_len = context_length(config, model.config.max_position)
    page_size = config.page_size or default_page_size(platform)
    mesh = engine_mesh(config.mesh, group)
    rules = EXPERT_PARALLEL if config.expert_parallel else RULES
    if config.expert_parallel and model.config.experts is None:
        raise ValueError(f"expert_parallel is of experts, which a {model.config.family} has not")
    if config.expert_parallel and rules.ways(mesh, "experts") == 1:
        raise ValueError("expert_parallel needs a mesh with data, expert or tensor; leave it out")
    if config.num_redundant_experts or config.rebalance_interval:
        check_experts(config, mesh, rules)
        counts = config.rebalance_interval > 0
        slots = with_slots(model.config, config.num_redundant_experts, counts=counts)
        check_copies(config, model.config, rules.ways(mesh, "experts"))
        model = dataclasses.replace(model, config=slots)
    ways = mesh.shape["tensor"]
    split = split_config(model.config, ways, rules.ways(mesh, "expert_ffn"))
    stages, axes = mesh.shape["pipe"], rules.mesh_axes("experts")
    part = device_config(split, ways, rules.ways(mesh, "experts"), stages, axes)
    form = dict(stages=stages, lanes=lanes_of(platform))
    layout = kv_layout(part, page_size, dtype, **form)
    ladder = Ladder(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        pinned=config.deterministic,
        repeats=config.decode_steps > 1,
        ring=ring_width(config, page_size, mesh),
        multiple=stages,
    )
    widest = max(group.rows * group.width for body in ladder.bodies for group in body)
    # A page of a request is dealt out over the sequence axis: the host sees it as one.
    host_page = page_size * mesh.shape["sequence"]
    places_a_row = -(-max_model_len // host_page)
    shape = BatchShape(len(layout.groups), places_a_row, config.max_num_seqs, host_page)
    stacked = is_stacked(platform, stages)
    # Ahead of all that is made in the sizes of the config: from here on tensors vouch for them.
    check_model(model, mesh, rules, dtype, stacked=stacked)
    forbidden = forbidden_ids(model, split.vocab_size)
    parts = rules.ways(mesh, "rows")
    told = ALONE if channel is None or parts == 1 else Axis(rules.mesh_axes("rows"), parts)
    kind = mesh.devices.flat[0].device_kind
    attention = backends.choose(config.attention_backend, platform, kind)
    part = with_backend(part, backends.choose(config.matmul_backend, platform, kind))
    cfg = StepConfig(
        part,
        layout,
        shape,
        mesh,
        rules,
        widest,
        forbidden,
        config.ring_layout,
        told,
        attention,
    )
    params = abstract_parameters(model.config, mesh, rules, dtype, stacked=stacked)
    fused = is_fused(mesh, stacked)
    params = fuse(params) if fused else params
    programs_store = ProgramStore(store.cache_folder() / "programs")

    def factory_of(num_pages: int) -> ProgramFactory:
        steps = config.decode_steps
        return ProgramFactory(
            cfg,
            params,
            num_pages,
            stacked=stacked,
            decode_steps=steps,
            caches=config.prefix_cache,
        )

    num_pages = config.num_pages or default_pages(
        config, layout, max_model_len, factory_of, ladder, programs_store
    )
    if channel is not None:
        num_pages = min(int(pages) for pages in channel.agree("pages", str(num_pages)))
    factory = factory_of(num_pages)
    check_pages(config, factory)
    lower = tier_sizes(config, device_tree_bytes(factory.slot()) * mesh.size, group.size)
    if config.disk_cache_dir is not None:
        for path in disk_folders(Path(config.disk_cache_dir), rules.ways(mesh, "rows")):
            make_disk_folder(path, store.resolve(config.model))
    whole = kv_layout(split, page_size, dtype, **form)
    fingerprint = cached_fingerprint(config, model, whole, (ladder.bodies, mesh.shape))
    places = page_places(mesh, rules, factory.slot())
    disks: list[DiskCache | None] = [None] * len(places)
    if config.disk_cache_dir is not None:
        page = places[0].page
        folders = disk_folders(Path(config.disk_cache_dir), len(places))
        kind = (fingerprint(), page.shape, page.dtype, stripes_of(page))
        disks = [DiskCache(path, *kind) for path in folders]
    clock.end("plan the programs and the pool")

    def load() -> Any:
        weights = load_model(model, mesh, rules, dtype, stacked=stacked)
        return fuse(weights) if fused else weights

    # Weights are read while programs compile: one waits for the disk, the other for the cores.
    with ThreadPoolExecutor(1) as background:
        loading = background.submit(load)
        programs = build_programs(factory, ladder, programs_store, logger().info)
        clock.end("compile the programs, or find them")
        weights = loading.result()
        clock.end("load the weights, beyond that")
    leader = None
    if channel is not None:
        channel.agree("ready", "")
        leader = Leader(channel) if group.rank == 0 else None
        clock.end("wait for the other processes")

    def make_scheduler(disk: DiskCache | None, tenants: Tenants) -> Scheduler:
        groups = len(layout.groups)
        pools = [kind(pages, groups) for kind, pages in zip(LOWER_POOLS, lower, strict=False)]
        scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            page_size=host_page,
            max_model_len=max_model_len,
            groups=layout.groups,
            pool=PagePool(num_pages, 1, len(layout.groups)),
            ladder=ladder,
            admission=Admission(
                policy=config.policy,
                age_bound=config.age_bound,
                max_num_waiting=config.max_num_waiting,
                watermark=config.watermark,
                max_num_seqs_per_tenant=config.max_num_seqs_per_tenant,
                tokens_per_s_per_tenant=config.tokens_per_s_per_tenant,
            ),
            static=config.batching == "static",
            pinned=config.deterministic,
            decode_steps=config.decode_steps,
            prefix_cache=config.prefix_cache,
            lower=pools,
            preemption=config.preemption,
            tenants=tenants,
        )
        if disk is not None:
            disk.restore(scheduler.cache, pools[-1].capacity)
        return scheduler

    def make_schedulers() -> list[Scheduler]:
        tenants = Tenants(config.max_num_seqs_per_tenant, config.tokens_per_s_per_tenant)
        return [make_scheduler(disk, tenants) for disk in disks]

    worker = Worker(
        programs,
        weights,
        dataclasses.replace(split, stages=stages),
        [Mover(programs, disk, place) for disk, place in zip(disks, places, strict=True)],
        leader,
    )
    engine = Engine(
        worker=worker,
        store=programs_store,
        make_schedulers=make_schedulers,
        ladder=ladder,
        shape=shape,
        tokenizer=model.tokenizer,
        overlap=config.overlap,
        counter=CompileCounter() if config.strict else None,
        balancer=make_balancer(config, model.config, mesh, rules),
        follows=group.rank > 0,
    )
    if config.deterministic and group.rank == 0:
        check_rows(engine, model.config.vocab_size, ladder.rows, max_model_len)
    clock.end("make the pool")
    report(model, cfg, config.mesh, num_pages, host_page, max_model_len, engine)
    return Built(
        engine,
        model,
        max_model_len,
        ladder,
        factory,
        places[0].page,
        fingerprint,
        programs_store,
        default_params,
        clock.phases,
        channel,
    )


# By tier below the device: the pool of so many pages, of so many groups.
LOWER_POOLS = (lambda pages, groups: PagePool(pages, 1, groups), FilePool)


def tier_sizes(config: EngineConfig, page_bytes: int, processes: int = 1) -> list[int]:
    """Returns the pages of the tiers below the device that there are; ValueError if none fits.

    The host's are those of so many processes together, which have equal shares of each page.
    """
    sizes = []
    wanted = {"host_cache_gb": config.host_cache_gb}
    if config.disk_cache_dir is not None:
        wanted["disk_cache_gb"] = config.disk_cache_gb
    for name, gigabytes in wanted.items():
        if not gigabytes:
            continue
        pages = int(gigabytes * 1e9) // page_bytes + 1  # and the null page
        if pages < 2:
            raise ValueError(
                f"{name}={gigabytes} has no room for a page of {page_bytes} bytes; raise it"
            )
        sizes.append(pages)
    free = available_bytes()
    if sizes and sizes[0] * page_bytes // processes > free:
        of = f" for a share of {processes}" if processes > 1 else ""
        raise ValueError(
            f"host_cache_gb={config.host_cache_gb} is more than the {free / 1e9:.2f} GB that are "
            f"free{of}; use less"
        )
    return sizes


def disk_folders(folder: Path, partitions: int) -> list[Path]:
    """Returns the folder of each partition's files: the one that was named, or folders in it."""
    if partitions == 1:
        return [folder]
    return [folder / f"partition-{number}-of-{partitions}" for number in range(partitions)]


def make_disk_folder(path: Path, model: Path) -> None:
    """Makes the folder of the disk tier, for its owner alone; ValueError if it cannot be used."""
    if path.resolve().is_relative_to(model.resolve()):
        raise ValueError(
            f"disk_cache_dir={os.fspath(path)!r} is in the model's folder, whose files say what "
            "model it is; name another"
        )
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"disk_cache_dir={os.fspath(path)!r} must be a folder that can be read and written "
            f"({error.strerror}); name another"
        ) from None


def cached_fingerprint(
    config: EngineConfig, model: Model, layout: KVLayout, programs: object
) -> Callable[[], str]:
    """Returns a function to the digest of what pages depend on, worked out when it is asked.

    `programs`: what the last bits of their numbers depend on, as a text tells it.
    """

    @functools.cache
    def fingerprint() -> str:
        memo = Memo(store.cache_folder() / "digests.json")
        path = store.resolve(config.model)
        # With deterministic=True pages are the same to the last bit, so of the same programs.
        exact = (programs, machine_fingerprint()) if config.deterministic else None
        return kv_fingerprint(path, model.config, layout, exact, memo)

    return fingerprint


def engine_mesh(text: str, group: Group) -> Mesh:
    """Returns the mesh that `EngineConfig.mesh` asks for, of a group's devices.

    Raises ValueError when there are too few of them, and where there are several processes, which
    each are to have a part of it, too many.
    """
    sizes, devices = parse_mesh(text), group.devices()
    count, there = math.prod(sizes.values()), len(devices)
    if count > there or (group.size > 1 and count < there):
        of = f" of {group.size} processes" if group.size > 1 else ""
        raise ValueError(
            f"mesh={text!r} needs {count} devices, {there}{of} are there; use a "
            f"{'smaller' if count > there else 'larger'} one"
        )
    return make_mesh(devices[:count], **sizes)


def check_experts(config: EngineConfig, mesh: Mesh, rules: Rules) -> None:
    """Raises ValueError where experts cannot have slots."""
    asked = "num_redundant_experts" if config.num_redundant_experts else "rebalance_interval"
    if rules.ways(mesh, "experts") == 1:
        raise ValueError(
            f"{asked} needs a mesh with an expert axis, such as expert=8, or expert_parallel=True"
        )
    if mesh.shape["pipe"] > 1:
        raise ValueError(f"{asked} does not go with stages; leave pipe out of the mesh")
    if config.deterministic and config.rebalance_interval:
        raise ValueError("rebalance_interval does not go with deterministic=True; leave one out")


def check_copies(config: EngineConfig, model: ModelConfig, ways: int) -> None:
    """Raises ValueError for more copies than one of each expert on each device."""
    most = model.experts.count * (ways - 1) if model.experts is not None else 0
    if config.num_redundant_experts > most:
        raise ValueError(
            f"num_redundant_experts={config.num_redundant_experts} is more than a copy of each "
            f"expert on each of {ways} devices; use at most {most}"
        )


def make_balancer(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, rules: Rules
) -> Balancer | None:
    """Returns what places experts anew, if that is asked for.

    The devices of the expert axis count as hosts where processes have equal runs of them.
    """
    if not config.rebalance_interval or model.experts is None:
        return None
    ways, nodes = rules.ways(mesh, "experts"), 1
    hosts = [device.process_index for device in devices_along(mesh, rules.mesh_axes("experts"))]
    runs = len(dict.fromkeys(hosts))
    if hosts == sorted(hosts) and ways % runs == 0 and model.experts.slots % runs == 0:
        nodes = runs
    return Balancer(model.experts, expert_places(model), ways, nodes, config.rebalance_interval)


def check_alone(config: EngineConfig) -> None:
    """Raises ValueError for settings that an engine of several processes has not."""
    if config.disk_cache_dir is not None:
        raise ValueError(
            "disk_cache_dir needs an engine of one process, which has whole pages; leave it out, "
            "or give each replica one process"
        )


def ring_width(config: EngineConfig, page_size: int, mesh: Mesh) -> int:
    """Returns the tokens of a ring's widest piece, as many as a step may have; 0 for no rings."""
    ways = mesh.shape["sequence"]
    if ways == 1 or config.deterministic:
        return 0
    grain = ways * page_size * (2 if config.ring_layout == "zig-zag" else 1)
    width = config.max_num_batched_tokens // grain * grain
    if not width:
        logger().warning(
            "mesh=%r: no piece of a prompt is shared out over the sequence axis, whose pages take "
            "%d tokens; raise max_num_batched_tokens to that",
            config.mesh,
            grain,
        )
    return width


def compute_dtype(config: EngineConfig, model: Model, platform: str) -> np.dtype:
    """Returns the dtype of weights and activations; "auto" is float32 on CPU, else the file's."""
    if config.dtype != "auto":
        return np.dtype(jax.numpy.dtype(config.dtype))
    if platform == "cpu":
        logger().info("dtype auto: float32, the fastest that XLA computes in on CPU")
        return np.dtype(np.float32)
    dtype = stored_dtype(model.checkpoint)
    logger().info("dtype auto: %s, as the checkpoint has it", dtype)
    return dtype


def default_page_size(platform: str) -> int:
    """Returns the tokens of a page where nothing is said."""
    return 16 if platform == "cpu" else 64


def context_length(config: EngineConfig, longest: int) -> int:
    """Returns the context limit; raises ValueError when more is asked than the model's longest."""
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ValueError(
            f"max_model_len={config.max_model_len} is over the model's own limit of {longest}; "
            "use at most that"
        )
    return config.max_model_len


def forbidden_ids(model: Model, size: int) -> np.ndarray | None:
    """Returns bool [size], true for ids beyond the vocabulary and those without a tokenizer entry;
    None if there are none."""
    forbidden = np.arange(size) >= model.config.vocab_size
    if model.tokenizer is not None:
        known = [model.tokenizer.known(token) for token in range(model.config.vocab_size)]
        forbidden[: len(known)] = ~np.array(known)
    return forbidden if forbidden.any() else None


def report(
    model: Model,
    cfg: StepConfig,
    mesh: str,
    num_pages: int,
    host_page: int,
    max_model_len: int,
    engine: Engine,
) -> None:
    """Logs the one line of a start; a page has `host_page` tokens."""
    if not engine.scheduler.fits(max_model_len):
        logger().warning(
            "a request of max_model_len=%d tokens cannot fit the pool of %d pages of %d tokens; "
            "raise num_pages or lower max_model_len",
            max_model_len,
            num_pages,
            host_page,
        )
    logger().info(
        "%s, %s layers, %s%s; attention by %s%s; context %d; pool of %d pages of %d tokens "
        "(%.2f GB%s); "
        "%d programs, %d compiled now",
        model.config.family,
        model.config.num_layers,
        cfg.layout.dtype.name,
        f", {mesh}" if mesh else "",
        cfg.attention,
        f", experts by {cfg.model.experts.backend}" if cfg.model.experts else "",
        max_model_len,
        num_pages,
        host_page,
        num_pages * cfg.layout.page_bytes / 1e9,
        " a device" if mesh else "",
        len(engine.worker.programs),
        engine.stats()["programs_compiled"],
    )

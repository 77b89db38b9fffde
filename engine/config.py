# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine, frozen and checked when built, and the checks they are made of."""

import dataclasses
import math
import numbers
import os
from typing import Any

MAX_SEED = 2**64 - 1  # a seed travels to the device as two 32-bit words
DTYPES = ("auto", "float32", "bfloat16", "float16")
GENERATION_CONFIGS = ("auto", "none")
BATCHING = ("continuous", "static")
PREEMPTIONS = ("recompute", "park")
BACKENDS = ("auto", "pallas", "xla")
RING_LAYOUTS = ("striped", "contiguous", "zig-zag")
POLICIES = ("fcfs", "priority", "shortest_first", "longest_prefix")


def check_int(name: str, value: Any, *, low: int, high: int | None = None, remedy: str) -> None:
    """Raises ValueError unless `value` is a whole number (no bool, no float) in [low, high]."""
    limits = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be a whole number {limits}; {remedy}")
    if int(value) < low or (high is not None and int(value) > high):
        raise ValueError(f"{name}={value!r} must be {limits}; {remedy}")


def check_float(name: str, value: Any, *, limits: str, remedy: str) -> None:
    """Raises ValueError unless `value` is a finite number (no bool); `limits` is for the text."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number {limits}; {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine runs and how much of the machine it takes.

    model: a path, a known or a hub name.   dtype: one of DTYPES; "auto" lets the platform choose.
    max_model_len: prompt and output tokens of one request; None: the model's own limit.
    max_num_seqs: rows, so requests that run at once.
    max_num_batched_tokens: tokens of one step, decodes and prefill chunks together.
    page_size: tokens of a page, a power of two; None: the platform's.
    num_pages: pages of the pool, one of them reserved; None: as memory allows.
    mesh: devices by what is split over them, such as "tensor=4"; "" is one device. All of AXES in
        sharding/mesh.py have size 1 if not given.
    replicas: groups of processes that each have the model, for evaluation; see scripts/launch.py.
    expert_parallel: experts stay whole, shared out over all devices of data, expert and tensor
        together, where otherwise each is split over tensor, and `expert` alone shares them out.
    num_redundant_experts: places for further copies of experts that are much asked for.
    rebalance_interval: steps between looks at the experts' loads, after which they are placed anew
        over the expert axis; 0: they stay where they are.
    attention_backend, matmul_backend: one of BACKENDS, who computes attention over pages, and the
        products of experts: kernels or XLA's own code; "auto" takes kernels on TPU and GPU. On CPU
        "pallas" has them interpreted, which is for tests.
    ring_layout: one of RING_LAYOUTS: which tokens of a long piece of a prompt each device of a
        sequence axis computes.
    memory_fraction: share of an accelerator's memory for weights, programs and pages.
    prefix_cache: keep the keys and values of what was computed, for requests that begin alike.
    host_cache_gb: of the host's memory for pages that the device has no room for; 0 is none.
    disk_cache_dir, disk_cache_gb: a folder for pages that the host has no room for, also for later
        starts, and how much of it; None is none.
    preemption: one of PREEMPTIONS: what a request that gives way has is kept until room is needed,
        or copied to the host at once.
    policy: one of POLICIES: who of those that wait is tried first. fcfs: as they came. priority:
        the lowest `SamplingParams.priority`; such also give way last. shortest_first: the lowest
        limit of tokens. longest_prefix: the one of which most is kept.
    age_bound: steps after which a request comes before all that arrived later.
    max_num_waiting: requests that may wait; one more is refused. None: no limit.
    watermark: share of the pages that stays free for those that run when another starts.
    max_num_seqs_per_tenant, tokens_per_s_per_tenant: what each `SamplingParams.tenant` may run at
        once, and have computed on average, prompts (without what is kept) and outputs together.
    overlap: plan a step before the last one's tokens are read.
    batching: one of BATCHING; "static" is a baseline for benchmarks: batches of `max_num_seqs`
        requests in arrival order, full rows until the last ends.
    seed: where the seeds of requests without one come from; None: fresh ones each run.
    generation_config: "auto" takes sampling defaults from the checkpoint's generation_config.json,
        "none" leaves those of SamplingParams.
    deterministic: a request's numbers are the same to the last bit in any company, whatever was
        preempted. One body of decodes at full width, one of prompts, never in one step: slower
        while few run. Refused where the platform does not keep it.
    decode_steps: decodes that run in one dispatch while nothing else is to be done; 1 is off.
    strict: a compilation after the start, or anything that would be a warning, is an error.
    Raises ValueError, naming the setting, when one of them cannot be.
    """

    model: str | os.PathLike[str]
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    page_size: int | None = None
    num_pages: int | None = None
    mesh: str = ""
    replicas: int = 1
    expert_parallel: bool = False
    num_redundant_experts: int = 0
    rebalance_interval: int = 0
    attention_backend: str = "auto"
    matmul_backend: str = "auto"
    ring_layout: str = "striped"
    memory_fraction: float = 0.9
    prefix_cache: bool = True
    host_cache_gb: float = 0.0
    disk_cache_dir: str | os.PathLike[str] | None = None
    disk_cache_gb: float = 10.0
    preemption: str = "recompute"
    policy: str = "fcfs"
    age_bound: int = 1024
    max_num_waiting: int | None = None
    watermark: float = 0.0
    max_num_seqs_per_tenant: int | None = None
    tokens_per_s_per_tenant: float | None = None
    overlap: bool = True
    batching: str = "continuous"
    seed: int | None = None
    generation_config: str = "auto"
    deterministic: bool = False
    decode_steps: int = 1
    strict: bool = False

    def __post_init__(self):
        if not isinstance(self.model, str | os.PathLike) or not os.fspath(self.model):
            raise ValueError(f"model={self.model!r} must be a path or a known model's name")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not known; use one of {', '.join(DTYPES)}")
        if self.max_model_len is not None:
            remedy = "use None for the model's own limit"
            check_int("max_model_len", self.max_model_len, low=1, remedy=remedy)
        check_int("max_num_seqs", self.max_num_seqs, low=1, remedy="the default is 32")
        check_int(
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            low=1,
            remedy="the default is 512",
        )
        self._check_pages()
        check_float(
            "memory_fraction",
            self.memory_fraction,
            limits="above 0, at most 1",
            remedy="the default is 0.9",
        )
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction={self.memory_fraction!r} must be above 0, at most 1; "
                "it is a share, so write 90% as 0.9"
            )
        if not isinstance(self.mesh, str):
            raise ValueError(f'mesh={self.mesh!r} must be a text such as "tensor=4"; "" is one')
        for name in ("attention_backend", "matmul_backend"):
            if (value := getattr(self, name)) not in BACKENDS:
                known = ", ".join(BACKENDS)
                raise ValueError(f"{name}={value!r} is not known; use one of {known}")
        if self.ring_layout not in RING_LAYOUTS:
            known = ", ".join(RING_LAYOUTS)
            raise ValueError(f"ring_layout={self.ring_layout!r} is not known; use one of {known}")
        check_int("replicas", self.replicas, low=1, remedy="1 is one model for all processes")
        check_int("num_redundant_experts", self.num_redundant_experts, low=0, remedy="0 is none")
        check_int("rebalance_interval", self.rebalance_interval, low=0, remedy="0 is never")
        check_int("decode_steps", self.decode_steps, low=1, high=64, remedy="1 is off")
        if self.deterministic and self.decode_steps > 1:
            raise ValueError(f"decode_steps={self.decode_steps} must be 1 with deterministic=True")
        if self.deterministic and self.batching != "continuous":
            raise ValueError(f"batching={self.batching!r} does not go with deterministic=True")
        for name in ("expert_parallel", "prefix_cache", "overlap", "deterministic", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.generation_config not in GENERATION_CONFIGS:
            known = ", ".join(GENERATION_CONFIGS)
            raise ValueError(
                f"generation_config={self.generation_config!r} is not known; use one of {known}"
            )
        if self.batching not in BATCHING:
            known = ", ".join(BATCHING)
            raise ValueError(f"batching={self.batching!r} is not known; use one of {known}")
        self._check_tiers()
        self._check_admission()
        if self.seed is not None:
            check_int("seed", self.seed, low=0, high=MAX_SEED, remedy="use None for a fresh one")

    def _check_tiers(self) -> None:
        for name in ("host_cache_gb", "disk_cache_gb"):
            remedy = "it is in 10^9 bytes, 0 is none"
            check_float(name, getattr(self, name), limits="of at least 0", remedy=remedy)
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 0; {remedy}")
        if self.preemption not in PREEMPTIONS:
            known = ", ".join(PREEMPTIONS)
            raise ValueError(f"preemption={self.preemption!r} is not known; use one of {known}")
        for name, is_set in (
            ("host_cache_gb", self.host_cache_gb > 0),
            ("disk_cache_dir", self.disk_cache_dir is not None),
        ):
            if is_set and not self.prefix_cache:
                raise ValueError(f"{name} needs prefix_cache=True; leave one of them out")
        if self.preemption == "park" and not self.host_cache_gb:
            raise ValueError("preemption='park' needs host_cache_gb above 0")
        folder = self.disk_cache_dir
        is_path = isinstance(folder, str | os.PathLike) and bool(os.fspath(folder))
        if folder is not None and not is_path:
            raise ValueError(f"disk_cache_dir={folder!r} must be a path; None is no such tier")
        if self.disk_cache_dir is not None and not self.disk_cache_gb:
            raise ValueError("disk_cache_dir needs disk_cache_gb above 0; leave one of them out")
        if self.disk_cache_dir is not None and not self.host_cache_gb:
            raise ValueError(
                "disk_cache_dir needs host_cache_gb above 0, since pages go to disk by the host; "
                "0.5 will do"
            )

    def _check_admission(self) -> None:
        if self.policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"policy={self.policy!r} is not known; use one of {known}")
        check_int("age_bound", self.age_bound, low=0, remedy="the default is 1024")
        for name in ("max_num_waiting", "max_num_seqs_per_tenant"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=1, remedy="None is no limit")
        limits, remedy = "from 0 to below 1", "it is a share, so write 1% as 0.01"
        check_float("watermark", self.watermark, limits=limits, remedy=remedy)
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark!r} must be {limits}; {remedy}")
        if (rate := self.tokens_per_s_per_tenant) is not None:
            remedy = "None is no limit"
            check_float("tokens_per_s_per_tenant", rate, limits="above 0", remedy=remedy)
            if rate <= 0:
                raise ValueError(f"tokens_per_s_per_tenant={rate!r} must be above 0; {remedy}")

    def _check_pages(self) -> None:
        if self.page_size is not None:
            remedy = "use None for the platform's own"
            check_int("page_size", self.page_size, low=1, remedy=remedy)
            if self.page_size & (self.page_size - 1):
                near = 1 << (int(self.page_size).bit_length() - 1)
                raise ValueError(
                    f"page_size={self.page_size} must be a power of two; try {near} or {2 * near}"
                )
        if self.num_pages is not None:
            remedy = "page 0 is reserved; use None to size the pool by memory_fraction"
            check_int("num_pages", self.num_pages, low=2, remedy=remedy)

# SPDX-License-Identifier: Apache-2.0
"""jax's own kernels are called right: interpreted they give what ours do, and they compile for
chips that are not there, as do the programs that time them and us."""

import contextlib
import importlib
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine import aot
from pallas_kernels.backends import XLA, Backend
from pallas_kernels.paged_attention import NO_WINDOW
from scripts import check_kernels, tune_kernels
from scripts.benchmarks import kernel_peers, kernels
from scripts.benchmarks.kernel_peers import PEERS, Declines
from scripts.benchmarks.kernel_timing import IN_PLACE, chained, difference, given
from scripts.benchmarks.peer import ROOT

DECODE, CHUNK = "llama-3.1-8b, decode", "llama-3.1-8b, chunk"
# Peer, operation, shape: whatever can be interpreted, or is XLA's.
HERE = [
    (partial(kernel_peers.paged_gpu, interpret=True), "paged_attention", DECODE),
    (partial(kernel_peers.decode_gpu, interpret=True), "paged_attention", DECODE),
    (kernel_peers.paged_tpu, "paged_attention", DECODE),
    (partial(kernel_peers.mha_gpu, interpret=True), "flash_attention", "llama-3.1-8b"),
    (partial(kernel_peers.cudnn, implementation="xla"), "flash_attention", "llama-3.1-8b"),
    (kernel_peers.flash_tpu, "flash_attention", "llama-3.1-8b"),
    (partial(kernel_peers.gmm, interpret=True), "grouped_matmul", "qwen3-30b-a3b up, 1 token"),
    (kernel_peers.ragged_dot, "grouped_matmul", "qwen3-30b-a3b up, 1 token"),
    *(
        (kernel_peers.plain_matmul, "quantized_matmul", f"llama-3.1-8b {name}")
        for name in (
            "up, 64 rows, int8",
            "up, 64 rows, float8",
            "up, 64 rows, W8A8",
            "down, 64 rows, int4 by 128",
        )
    ),
]


def cases_of(operation):
    return importlib.import_module(f"pallas_kernels.{operation}.cases")


def both(make, operation, shape):
    """Returns (a peer's result, ours)."""
    cases = cases_of(operation)
    call, _ = cases.abstract_call(shape, XLA)
    arguments = jax.jit(lambda: cases.concrete(shape, XLA, np.random.default_rng(0)))()
    wanted = jax.tree.leaves(jax.jit(call)(*arguments))[0]
    peer = make(shape)
    # jax's kernels mix dtypes and ranks as ours do not.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = jax.tree.leaves(jax.jit(peer.call)(*peer.arrange(*arguments)))[0]
    assert found.shape == wanted.shape
    assert float(jnp.abs(wanted.astype(jnp.float32)).max()) > 0.01
    return found, wanted


def small(operation, name):
    cases = cases_of(operation)
    shape = cases.small(cases.SHAPES[name])
    if operation == "flash_attention":
        return shape._replace(queries=128, cells=128, heads=(4, 2))
    return shape


@pytest.mark.parametrize("make, operation, name", HERE)
def test_a_peer_gives_what_we_do(make, operation, name):
    is_of_tpu = make in (kernel_peers.paged_tpu, kernel_peers.flash_tpu)
    with pltpu.force_tpu_interpret_mode() if is_of_tpu else contextlib.nullcontext():
        assert difference(*both(make, operation, small(operation, name))) < 0.02


@pytest.mark.parametrize("name", [DECODE, CHUNK, "gemma-3-27b, decode, window"])
def test_ragged_paged_attention_is_given_what_we_are(name, monkeypatch):
    """No interpreter does the kernel; jax's reference takes the same arguments."""

    def reference(*arguments, sm_scale, sliding_window, soft_cap, **blocks):
        assert blocks.keys() == {
            *("vmem_limit_bytes", "num_kv_pages_per_block", "num_queries_per_block")
        }
        with jax.disable_jit():  # which it needs, having lengths that it slices by
            return ref_ragged_paged_attention(
                *arguments,
                sm_scale=sm_scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
            )

    monkeypatch.setattr(kernel_peers, "ragged_paged_attention", reference)
    monkeypatch.setattr(jax, "jit", lambda call: call)
    shape = small("paged_attention", name)
    if shape.window < NO_WINDOW:
        shape = shape._replace(window=70)
    assert difference(*both(kernel_peers.ragged_paged, "paged_attention", shape)) < 0.02


def test_peers_say_what_they_do_not_do():
    def why(make, operation, name):
        cases = cases_of(operation)
        with pytest.raises(Declines) as caught:
            make(cases.SHAPES[name])
        return str(caught.value)

    peers = kernel_peers
    for name in (f"{DECODE}, int8", f"{DECODE}, float8"):
        assert "no scale" in why(peers.ragged_paged, "paged_attention", name)
    assert "trees" in why(peers.ragged_paged, "paged_attention", "llama-3.1-8b, tree")
    assert "decodes only" in why(peers.paged_tpu, "paged_attention", CHUNK)
    assert "decodes only" in why(peers.paged_gpu, "paged_attention", CHUNK)
    windowed = "gemma-3-27b, decode, window"
    assert "windows" in why(peers.decode_gpu, "paged_attention", windowed)
    assert "begin where" in why(peers.mha_gpu, "flash_attention", "gemma-3-27b")
    assert "as wide" in why(peers.flash_tpu, "flash_attention", "deepseek-v3")
    assert "codes" in why(peers.gmm, "grouped_matmul", "mixtral-8x7b up, 64 tokens, int8")


# All that is compiled ahead of time, in a process of its own: what finds the compilers is set
# before jax looks for devices.
COMPILE = """
import importlib, os, sys
from engine import aot
os.environ.update(aot.compiler_settings())
aot.find_gpu_compiler()
import jax
jax.config.update("jax_platforms", "cpu")
from tests.scripts.test_kernel_peers import compile_for
compile_for(sys.argv[1])
"""
CHIPS = {"v5e": "tpu", "v6e": "tpu", "h100": "gpu"}
OURS = {
    "paged_attention": DECODE,
    "latent_attention": "deepseek-v3, decode",
    "flash_attention": "llama-3.1-8b",
    "kv_write": DECODE,
    "quantized_matmul": "llama-3.1-8b up, 16 rows, int8",
    "grouped_matmul": "qwen3-30b-a3b up, 64 tokens, int8",
}
KERNEL_CALL = {"tpu": "tpu_custom_call", "gpu": "triton"}
NOT_KERNELS = ("cudnn", "plain matmul", "ragged_dot")  # XLA's own, or what needs a GPU to compile


@pytest.mark.slow
@pytest.mark.parametrize(
    "chip", [pytest.param(chip, marks=[pytest.mark.long] * (chip != "h100")) for chip in CHIPS]
)
def test_peers_and_programs_compile_for_chips(chip):
    try:
        aot.compiler_settings()
    except FileNotFoundError:
        pytest.skip("libtpu is not installed; make test-slow does that")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, chip], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    faults = [line for line in lines if not line.endswith(": None")]
    assert not faults and len(lines) > 20, faults


def compile_for(chip):
    """Prints a line for each peer and each of our programs: what, and its fault or None."""
    device, backend = check_kernels.chip_device(chip), Backend(CHIPS[chip], chip)
    for operation, peers in PEERS[backend.kind].items():
        cases = cases_of(operation)
        for name, shape in cases.SHAPES.items():
            if not name.startswith(("llama", "qwen", "mixtral")):
                continue
            arguments = cases.abstract_call(shape, backend)[1]
            for title, make in peers.items():
                try:
                    peer = make(shape)
                except Declines:
                    continue
                arranged = jax.eval_shape(peer.arrange, *arguments)
                found = check_kernels.compiled(peer.call, arranged, device, donated=False)
                fault = found.fault
                if title == "cudnn":  # it gets as far as asking for cuDNN, which is a GPU's
                    fault = None if "cuDNN is not detected" in fault else fault
                elif title in NOT_KERNELS and fault == "the kernel declines it":
                    fault = None
                print(f"{title}, {name}: {fault}", flush=True)
    for operation, name in OURS.items():
        for who in (backend, XLA):
            shape, in_place = cases_of(operation).SHAPES[name], operation in IN_PLACE
            contender = kernels.ours(cases_of(operation), shape, backend, who, in_place)
            fault = program_fault(operation, contender, device, is_kernel=who is backend)
            print(f"{operation}, {name}, {who}: {fault}", flush=True)
    # What the tuner tries: half of a size of the rule's.
    for operation in ("paged_attention", "quantized_matmul"):
        shape = cases_of(operation).SHAPES[OURS[operation]]
        rule = tune_kernels.asked_by(operation, shape, backend).rule
        size = next(name for name in ("pages", "cells", "width") if name in rule)
        sizes = rule | {size: tune_kernels.moved(size, rule[size], -1)}
        contender = tune_kernels.with_sizes(operation, shape, backend, sizes)
        fault = program_fault(operation, contender, device, is_kernel=True)
        print(f"{operation}, {sizes}: {fault}", flush=True)


def program_fault(operation, contender, device, *, is_kernel):
    """Returns what is wrong with the program that times a call."""
    kind, in_place = "gpu" if device.platform in ("gpu", "cuda") else "tpu", contender.in_place
    calls = 2 * contender.copies
    place = NamedSharding(Mesh([device], ("chip",)), PartitionSpec())
    arguments = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place),
        jax.eval_shape(lambda: given(contender, contender.copies)),
    )
    local = jax.shard_map(
        chained(contender.call, calls // contender.copies, in_place),
        mesh=place.mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    made = jax.jit(local, donate_argnums=0 if in_place else ()).lower(*arguments).compile()
    text, memory = made.as_text(), made.memory_analysis()
    entry = text[text.index("\nENTRY ") :]
    mark = KERNEL_CALL[kind]
    if is_kernel and (mark in entry or text.count(mark) < contender.copies):
        return "calls are not in the loop"
    size = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arguments))
    if is_kernel and operation != "flash_attention" and memory.temp_size_in_bytes > size / 4:
        return f"{memory.temp_size_in_bytes} bytes beside {size}: arguments are copied"
    if in_place and memory.alias_size_in_bytes < 0.99 * size:
        return "it is not in place"
    return None

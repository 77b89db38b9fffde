# SPDX-License-Identifier: Apache-2.0
"""Whole engines on meshes of virtual devices say what an engine on one device says.

With the cache of prefixes, chunked prompts and, where a partition has several requests, pools so
small that some are preempted.
"""

import functools
import re

import numpy as np
import pytest

from engine import SamplingParams
from engine.buckets import Group
from engine.build import engine_mesh
from engine.config import RING_LAYOUTS
from engine.kv import kv_layout
from engine.loading import read_config
from engine.models.stages import stage_layers
from engine.programs import total_tokens
from scripts.explain import mesh_lines
from sharding import RULES, parse_mesh
from sharding.layouts import LAYOUTS
from sharding.processes import Group as Processes
from tests.engine.conftest import GOLDEN, greedy, open_on_demand, watch_plans
from tests.fixtures import write_tiny

ROWS, BUDGET, PAGE = 4, 128, 16
LENGTHS = (5, 40, 200, 100, 130, 17, 60, 150)
LONGEST = 240  # cells of the longest request


def prompts():
    rng = np.random.default_rng(0)
    begin = rng.integers(3, 250, size=50).tolist()
    tails = [rng.integers(3, 250, size=length).tolist() for length in LENGTHS]
    return [begin + tail if index % 2 else tail for index, tail in enumerate(tails)]


def open_mesh(arch, mesh, *, tight=False, **options):
    """Returns an engine of few programs; a `tight` pool has room for little but the longest."""
    host_page = PAGE * parse_mesh(mesh).get("sequence", 1)
    path = GOLDEN / "tiny" / arch
    groups = len(kv_layout(read_config(path), PAGE, np.dtype(np.float32)).groups)
    pages = 1 + groups * (1 + -(-LONGEST // host_page) * (1 if tight else 4))
    llm = open_on_demand(
        path,
        mesh=mesh,
        max_num_seqs=ROWS,
        max_num_batched_tokens=BUDGET,
        max_model_len=256,
        num_pages=pages,
        **options,
    )
    ladder, largest = llm.built.ladder, {}
    for body in sorted(ladder.bodies, key=total_tokens):
        largest[tuple(group.kind for group in body)] = body
    kinds = [("decode",), ("chunk", "decode"), *([("ring", "decode")] if ladder.ring else [])]
    ladder.bodies = tuple(largest[kind] for kind in kinds)
    ladder.__dict__.pop("_by_size", None)
    return llm


def outputs(llm):
    """Returns [(tokens, log-probabilities)] of all prompts, two times over, and what was cached."""
    jobs, results, cached = prompts(), [], 0
    for _ in range(2):
        for output in llm.generate(jobs, greedy(40, logprobs=0)):
            [one] = output.outputs
            logprobs = [
                entry[token] for entry, token in zip(one.logprobs, one.token_ids, strict=True)
            ]
            results.append((one.token_ids, [getattr(x, "logprob", x) for x in logprobs]))
            cached += output.metrics.cached_tokens
    return results, cached


@functools.cache
def alone(arch):
    return outputs(open_mesh(arch, ""))[0]


def slow(*case):
    return pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.long])


def some_slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    slow("llama", "tensor=2", {"tight": True}),
    slow("llama", "tensor=4", {}),
    slow("llama", "tensor=8", {}),
    slow("gemma3", "tensor=4", {}),
    slow("olmo2", "tensor=8", {}),
    slow("gpt_oss", "tensor=8", {}),
    slow("deepseek_v3", "tensor=4", {}),
    slow("llama", "data=2", {"tight": True}),
    ("llama", "data=2,tensor=4", {"tight": True}),
    slow("mixtral", "expert=4", {}),
    some_slow("mixtral", "expert=4,tensor=2", {}),
    slow("qwen3_moe", "expert=8", {}),
    ("deepseek_v3", "expert=8", {}),
    slow("deepseek_v3", "data=2,expert=4", {}),
    some_slow("mixtral", "data=2,tensor=2", {"expert_parallel": True}),
    slow("gpt_oss", "expert=2,tensor=2", {"expert_parallel": True}),
    slow("deepseek_v3", "data=2,tensor=4", {"expert_parallel": True}),
    slow("deepseek_v3", "sequence=4", {}),
    slow("gpt_oss", "sequence=4,tensor=2", {"ring_layout": "zig-zag"}),
    *(slow("llama", f"sequence={ways}", {}) for ways in (2, 4)),
    ("llama", "sequence=8", {}),
    *(slow("gpt_oss", f"sequence={ways}", {"ring_layout": "contiguous"}) for ways in (2, 4, 8)),
    *(slow("gpt_oss", f"sequence={ways}", {"ring_layout": "zig-zag"}) for ways in (2, 4)),
    slow("gemma2", "sequence=2,data=2", {}),
    slow("llama", "pipe=2", {"tight": True}),
    slow("gemma3", "pipe=2", {}),
    slow("deepseek_v3", "pipe=3", {}),
    ("llama", "pipe=2,tensor=2,data=2", {}),
    slow("gpt_oss", "pipe=2,sequence=2", {}),
    some_slow("llama", "pipe=2,sequence=2", {}),
    slow("mixtral", "pipe=2,expert=2", {}),
]


@pytest.mark.parametrize("arch, mesh, options", CASES)
def test_a_mesh_says_what_one_device_says(arch, mesh, options):
    llm = open_mesh(arch, mesh, **options)
    results, cached = outputs(llm)
    for (tokens, logprobs), (expected, logprobs_alone) in zip(results, alone(arch), strict=True):
        assert tokens == expected
        np.testing.assert_allclose(logprobs, logprobs_alone, atol=1e-4, rtol=0)
    stats = llm.engine.stats()
    assert cached > 0
    partitions = llm.engine.partitions.parts
    if options.get("tight"):
        assert stats["preemptions"] > 0
    for part in partitions:
        part.cache.check()
        assert part.stats()["steps"] > 0
    if "sequence" in mesh:
        rings = [key for key in llm.engine.worker.programs._ready if "ring" in str(key)]
        assert rings, "no piece was shared out"


@pytest.mark.slow
@pytest.mark.long
def test_several_steps_in_flight_say_the_same():
    """Decodes of a pipeline go round in parts, four steps in one dispatch."""
    jobs = [prompt for prompt in prompts() if len(prompt) < 70]
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=24, presence_penalty=0.5)
    said = []
    for mesh, steps in (("", 1), ("pipe=3", 4)):
        llm = open_mesh("llama", mesh, decode_steps=steps)
        plans = watch_plans(llm.engine)
        outs = [llm.generate(jobs, params) for params in (greedy(24), drawn)]
        said.append([output.outputs[0].token_ids for each in outs for output in each])
        assert {plan.repeat for plan in plans} == {1, steps}
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "mesh",
    [some_slow("data=2,sequence=2"), slow("tensor=4"), slow("pipe=2,data=2"), slow("sequence=4")],
)
def test_lower_tiers_of_a_mesh(mesh, tmp_path):
    """Pages go to the host and to disk and come back, and the next engine finds them."""
    options = dict(tight=True, host_cache_gb=0.004, disk_cache_dir=tmp_path, preemption="park")
    said = []
    for _ in range(2):
        llm = open_mesh("llama", mesh, **options)
        said += outputs(llm)[0]
        stats = llm.cache.stats()
        assert stats["host_in_pages"] > 0 and stats["host_out_pages"] > 0
        llm.close()
    assert stats["disk_out_pages"] > 0
    for (tokens, _), (expected, _) in zip(said, alone("llama") * 2, strict=True):
        assert tokens == expected


def test_scores_vectors_and_a_plain_pass_of_a_mesh():
    """Of prompts that go through rings, and partitions that have different numbers of them."""
    plain, llm = open_mesh("llama", ""), open_mesh("llama", "data=2,sequence=2,tensor=2")
    jobs = prompts()[:5]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    for one, other in zip(plain.generate(jobs, params), llm.generate(jobs, params), strict=True):
        for entry, wanted in zip(other.prompt_logprobs[1:], one.prompt_logprobs[1:], strict=True):
            assert list(entry) == list(wanted)
            for token in entry:
                assert entry[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)
    for one, other in zip(plain.encode(jobs), llm.encode(jobs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    logits_TV = llm.forward(jobs[1])
    assert logits_TV.shape == (len(jobs[1]), llm.model_config.vocab_size)
    np.testing.assert_allclose(logits_TV, plain.forward(jobs[1]), atol=2e-4)


def test_the_report_says_which_part_a_device_has():
    lines = list(mesh_lines(open_mesh("mixtral", "expert=2,tensor=2")))
    assert lines[0] == "mesh       expert=2, tensor=2; devices 0, 1, 2, 3"
    [gate] = [line for line in lines if line.startswith("segments.experts_gate ")]
    assert "('expert', None, 'tensor')" in gate
    assert not list(mesh_lines(open_mesh("llama", "")))


@pytest.mark.slow
def test_a_vocabulary_that_does_not_divide_is_filled_up(tmp_path):
    """301 ids over 8 devices: those that fill up are never sampled, nor shown."""
    folder = write_tiny(tmp_path / "m", vocab_size=301)
    params = SamplingParams(temperature=3.0, seed=1, max_tokens=60, logprobs=3, ignore_eos=True)
    said = []
    for mesh in ("", "tensor=2", "data=2,tensor=4"):
        llm = open_on_demand(folder, mesh=mesh, max_num_seqs=2, max_num_batched_tokens=32)
        [output] = llm.generate([[5, 6, 7]], params)
        said.append(output.outputs[0].token_ids)
        assert max(max(entry) for entry in output.outputs[0].logprobs) <= 300
        assert llm.forward([1, 2]).shape == (2, 301)
    assert said[0] == said[1] == said[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads, kv_heads, ways", [slow(8, 2, (2, 4, 8)), (8, 1, (8,)), slow(6, 2, (4,))]
)
def test_fewer_kv_heads_than_devices(tmp_path, heads, kv_heads, ways):
    """CASES P-01: KV heads are copied, and count as often in memory; query heads fill up."""
    folder = write_tiny(
        tmp_path / "m", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16
    )
    said, page_bytes = [], []
    for mesh in ("", *(f"tensor={n}" for n in ways)):
        llm = open_on_demand(folder, mesh=mesh, max_num_seqs=2, max_num_batched_tokens=32)
        outputs = llm.generate([[5, 6, 7], list(range(9, 40))], greedy(12, logprobs=0))
        said.append([output.outputs[0].token_ids for output in outputs])
        page_bytes.append(llm.built.factory.cfg.layout.page_bytes)
    assert all(tokens == said[0] for tokens in said)
    assert page_bytes[1:] == [page_bytes[0] // kv_heads * max(1, kv_heads // n) for n in ways]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_biases_and_norms_of_heads_that_are_copied(arch):
    """CASES P-01, with biases of q, k and v, and norms of heads."""
    said = [
        [
            output.outputs[0].token_ids
            for output in open_mesh(arch, mesh).generate(prompts()[:3], greedy(12))
        ]
        for mesh in ("", "tensor=8")
    ]
    assert said[0] == said[1]


def test_stages_are_even_and_none_is_empty():
    assert stage_layers(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    with pytest.raises(ValueError, match="pipe=4 is more than the 3 layers; use at most 3"):
        open_mesh("llama", "pipe=4")


def test_kv_heads_that_cannot_be_shared_out_are_refused_with_both_numbers():
    """CASES P-01: before any weight is read."""
    with pytest.raises(ValueError, match=r"2 KV heads cannot be shared out over tensor=3: neither"):
        open_mesh("llama", "tensor=3")
    with pytest.raises(ValueError, match=r"4 heads of latent attention cannot .* over tensor=8"):
        open_mesh("deepseek_v3", "tensor=8")
    with pytest.raises(ValueError, match=r"expert=3 does not divide 4 experts"):
        open_mesh("mixtral", "expert=3")
    with pytest.raises(ValueError, match=r"expert=2 does not divide no experts"):
        open_mesh("llama", "expert=2")


@pytest.mark.parametrize(
    "text, message",
    [
        ("tensor", "'tensor' is not an axis and its size"),
        ("tensors=2", "'tensors=2' is not an axis and its size; write such as"),
        ("tensor=0", "'tensor=0' is not"),
        ("tensor=2,tensor=4", "'tensor=4' is not an axis and its size.*at most once"),
        ("tensor=16", "needs 16 devices, 8 are there"),
    ],
)
def test_a_wrong_mesh_is_one_error(text, message):
    with pytest.raises(ValueError, match=message):
        engine_mesh(text, Processes())


def test_a_mesh_of_spaces_and_ones():
    assert parse_mesh(" data=1, tensor = 2 ,") == {"data": 1, "tensor": 2}
    assert engine_mesh("", Processes()).size == 1 and engine_mesh("tensor=1", Processes()).size == 1


COLLECTIVE = re.compile(
    r" = \(?(\w+)\[([\d,]*)\][^=]* (all-reduce|all-gather|all-to-all|reduce-scatter|"
    r"collective-permute)(?:-start)?\("
)


def collectives(llm, key):
    """Returns [(kind, elements)] of a program's code."""
    text = llm.engine.worker.programs[key].as_text()
    return [
        (kind, int(np.prod([int(n) for n in dims.split(",") if n] or [1])))
        for _, dims, kind in COLLECTIVE.findall(text)
    ]


def test_tensor_parallel_decodes_reduce_twice_a_layer():
    """And once for the embedding; heads move a few numbers a row, never all logits."""
    llm = open_mesh("llama", "tensor=4")
    body = collectives(llm, (Group("decode", ROWS, 1),))
    layers = llm.model_config.num_layers
    assert [kind for kind, _ in body] == ["all-reduce"] * (2 * layers + 1)
    assert {size for _, size in body} == {ROWS * llm.model_config.width}
    for head in llm.built.ladder.heads():
        sizes = [size for _, size in collectives(llm, head)]
        assert sizes and max(sizes) <= head.rows * 4 * 64 < head.rows * llm.model_config.vocab_size


def test_expert_parallel_layers_exchange_twice():
    llm = open_mesh("mixtral", "expert=4")
    kinds = [kind for kind, _ in collectives(llm, (Group("decode", ROWS, 1),))]
    assert kinds.count("all-to-all") == 2 * llm.model_config.num_layers
    assert "all-reduce" not in kinds


def test_donated_pages_are_not_copied_on_a_mesh():
    llm = open_mesh("llama", "data=2,tensor=4")
    memory = llm.engine.worker.programs[(Group("decode", ROWS, 1),)].memory_analysis()
    factory = llm.built.factory
    assert memory.alias_size_in_bytes >= factory.num_pages * factory.cfg.layout.page_bytes


def test_the_option_has_the_layouts_that_there_are():
    assert RING_LAYOUTS == LAYOUTS


def test_the_rules_name_axes_of_the_mesh():
    axes = {name for names in RULES.table.values() for name in names}
    assert axes <= {"data", "pipe", "sequence", "expert", "tensor"}

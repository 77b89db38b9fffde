# SPDX-License-Identifier: Apache-2.0
"""Operations and bytes of a step against the closed formulas of the literature."""

import pytest

from engine.capacity import Parallel, active_parameters, weight_bytes
from engine.chips import CHIPS
from engine.roofline import Work, choices, step
from tests.engine.test_capacity import shape_of

H100 = CHIPS["h100"]


@pytest.mark.parametrize("requests, before", [(1, 8191), (32, 1000)])
def test_a_decode_is_two_operations_a_weight_and_four_a_head_number_and_cell(requests, before):
    """B (2 N + 4 L H d S) operations; N b bytes of weights and B S kv of the cache."""
    shape = shape_of("llama-3.1-8b")
    found = step(shape, Parallel(), H100, Work(requests, 1, before))
    parameters = active_parameters(shape)
    flops = requests * (2 * parameters + 4 * 32 * 32 * 128 * (before + 1))
    assert found.flops == pytest.approx(flops, rel=1e-4)
    assert found.weight_bytes == pytest.approx(2 * parameters, rel=1e-3)
    assert found.kv_bytes == requests * 131072 * (before + 2)  # one cell is written, and read
    assert found.tokens == requests and found.link_bytes == 0
    assert found.seconds == pytest.approx((found.weight_bytes + found.kv_bytes) / 3.35e12)
    assert found.tokens_per_s == found.tokens / found.seconds


def test_a_first_chunk_is_half_of_a_square_and_one_row_of_the_head():
    shape = shape_of("llama-3.1-8b")
    found = step(shape, Parallel(), H100, Work(1, 512, 0))
    head = 128256 * 4096
    body = active_parameters(shape) - head
    flops = 2 * body * 512 + 2 * head + 4 * 32 * 32 * 128 * 512 * 513 / 2
    assert found.flops == pytest.approx(flops, rel=1e-4)
    assert found.bound == "compute" and found.seconds == found.compute_s


def test_the_batch_at_which_computing_takes_as_long_as_reading_is_the_known_one():
    """B* = F b / (2 BW) with next to no context: 295 on an H100, 240 on a v5e."""
    shape = shape_of("llama-3.1-70b")
    for name, batch in {"h100": 295, "v5e": 240}.items():
        found = step(shape, Parallel(), CHIPS[name], Work(batch, 1, 0))
        assert found.compute_s == pytest.approx(found.weights_s, rel=0.01)


def test_windows_bound_what_is_read():
    shape = shape_of("gemma-3-27b", max_model_len=131072)
    near, far = (step(shape, Parallel(), H100, Work(1, 1, n)) for n in (65535, 131071))
    assert far.kv_bytes - near.kv_bytes == 65536 * 10 * 2 * 16 * 128 * 2
    assert far.flops - near.flops == 65536 * 10 * 4 * 32 * 128


def test_latent_attention_multiplies_with_the_latent_once_as_key_and_once_as_value():
    shape = shape_of("deepseek-v3")
    near, far = (step(shape, Parallel(), H100, Work(1, 1, n)) for n in (999, 1999))
    assert far.flops - near.flops == 1000 * 61 * 128 * 2 * (576 + 512)
    assert far.kv_bytes - near.kv_bytes == 1000 * 61 * 576 * 2


def test_experts_are_read_as_tokens_meet_them():
    shape = shape_of("qwen3-30b-a3b")
    everything = weight_bytes(shape) - 151936 * 2048 * 2  # no token looks up much
    one, many = (step(shape, Parallel(), H100, Work(n, 1, 0)) for n in (1, 4096))
    assert one.weight_bytes == pytest.approx(2 * active_parameters(shape), rel=1e-3)
    assert many.weight_bytes == pytest.approx(everything, rel=0.001)
    assert many.flops == pytest.approx(4096 * one.flops)


def test_chips_share_the_work_and_pay_for_it_on_their_links():
    shape, work = shape_of("llama-3.1-70b"), Work(8, 1, 4095)
    alone = step(shape, Parallel(), H100, work)
    split = step(shape, Parallel(tensor=8), H100, work)
    assert split.flops == pytest.approx(alone.flops / 8)
    assert split.kv_bytes == alone.kv_bytes / 8
    assert split.weight_bytes == pytest.approx(alone.weight_bytes / 8, rel=0.001)
    # Two sums a layer and the embedding's, each part of which goes around twice.
    assert split.link_bytes == pytest.approx((2 * 80 + 1) * 8 * 8192 * 2 * 2 * 7 / 8)
    assert split.links_s == pytest.approx(split.link_bytes / 450e9 + 161 * 2 * 4 * 1e-6)
    assert split.seconds == pytest.approx(split.weights_s + split.kv_s + split.links_s)
    beside = step(shape, Parallel(data=8), H100, work)
    assert beside.kv_bytes == alone.kv_bytes / 8 and beside.link_bytes == 0
    assert beside.weight_bytes == pytest.approx(alone.weight_bytes, rel=0.001)
    # Experts on four chips see the tokens of all four replicas.
    moe = shape_of("qwen3-30b-a3b")
    single = step(moe, Parallel(), H100, Work(64, 1, 0))
    quarter = step(moe, Parallel(expert=4), H100, Work(64, 1, 0))
    assert quarter.flops == pytest.approx(single.flops / 4)
    rows = 2 * 48 * 16 * 2048 * 2 * 8 * 3 / 4  # there and back
    counts = 48 * 4 * (4 * 128 + 4 * 4) * 3 / 4
    assert quarter.link_bytes == pytest.approx(rows + counts)


def test_copies_of_kv_heads_are_read_on_every_chip_that_has_them():
    shape, work = shape_of("llama-3.1-8b"), Work(8, 1, 4095)
    eight, sixteen = (step(shape, Parallel(tensor=n), H100, work) for n in (8, 16))
    assert eight.kv_bytes == sixteen.kv_bytes
    assert sixteen.weight_bytes > eight.weight_bytes / 2


def test_a_sequence_axis_shares_contexts_and_the_tokens_of_rings():
    shape = shape_of("llama-3.1-8b")
    alone, four = (step(shape, Parallel(sequence=n), H100, Work(1, 1, 8191)) for n in (1, 4))
    assert four.kv_bytes == alone.kv_bytes / 4 and four.weight_bytes == alone.weight_bytes
    # Parts are merged by their highest logits, then their sums and totals.
    merged = 32 * 32 * (1 + 129) * 4
    assert four.link_bytes == pytest.approx(merged * 2 * 3 / 4)
    alone, four = (step(shape, Parallel(sequence=n), H100, Work(1, 512, 0)) for n in (1, 4))
    assert four.flops == pytest.approx(alone.flops / 4, rel=0.1)  # the head is on all of them
    cells = 32 * 3 * 128 * 2 * 8 * 128 * 2
    assert four.link_bytes == pytest.approx(cells + 512 * 4096 * 2 * 3 / 4)


def test_what_takes_longest_bounds():
    shape = shape_of("llama-3.1-8b")
    assert step(shape, Parallel(), H100, Work(1, 1, 10)).bound == "weights"
    assert step(shape, Parallel(), H100, Work(400, 1, 8191)).bound == "KV"
    slow = H100._replace(link_bandwidth=1e9)
    assert step(shape, Parallel(tensor=8), slow, Work(1, 512, 0)).bound == "links"


# On so many chips, with as many requests as fit: what is fastest for a token in and one out.
CHOSEN = {
    ("llama-3.1-8b", "v5e", 8): Parallel(tensor=8),  # replicas would hold weights for pages
    ("llama-3.1-70b", "h200", 2): Parallel(tensor=2),
    ("qwen3-30b-a3b", "v5e", 8): Parallel(expert=2, tensor=4),
    ("deepseek-v3", "v6e", 256): Parallel(expert=64, tensor=4),
}


@pytest.mark.parametrize("name, chip, count", CHOSEN)
def test_the_layout_of_least_time_comes_first(name, chip, count):
    shape, usable = shape_of(name, lanes=CHIPS[chip].lanes), int(CHIPS[chip].memory_bytes * 0.9)
    found = choices(shape, CHIPS[chip], usable, count, None)
    assert found[0].room.parallel == CHOSEN[name, chip, count]
    assert [choice.token_s for choice in found] == sorted(choice.token_s for choice in found)
    for choice in found:
        left = choice.room
        assert left.parallel.chips == count and left.batch >= 1
        assert left.weight_bytes + left.pool_bytes <= usable
        assert left.weight_bytes + left.pool_bytes + left.page_bytes > usable
        assert choice.decode.tokens == left.batch


def test_rows_bound_the_batch_of_each_replica():
    shape, usable = shape_of("llama-3.1-8b"), int(CHIPS["v6e"].memory_bytes * 0.9)
    found = choices(shape, CHIPS["v6e"], usable, 8, 2)
    assert all(choice.decode.tokens <= 2 * choice.room.parallel.replicas for choice in found)
    assert len({choice.decode.tokens for choice in found}) > 1

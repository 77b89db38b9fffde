# SPDX-License-Identifier: Apache-2.0
"""The step programs driven by hand: what no scheduler asks for yet, against the plain forward."""

import dataclasses

import jax
import numpy as np
import pytest

from engine.batch import BatchShape
from engine.buckets import Group
from engine.build import abstract_parameters
from engine.kv import kv_layout
from engine.models.config import ModelConfig, Rope
from engine.models.oracle import forward_jit
from engine.models.split import device_config, split_config
from engine.models.tree import parameter_specs
from engine.programs import ProgramFactory
from engine.step_config import StepConfig
from sharding import RULES, Spec, make_mesh

W = 16  # cells a page
ROWS, PAGES_A_ROW, NUM_PAGES = 4, 8, 40
ORACLE_LENGTH = 96
CHUNK, TREE, DECODE = Group("chunk", 2, 48), Group("tree", 2, 5), Group("decode", 2, 1)


def model_config(**changes) -> ModelConfig:
    """Returns a small decoder whose dimensions all differ; four layers, three of them windowed."""
    fields = dict(
        family="test",
        vocab_size=90,
        width=24,
        ffn_width=40,
        num_layers=4,
        query_heads=6,
        kv_heads=2,
        head_width=8,
        max_position=128,
        norm_eps=1e-5,
        activation="silu",
        tied_embeddings=False,
        ropes=(Rope(theta=1e4), Rope(theta=1e3, kind="linear", factor=2.0)),
        rope_of_layer=(0, 1, 0, 1),
        windows=(None,) * 4,
        attention_scale=8**-0.5,
    )
    return ModelConfig(**(fields | changes))


WINDOWED = model_config(windows=(20, 20, None, 20))
FULL = model_config()


class Steps:
    """The programs of one small model, called with packed arrays made here."""

    def __init__(self, config, *, stacked=False, tensor=1, bodies=(), num_pages=NUM_PAGES):
        dtype = np.dtype(np.float32)
        mesh = make_mesh(jax.local_devices()[:tensor], tensor=tensor)
        part = device_config(split_config(config, tensor), tensor)
        self.layout = kv_layout(part, W, dtype)
        self.shape = BatchShape(len(self.layout.groups), PAGES_A_ROW, ROWS)
        self.config = config
        cfg = StepConfig(part, self.layout, self.shape, mesh, RULES, 96, None)
        abstract = abstract_parameters(config, mesh, RULES, dtype, stacked=stacked)
        factory = ProgramFactory(cfg, abstract, num_pages, stacked=stacked)
        self.plain = random_parameters(config, stacked=False)
        params = random_parameters(config, stacked=stacked)
        self.params = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), params, abstract)
        self.state = factory.start().lower().compile()()
        self.programs = {body: factory.body(body).lower().compile() for body in bodies}

    def table(self, row):
        """Returns the pages of a row by group [G, J]: every row and group has its own, shuffled."""
        G = len(self.layout.groups)
        numbers = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES))
        per_row = min(PAGES_A_ROW, (NUM_PAGES - 1) // (ROWS * G))
        first = row * G * per_row
        table = np.zeros((G, PAGES_A_ROW), np.int32)
        for group in range(G):
            table[group, :per_row] = numbers[first + group * per_row :][:per_row]
        return table

    def run(self, body, fill):
        """Runs `body` with the fields that `fill(parts, sampled)` sets; returns its hidden rows."""
        packed = np.zeros(self.shape.size(body), np.int32)
        *parts, sampled = self.shape.unpack(body, packed)
        for group, part in zip(body, parts, strict=True):
            part["row_B"][:] = ROWS
            if group.kind == "chunk":
                part["settle_B"][:] = ROWS
        sampled["sample_row_S"][:] = ROWS
        fill(parts, sampled)
        self.state, hidden = self.programs[body](self.params, self.state, packed)
        return hidden

    def logits(self, hidden_TD):
        return np.asarray(hidden_TD) @ np.asarray(self.plain["head"]).T

    def oracle(self, tokens, mask_TT=None):
        """Returns logits [T, V] of a whole sequence; padded, so that one length is compiled."""
        T = len(tokens)
        padded = np.zeros(ORACLE_LENGTH, np.int32)
        padded[:T] = tokens
        whole = np.tril(np.ones((ORACLE_LENGTH, ORACLE_LENGTH), bool))
        if mask_TT is not None:
            whole[:T, :T] = mask_TT
        logits, _ = forward_jit(self.plain, self.config, padded, mask_TT=whole)
        return np.asarray(logits)[:T]


def random_parameters(config, *, stacked):
    """Returns the same random parameters as a tree of layers, or stacked."""
    rng = np.random.default_rng(7)
    dtype = np.dtype(np.float32)

    def draw(spec):
        if len(spec.shape) == 1:
            return rng.uniform(0.5, 1.5, spec.shape).astype(np.float32)
        return (rng.normal(size=spec.shape) / spec.shape[-1] ** 0.5).astype(np.float32)

    specs = parameter_specs(config, dtype, stacked=False)
    params = jax.tree.map(draw, specs, is_leaf=lambda leaf: isinstance(leaf, Spec))
    if stacked:
        layers = params["segments"][0]
        params["segments"] = (jax.tree.map(lambda *leaves: np.stack(leaves), *layers),)
    return params


def fill_chunk(steps, part, index, row, tokens, start=0, cell=None, settle=True):
    """Sets row `index` of a chunk group to `tokens` of `row` at positions from `start`."""
    part["row_B"][index] = row
    part["start_B"][index], part["count_B"][index] = start, len(tokens)
    part["cell_GB"][:, index] = start if cell is None else cell
    part["table_GBJ"][:, index] = steps.table(row)
    part["token_BT"][index, : len(tokens)] = tokens
    part["settle_B"][index] = row if settle else ROWS
    part["left_B"][index] = 100
    part["end_ids_BE"][index] = -1


def prefill(steps, row, tokens):
    """Returns the last logits after running `tokens` as pieces of one row in one step."""
    pieces = [tokens[i : i + CHUNK.width] for i in range(0, len(tokens), CHUNK.width)]
    assert len(pieces) <= CHUNK.rows

    def fill(parts, sampled):
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            fill_chunk(steps, parts[0], index, row, piece, index * CHUNK.width, settle=last)
        sampled["sample_index_S"][0] = (len(pieces) - 1) * CHUNK.width + len(pieces[-1]) - 1
        sampled["sample_row_S"][0] = row

    return steps.logits(steps.run((CHUNK,), fill).sampled_SD)[0]


def decode(steps, row, token, table=None):
    """Returns the logits after one decode of `token` in `row`."""
    steps.state = dataclasses.replace(steps.state, token_R=steps.state.token_R.at[row].set(token))

    def fill(parts, sampled):
        parts[0]["row_B"][0] = row
        parts[0]["table_GBJ"][:, 0] = steps.table(row) if table is None else table
        sampled["sample_row_S"][0] = row

    return steps.logits(steps.run((DECODE,), fill).sampled_SD)[0]


def tokens_of(seed, count):
    return [int(t) for t in np.random.default_rng(seed).integers(0, 90, count)]


VARIANTS = {
    "unrolled": (WINDOWED, {}),
    "scanned": (WINDOWED, {"stacked": True}),
    "tensor 2": (WINDOWED, {"tensor": 2}),
    "scanned, tensor 2": (FULL, {"stacked": True, "tensor": 2}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_build_of_the_step_equals_the_forward(variant):
    """Layers unrolled or scanned, heads on one device or two: a prefill in pieces, then decodes."""
    config, options = VARIANTS[variant]
    steps = Steps(config, bodies=[(CHUNK,), (DECODE,)], **options)
    pages = PAGES_A_ROW if len(steps.layout.groups) == 1 else 2
    tokens = tokens_of(1, min(70, pages * W - 4))
    np.testing.assert_allclose(
        prefill(steps, 2, tokens), steps.oracle(tokens)[-1], atol=2e-5, err_msg="prefill"
    )
    for extra in tokens_of(2, 3):
        tokens = [*tokens, extra]
        np.testing.assert_allclose(
            decode(steps, 2, extra), steps.oracle(tokens)[-1], atol=2e-5, err_msg="decode"
        )


@pytest.fixture(scope="module")
def full():
    return Steps(FULL, bodies=[(CHUNK,), (DECODE,), (CHUNK, TREE, DECODE)])


def test_dropped_middle_pages_equal_the_oracle_with_the_same_mask(full):
    """Position and cache length are apart: pages 1 and 2 of a row leave its table and length."""
    tokens = tokens_of(3, 70)
    prefill(full, 0, tokens)
    table = full.table(0)
    table[:, 1:] = np.roll(table[:, 1:], -2, axis=1)
    full.state = dataclasses.replace(
        full.state, length_GR=full.state.length_GR.at[:, 0].add(-2 * W)
    )
    for step, extra in enumerate(tokens_of(4, 20)):  # on into new pages
        tokens = [*tokens, extra]
        logits = decode(full, 0, extra, table=table)
        T = len(tokens)
        mask_TT = np.tril(np.ones((T, T), bool))
        mask_TT[70:, W : 3 * W] = False
        expected = full.oracle(tokens, mask_TT=mask_TT)[-1]
        np.testing.assert_allclose(logits, expected, atol=2e-5, err_msg=f"step {step}")
        assert np.abs(expected - full.oracle(tokens)[-1]).max() > 1e-3, "the mask must matter"
        assert int(full.state.position_R[0]) == T
        assert int(full.state.length_GR[0, 0]) == T - 2 * W


#       0
#      / \
#     1   2
#     |   |
#     3   4
PARENT = [None, 0, 0, 1, 2]


def path_to(node):
    path = []
    while node is not None:
        path.append(node)
        node = PARENT[node]
    return path[::-1]


def test_a_tree_row_in_a_mixed_step_equals_forwards_along_its_paths(full):
    """A width-5 tree row beside a prefill chunk and a decode, in one step."""
    context, other, prompt = tokens_of(5, 37), tokens_of(6, 21), tokens_of(7, 30)
    prefill(full, 0, context)
    prefill(full, 1, other)
    full.state = dataclasses.replace(full.state, token_R=full.state.token_R.at[1].set(11))
    tree = tokens_of(8, 5)

    def fill(parts, sampled):
        chunk, wide, single = parts
        fill_chunk(full, chunk, 0, 2, prompt)
        wide["row_B"][1], wide["count_B"][1] = 0, 5
        wide["start_B"][1] = wide["cell_GB"][:, 1] = len(context)
        wide["table_GBJ"][:, 1] = full.table(0)
        wide["token_BT"][1] = tree
        wide["depth_BT"][1] = [len(path_to(node)) - 1 for node in range(5)]
        wide["ancestors_BT"][1] = [sum(1 << n for n in path_to(node)) for node in range(5)]
        single["row_B"][1] = 1
        single["table_GBJ"][:, 1] = full.table(1)
        first_decode = CHUNK.rows * CHUNK.width + TREE.rows * TREE.width
        sampled["sample_index_S"][:2] = len(prompt) - 1, first_decode + 1
        sampled["sample_row_S"][:2] = 2, 1

    hidden = full.run((CHUNK, TREE, DECODE), fill)
    beside = full.logits(hidden.sampled_SD)
    np.testing.assert_allclose(beside[0], full.oracle(prompt)[-1], atol=2e-5)
    np.testing.assert_allclose(beside[1], full.oracle([*other, 11])[-1], atol=2e-5)
    # The chunk group's hidden rows come out for scoring; the tree's are the last wide group's.
    logits = full.logits(hidden.prompt_CD)[TREE.width : 2 * TREE.width]
    for node in range(5):
        path = [tree[n] for n in path_to(node)]
        expected = full.oracle([*context, *path])[-1]
        np.testing.assert_allclose(logits[node], expected, atol=2e-5, err_msg=f"node {node}")


def test_a_finished_row_writes_only_to_the_null_page(full):
    prefill(full, 3, tokens_of(9, 20))
    full.state = dataclasses.replace(full.state, finished_R=full.state.finished_R.at[3].set(True))
    before = [np.asarray(place)[1:] for place in full.state.pool]
    position = int(full.state.position_R[3])
    decode(full, 3, 5)
    for one, place in zip(before, full.state.pool, strict=True):
        np.testing.assert_array_equal(one, np.asarray(place)[1:])
    assert int(full.state.position_R[3]) == position


def test_a_window_counts_the_current_token():
    """One windowed layer: the last logits depend on the token at distance d if d < window."""
    config = model_config(num_layers=1, windows=(6,), rope_of_layer=(0,))
    steps = Steps(config, bodies=[(CHUNK,), (DECODE,)])
    tokens = tokens_of(10, 24)
    base = prefill(steps, 0, tokens)
    for distance in range(12):
        changed = list(tokens)
        changed[-1 - distance] = (changed[-1 - distance] + 1) % 90
        moved = np.abs(prefill(steps, 1, changed) - base).max() > 1e-6
        assert moved == (distance < 6), f"distance {distance} in a prefill"
        prefill(steps, 2, changed[:-1])
        moved = np.abs(decode(steps, 2, changed[-1]) - base).max() > 1e-5
        assert moved == (distance < 6), f"distance {distance} in a decode"


@pytest.mark.parametrize("stacked", [False, True])
def test_the_body_reads_no_whole_pool(stacked):
    """Its temporaries do not grow with the pool, and every pool byte is updated in place."""
    mixed = (CHUNK, DECODE)
    temporaries = []
    for num_pages in (NUM_PAGES, 50 * NUM_PAGES):
        steps = Steps(WINDOWED, bodies=[mixed], stacked=stacked, num_pages=num_pages)
        memory = steps.programs[mixed].memory_analysis()
        assert memory.alias_size_in_bytes >= num_pages * steps.layout.page_bytes
        temporaries.append(memory.temp_size_in_bytes)
    small, large = temporaries
    assert large - small < 0.01 * 50 * NUM_PAGES * steps.layout.page_bytes

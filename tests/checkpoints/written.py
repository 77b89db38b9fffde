# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in memory, as a source for writers."""

import pathlib

import ml_dtypes
import numpy as np
import tokenizers

from checkpoints.checkpoint import DTYPES, TensorInfo
from checkpoints.tokenizer import build_tokenizer

CONFIG = {"model_type": "llama", "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
TEMPLATE = "{% for message in messages %}{{ message }}\u00e9\u6f22{% endfor %}\r\n"
TENSORS = {
    name: np.random.default_rng(i).standard_normal(shape).astype(ml_dtypes.bfloat16)
    for i, (name, shape) in enumerate(
        {
            "embed": (50, 24),
            "layers.0.w": (40, 24),
            "layers.1.w": (40, 24),
            "norm": (24,),
            # Orbax does not store what equals the fill value.
            "zero": (3,),
        }.items()
    )
} | {"zero": np.zeros(3, ml_dtypes.bfloat16)}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class Memory:
    """`tensors` as a `Checkpoint`, with a tokenizer of two end ids and two unused ids if given."""

    kind = "huggingface"
    path = pathlib.Path("memory")

    def __init__(self, tensors, *, config=CONFIG, tokenizer=None):
        self.arrays, self.config, self.backend = tensors, config, tokenizer
        self.generation_config = {"eos_token_id": [2, 7]}
        self.tensors = {n: TensorInfo(a.shape, NAMES[a.dtype]) for n, a in tensors.items()}
        self.settings = dict(
            bos_id=1, eos_ids=[2, 7], add_bos=True, chat_template=TEMPLATE, unused_ids=[20, 21]
        )

    def read(self, name):
        return self.arrays[name].copy()

    def read_part(self, name, index):
        return self.read(name)[index]

    def tokenizer(self):
        if self.backend is None:
            return None
        # A copy: a BOS rule is built into it.
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        return build_tokenizer(copy, **self.settings)


def same_tokenizer(one, other):
    """Returns whether two tokenizers say the same of every id, of the rules, and of a text."""
    text = "the mill, \u00e9t\u00e9 \u6f22 <note> 123\n"
    assert one.backend.get_vocab() == other.backend.get_vocab()
    assert one.encode(text) == other.encode(text)
    assert one.decode(one.encode(text)) == other.decode(other.encode(text))
    fields = ("bos_id", "eos_ids", "add_bos", "chat_template", "special_ids", "known_ids")
    return all(getattr(one, field) == getattr(other, field) for field in fields)

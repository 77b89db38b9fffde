# SPDX-License-Identifier: Apache-2.0
"""The numbers of a request that the device keeps by row: their names, in one int32 array.

A setting is added by its name and dtype here, its value in `row_settings`, and where it is read.
"""

import struct

import numpy as np

from engine.request import Request

# Bad words of several tokens that a row can hold, and their most tokens.
BAD_WORDS = 64
BAD_WORD_TOKENS = 8
UNUSED = -1  # in the tables of bad words: no token stands here

SETTINGS = {
    "temperature": np.float32,  # 0 is greedy
    "top_k": np.int32,  # 0 is off
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
    "seed_high": np.uint32,
    "seed_low": np.uint32,
    "sample": np.int32,  # which of a request's outputs the row draws
    "ends_from": np.int32,  # end ids are allowed while at most so many tokens are left
    "changed": np.int32,  # 1: the row is in the tables of engine/logits.py
    "length": np.int32,  # the sequence's longest, by which some ropes choose
    "processed": np.int32,  # 1: log-probabilities are of what tokens are drawn from
}
_FORMATS = {np.float32: "f", np.int32: "i", np.uint32: "I"}
_PACKER = struct.Struct("=" + "".join(_FORMATS[dtype] for dtype in SETTINGS.values()))


def row_settings(request: Request) -> np.ndarray:
    """Returns the settings of `request`, int32 [F]: floats and unsigned words as their bits."""
    params = request.params
    values = {
        "temperature": params.temperature,
        "top_k": min(max(params.top_k, 0), np.iinfo(np.int32).max),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "seed_high": request.seed >> 32 & 0xFFFFFFFF,
        "seed_low": request.seed & 0xFFFFFFFF,
        "sample": request.sample,
        "ends_from": request.most_output - params.min_tokens,
        "changed": int(params.changes_logits),
        "length": request.limit,
        "processed": int(params.logprobs_mode == "processed"),
    }
    return np.frombuffer(_PACKER.pack(*(values[name] for name in SETTINGS)), np.int32)

# SPDX-License-Identifier: Apache-2.0
"""What may be asked for, and the arithmetic of a request's record."""

import math

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.params import SamplingParams
from engine.request import Request

INF, NAN = math.inf, math.nan
GOOD = [
    {"temperature": 0},
    {"temperature": 1e-30},
    {"temperature": np.float32(0.5)},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10_000_000},
    {"top_k": np.int64(5)},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"max_tokens": None},
    {"max_tokens": 0},
    {"max_tokens": 10**12},
    {"logprobs": 0},
    {"logprobs": 20, "prompt_logprobs": 20},
]
BAD = [
    ("temperature", [-1, -1e-9, NAN, INF, -INF, 1e39, True, "1", None, [1.0]]),
    ("top_k", [-2, -5, 1.0, 5.5, True, "3", None, NAN]),
    ("top_p", [0, 0.0, -0.1, 1.0001, NAN, INF, True, "1", None]),
    ("seed", [-1, 2**64, 1.0, True, "7"]),
    ("max_tokens", [-1, 1.0, 0.5, True, False, "16", INF]),
    ("ignore_eos", [0, 1, None, "true"]),
    ("logprobs", [-1, 21, 1.0, True, "5"]),
    ("prompt_logprobs", [-1, 21, 1.0, True, "5"]),
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_sampling_accepts_what_the_rules_allow(fields):
    assert SamplingParams(**fields) == SamplingParams.from_dict(fields)


@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in BAD for value in values], ids=str
)
def test_sampling_refuses_by_field_and_value(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(f"{name}={value!r} must be")


def test_sampling_refuses_unknown_fields_and_lists_the_known():
    with pytest.raises(ValueError, match="'temprature' is not a sampling field; .* temperature, t"):
        SamplingParams.from_dict({"temprature": 1.0})


def test_sampling_params_are_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"model": ""}, "model='' must be a path"),
        ({"model": None}, "model=None must be a path"),
        ({"dtype": "int3"}, "dtype='int3' is not known; use one of auto"),
        ({"max_model_len": 0}, "max_model_len=0 must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"max_num_seqs": 4.0}, "max_num_seqs=4.0 must be a whole number"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens=True must be a whole"),
        ({"page_size": 48}, "page_size=48 must be a power of two; try 32 or 64"),
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"num_pages": 1}, "num_pages=1 must be at least 2; page 0 is reserved"),
        ({"memory_fraction": 0}, "memory_fraction=0 must be above 0"),
        ({"memory_fraction": 90}, "write 90% as 0.9"),
        ({"memory_fraction": NAN}, "memory_fraction=nan must be a finite number"),
        ({"batching": "dynamic"}, "batching='dynamic' is not known; use one of continuous, static"),
        ({"overlap": 1}, "overlap=1 must be True or False"),
        ({"seed": -1}, "seed=-1 must be from 0"),
        ({"prefix_cache": "yes"}, "prefix_cache='yes' must be True or False"),
        ({"host_cache_gb": -1}, "host_cache_gb=-1 must be at least 0; it is in 10^9 bytes"),
        ({"host_cache_gb": NAN}, "host_cache_gb=nan must be a finite number"),
        ({"host_cache_gb": 1, "prefix_cache": False}, "host_cache_gb needs prefix_cache=True"),
        ({"disk_cache_dir": "d"}, "disk_cache_dir needs host_cache_gb above 0"),
        (
            {"disk_cache_dir": "d", "disk_cache_gb": 0, "host_cache_gb": 1},
            "disk_cache_dir needs disk_cache_gb above 0",
        ),
        ({"disk_cache_dir": "", "host_cache_gb": 1}, "disk_cache_dir='' must be a path; None is"),
        ({"disk_cache_dir": 5, "host_cache_gb": 1}, "disk_cache_dir=5 must be a path"),
        ({"preemption": "swap"}, "preemption='swap' is not known; use one of recompute, park"),
        ({"preemption": "park"}, "preemption='park' needs host_cache_gb above 0"),
        ({"policy": "best"}, "policy='best' is not known; use one of fcfs, priority"),
        ({"age_bound": -1}, "age_bound=-1 must be at least 0; the default is 1024"),
        ({"max_num_waiting": 0}, "max_num_waiting=0 must be at least 1; None is no limit"),
        ({"watermark": 1}, "watermark=1 must be from 0 to below 1; it is a share"),
        ({"max_num_seqs_per_tenant": 1.5}, "max_num_seqs_per_tenant=1.5 must be a whole number"),
        ({"tokens_per_s_per_tenant": 0}, "tokens_per_s_per_tenant=0 must be above 0"),
    ],
)
def test_config_refuses_by_setting_value_and_way_out(fields, text):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{"model": "m", **fields})
    assert text in str(error.value)


def test_config_takes_what_the_defaults_say():
    config = EngineConfig(model="smollm2-135m", page_size=64, num_pages=2, seed=0)
    assert (config.dtype, config.max_num_seqs, config.max_num_batched_tokens) == ("auto", 32, 512)


def make_request(prompt=5, limit=12, **fields):
    tokens = list(range(prompt))
    return Request(
        id=0, prompt_token_ids=tokens, params=SamplingParams(), limit=limit, seed=1, **fields
    )


def test_request_counts_read_and_unread_tokens_apart():
    request = make_request(output_token_ids=[50, 51], in_flight=1, computed=7, target=5)
    assert (request.known, request.length) == (7, 8)
    assert request.decodes and not request.prefills
    # The last token that the limit allows is on its way.
    request.in_flight, request.computed = 5, 11
    assert not request.decodes


@pytest.mark.parametrize("start, stop", [(0, 5), (0, 7), (3, 6), (5, 7), (6, 6), (4, 5)])
def test_request_tokens_run_from_prompt_into_output(start, stop):
    request = make_request(output_token_ids=[50, 51])
    assert request.tokens(start, stop) == [0, 1, 2, 3, 4, 50, 51][start:stop]


def test_a_full_prompt_scores_only_and_stores_every_token():
    full, short = make_request(limit=5), make_request(limit=6)
    assert full.scores_only and full.most_cells == 5
    assert not short.scores_only and short.most_cells == 5

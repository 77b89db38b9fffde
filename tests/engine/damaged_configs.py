# SPDX-License-Identifier: Apache-2.0
"""Configs that no model can have: what is changed in a good one, and what is said of it.

`HUGGING_FACE` is {name: (tiny checkpoint, changed keys, a part of the error)}, where a value of
`GONE` takes a key away; `GGUF` is {name: (changed keys, a part of the error)} of a llama.
"""

import math

GONE = object()
NAN, INFINITY = math.nan, math.inf
POSITIVE = "a positive integer is needed"
NUMBER = "a positive number is needed"


def rope(kind, **settings):
    """Returns the change to a rope over 32 positions, four times as many as before."""
    base = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    base |= {"original_max_position_embeddings": 32} | settings
    return {"rope_parameters": {key: value for key, value in base.items() if value is not GONE}}


def lists(**settings):
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} | settings
    return rope("longrope", factor=GONE, **lists)


def llama3(**settings):
    return rope("llama3", **{"low_freq_factor": 1.0, "high_freq_factor": 4.0} | settings)


def has(key, value, needed):
    return f"the model's config has {key} {value!r}; {needed}"


SIZES = {
    f"{key} {value!r}"[:60]: ("llama", {key: value}, f"{key} {said}; {needed}")
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for value, said, needed in (
        (0, "0", POSITIVE),
        (-1, "-1", POSITIVE),
        (2.0, "2.0", POSITIVE),
        (True, "True", POSITIVE),
        ("64", "'64'", POSITIVE),
        ([64], "[64]", POSITIVE),
        ({"a": 1}, "{'a': 1}", POSITIVE),
        (10**12, "1000000000000", "at most"),
    )
} | {
    f"no {key}": ("llama", {key: GONE}, f"the model's config has no '{key}'; the checkpoint is")
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
}
FIELDS = {
    "no model_type": ("llama", {"model_type": GONE}, "model_type None is not supported in a"),
    "model_type a list": ("llama", {"model_type": ["llama"]}, "model_type ['llama'] is not sup"),
    "model_type unknown": ("llama", {"model_type": "rwkv"}, "'rwkv' is not supported in a"),
    "more layers than tensors": (
        "llama",
        {"num_hidden_layers": 9999},
        "the config has 9999 layers, the checkpoint 30 tensors; one of them is not whole",
    ),
    "one layer more": ("llama", {"num_hidden_layers": 4}, "tensors are missing: model.layers.3."),
    "fewer ids than rows": (
        "llama",
        {"vocab_size": 300},
        "tensor 'model.embed_tokens.weight' has shape (320, 64); parameter ['embedding'] needs "
        "(300, 64)",
    ),
    "more ids than rows": ("llama", {"vocab_size": 321}, "needs (321, 64)"),
    "another width": ("llama", {"hidden_size": 72, "head_dim": 16}, "needs (320, 72)"),
    "heads that do not divide": (
        "llama",
        {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": GONE},
        "hidden_size 64 is no multiple of the 5 heads, and no width of a head is given",
    ),
    "KV heads that do not divide": (
        "llama",
        {"num_key_value_heads": 3},
        "4 query heads cannot share 3 KV heads evenly",
    ),
    "KV heads 0": ("llama", {"num_key_value_heads": 0}, has("num_key_value_heads", 0, POSITIVE)),
    "head_dim 0": ("llama", {"head_dim": 0}, has("head_dim", 0, POSITIVE)),
    "head_dim odd": ("qwen3", {"head_dim": 15}, "rotates 15 of a head's 15 coordinates; an even"),
    "head_dim odd, gemma": ("gemma2", {"head_dim": 31}, "31 coordinates of a head are rotated; an"),
    "head_dim another": ("llama", {"head_dim": 32}, "k_proj.weight' has shape (32, 64)"),
    "context 0": (
        "llama",
        {"max_position_embeddings": 0},
        has("max_position_embeddings", 0, POSITIVE),
    ),
    "context 2^31": (
        "llama",
        {"max_position_embeddings": 2**31},
        "max_position_embeddings 2147483648; at most 2147483647",
    ),
    "eps NaN": ("llama", {"rms_norm_eps": NAN}, has("rms_norm_eps", NAN, NUMBER)),
    "eps infinite": ("llama", {"rms_norm_eps": INFINITY}, has("rms_norm_eps", INFINITY, NUMBER)),
    "eps negative": ("llama", {"rms_norm_eps": -1e-5}, has("rms_norm_eps", -1e-5, NUMBER)),
    "eps in words": ("llama", {"rms_norm_eps": "1e-5"}, has("rms_norm_eps", "1e-5", NUMBER)),
    "tied in words": (
        "llama",
        {"tie_word_embeddings": "false"},
        has("tie_word_embeddings", "false", "true or false is needed"),
    ),
    "bias a number": ("llama", {"attention_bias": 1}, has("attention_bias", 1, "true or false")),
    "biases that are not there": ("llama", {"attention_bias": True}, "tensors are missing: model"),
    "activation a list": ("llama", {"hidden_act": ["silu"]}, "hidden_act ['silu'] is not support"),
    "end id negative": ("llama", {"eos_token_id": -1}, "eos_token_id -1 stands where token ids"),
    "end ids nested": ("llama", {"eos_token_id": [[2]]}, "eos_token_id [[2]] stands where token"),
    "end id past the vocabulary": (
        "llama",
        {"eos_token_id": [2, 320]},
        "token 320 is beyond the vocabulary of 320; correct the checkpoint's token ids",
    ),
    "start id past the vocabulary": ("llama", {"bos_token_id": 10**6}, "token 1000000 is beyond"),
    "end id of 2^40": ("llama", {"eos_token_id": 2**40}, "stands where token ids are needed"),
    "a long value": ("llama", {"hidden_size": "x" * 10**6}, "hidden_size 'xxxxxxxxxxxx...xxxxxxx"),
    "layer_types short": ("gemma3", {"layer_types": ["full_attention"]}, "a list of 4, one for"),
    "layer_types a text": ("gemma3", {"layer_types": "full_attention"}, "a list of 4, one for"),
    "layer_types of lists": ("gemma3", {"layer_types": [[]] * 4}, "layer type [] is not supported"),
    "window 0": ("gemma3", {"sliding_window": 0}, has("sliding_window", 0, POSITIVE)),
    "window negative": ("mistral", {"sliding_window": -16}, has("sliding_window", -16, POSITIVE)),
    "window 0, mistral": ("mistral", {"sliding_window": 0}, has("sliding_window", 0, POSITIVE)),
    "window 0, gemma2": ("gemma2", {"sliding_window": 0}, has("sliding_window", 0, POSITIVE)),
    "window 0, gpt_oss": ("gpt_oss", {"sliding_window": 0}, has("sliding_window", 0, POSITIVE)),
    "window in words": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": "16"},
        has("sliding_window", "16", POSITIVE),
    ),
    "softcap 0": (
        "gemma2",
        {"attn_logit_softcapping": 0},
        has("attn_logit_softcapping", 0, NUMBER),
    ),
    "softcap NaN": (
        "gemma2",
        {"final_logit_softcapping": NAN},
        has("final_logit_softcapping", NAN, NUMBER),
    ),
    "scale of queries 0": (
        "gemma3",
        {"query_pre_attn_scalar": 0},
        has("query_pre_attn_scalar", 0, NUMBER),
    ),
    "sliding pattern 0": (
        "gemma3",
        {"layer_types": GONE, "sliding_window_pattern": 0},
        has("sliding_window_pattern", 0, POSITIVE),
    ),
    "limit of swiglu infinite": (
        "gpt_oss",
        {"swiglu_limit": INFINITY},
        has("swiglu_limit", INFINITY, NUMBER),
    ),
}
EXPERTS = {
    "fewer experts than chosen": (
        "mixtral",
        {"num_local_experts": 1},
        "2 experts of 1 cannot be chosen for a token",
    ),
    "no expert chosen": (
        "mixtral",
        {"num_experts_per_tok": 0},
        has("num_experts_per_tok", 0, POSITIVE),
    ),
    "more experts than tensors": (
        "qwen3_moe",
        {"num_experts": 9999},
        "the config has 9999 experts in",
    ),
    "a million experts": ("mixtral", {"num_local_experts": 10**6}, "num_local_experts 1000000; at"),
    "dense layers a number": (
        "qwen2_moe",
        {"mlp_only_layers": 1},
        has("mlp_only_layers", 1, "a list of layers is needed"),
    ),
    "sparse step 0": (
        "qwen3_moe",
        {"decoder_sparse_step": 0},
        has("decoder_sparse_step", 0, POSITIVE),
    ),
    "no shared width": (
        "qwen2_moe",
        {"shared_expert_intermediate_size": GONE},
        "no 'shared_expert_intermediate_size'",
    ),
    "groups that do not divide": ("deepseek_v3", {"n_group": 3}, "8 experts in 3 groups, of which"),
    "more groups chosen than there are": (
        "deepseek_v3",
        {"topk_group": 5},
        "of which 5 are",
    ),
    "groups too small": ("deepseek_v3", {"n_group": 8}, "too few to choose 3 of them, groups by"),
    "shared experts in words": (
        "deepseek_v3",
        {"n_shared_experts": "1"},
        has("n_shared_experts", "1", "an integer of at least 0"),
    ),
    "scale of experts NaN": (
        "deepseek_v3",
        {"routed_scaling_factor": NAN},
        has("routed_scaling_factor", NAN, NUMBER),
    ),
    "scoring unknown": ("deepseek_v3", {"scoring_func": "relu"}, "scoring_func 'relu' is not"),
    "choice unknown": ("deepseek_v2", {"topk_method": ["x"]}, "topk_method ['x'] is not supported"),
    "no latent": ("deepseek_v2", {"kv_lora_rank": GONE}, "no 'kv_lora_rank'; the checkpoint is"),
    "an odd rope of latents": ("deepseek_v3", {"qk_rope_head_dim": 7}, "7 coordinates of a head"),
}
ROPES = {
    "rope_scaling a text": (
        "llama",
        {"rope_parameters": GONE, "rope_scaling": "linear"},
        has("rope_scaling", "linear", "an object is needed"),
    ),
    "rope_parameters a list": (
        "llama",
        {"rope_parameters": [1]},
        has("rope_parameters", [1], "an object is needed"),
    ),
    "nested rope a number": (
        "gemma3",
        {"rope_parameters": {"full_attention": 5, "sliding_attention": {}}},
        has("full_attention", 5, "an object is needed"),
    ),
    "type unknown": ("llama", rope("mrope"), "rope type 'mrope' is not supported; use a check"),
    "type a list": ("llama", rope(["yarn"]), "the rope has rope_type ['yarn']; a name is needed"),
    "base 0": ("llama", rope("linear", rope_theta=0), "rope_theta 0; a positive number"),
    "base 1": ("llama", rope("yarn", rope_theta=1), "rope_theta is 1.0; a base above 1 is needed"),
    "base NaN": ("llama", rope("linear", rope_theta=NAN), "rope_theta nan; a positive number"),
    "base a list": ("llama", rope("linear", rope_theta=[1]), "rope_theta [1]; a positive number"),
    **{
        f"factor {factor!r}, {kind}": ("llama", rope(kind, factor=factor), f"factor {factor!r}; a")
        for kind in ("linear", "dynamic", "yarn")
        for factor in (0, -4.0, NAN, INFINITY, "4", True)
    },
    "factor of 401 digits": ("llama", rope("linear", factor=10**400), "factor 1000000000000000"),
    **{
        f"no factor, {kind}": ("llama", rope(kind, factor=GONE), f"type {kind} has no 'factor'")
        for kind in ("linear", "dynamic", "yarn", "llama3")
    },
    "original length 0": (
        "llama",
        rope("dynamic", original_max_position_embeddings=0),
        has("original_max_position_embeddings", 0, "an integer of at least 2"),
    ),
    "original length in words": (
        "llama",
        rope("yarn", original_max_position_embeddings="32"),
        has("original_max_position_embeddings", "32", "an integer of at least 2"),
    ),
    "original length 1, longrope": (
        "phi3",
        lists(original_max_position_embeddings=1),
        has("original_max_position_embeddings", 1, "an integer of at least 2"),
    ),
    "bands turned round": (
        "llama",
        llama3(low_freq_factor=4.0, high_freq_factor=1.0),
        "low_freq_factor 4.0 of the rope must be below its high_freq_factor 1.0",
    ),
    "bands of no width": ("llama", llama3(low_freq_factor=4.0), "low_freq_factor 4.0 of the rope"),
    "no band": ("llama", rope("llama3", low_freq_factor=1.0), "llama3 has no 'high_freq_factor'"),
    "band negative": ("llama", llama3(low_freq_factor=-1.0), "low_freq_factor -1.0; a positive"),
    "turns the wrong way": (
        "llama",
        rope("yarn", beta_fast=1.0, beta_slow=32.0),
        "beta_slow 32.0 of the rope must be below its beta_fast 1.0",
    ),
    "turns in words": ("llama", rope("yarn", beta_fast="32"), "beta_fast '32'; a positive number"),
    "truncate in words": ("llama", rope("yarn", truncate="no"), "truncate 'no'; true or false"),
    "attention factor negative": ("llama", rope("yarn", attention_factor=-1.0), "factor -1.0; a"),
    "mscale a list": ("llama", rope("yarn", mscale=[1], mscale_all_dim=1.0), "mscale [1]; a posi"),
    "a key that is not of the type": (
        "llama",
        llama3(beta_fast=32.0),
        "llama3 has 'beta_fast'",
    ),
    "a list too short": (
        "phi3",
        lists(short_factor=[1.0] * 7),
        "a rope list has 7 factors; 8 pairs are rotated",
    ),
    "a list too long": ("phi3", lists(long_factor=[1.0] * 9), "a rope list has 9 factors; 8 pairs"),
    "a list that is a number": ("phi3", lists(long_factor=2.0), "long_factor 2.0; a list of numb"),
    "a list with a negative": (
        "phi3",
        lists(short_factor=[1.0] * 7 + [-1.0]),
        "short_factor -1.0; a positive number is needed",
    ),
    "a list with a zero": ("phi3", lists(long_factor=[0] * 8), "long_factor 0; a positive number"),
    "a list with NaN": ("phi3", lists(long_factor=[NAN] * 8), "long_factor nan; a positive number"),
    "a list missing": ("phi3", lists(long_factor=GONE), "longrope has no 'long_factor'"),
    "more than the head": (
        "llama",
        rope("default", factor=GONE, partial_rotary_factor=2.0),
        "partial_rotary_factor 2.0 rotates 32 of a head's 16 coordinates",
    ),
    "an odd part of the head": (
        "llama",
        rope("linear", partial_rotary_factor=0.2),
        "partial_rotary_factor 0.2 rotates 3 of a head's 16 coordinates; an even number",
    ),
    "part of the head in words": (
        "llama",
        rope("linear", partial_rotary_factor="half"),
        "the rope has partial_rotary_factor 'half'; a positive number",
    ),
    "two coordinates, dynamic": (
        "llama",
        rope("dynamic", partial_rotary_factor=0.125),
        "a rope of type dynamic needs more than 2 rotated coordinates",
    ),
}
HUGGING_FACE = {
    **SIZES,
    **FIELDS,
    **EXPERTS,
    **{f"rope: {name}": case for name, case in ROPES.items()},
}

GGUF = {
    **{
        f"no {key}": ({key: GONE}, f"the model's config has no '{key}'; the checkpoint is")
        for key in (
            "llama.block_count",
            "llama.embedding_length",
            "llama.feed_forward_length",
            "llama.attention.head_count",
            "llama.attention.layer_norm_rms_epsilon",
            "llama.context_length",
        )
    },
    **{
        f"{key} {value!r}": ({key: value}, f"{key} {value!r}; {needed}")
        for key, value, needed in (
            ("llama.block_count", 0, POSITIVE),
            ("llama.block_count", [2, 2], POSITIVE),
            ("llama.block_count", 10**6, "at most 10000"),
            ("llama.attention.head_count", "4", POSITIVE),
            ("llama.attention.head_count_kv", [2, 2], POSITIVE),
            ("llama.attention.key_length", 0, POSITIVE),
            ("llama.attention.layer_norm_rms_epsilon", NAN, NUMBER),
            ("llama.attention.layer_norm_rms_epsilon", "x", NUMBER),
            ("llama.rope.freq_base", -1.0, NUMBER),
            ("llama.rope.freq_base", "x", NUMBER),
            ("llama.rope.scaling.factor", NAN, NUMBER),
            ("llama.rope.dimension_count", [16], POSITIVE),
        )
    },
    "no architecture": ({"general.architecture": GONE}, "general.architecture None is not supp"),
    "unknown architecture": ({"general.architecture": "rwkv"}, "architecture 'rwkv' is not suppor"),
    "architecture a list": ({"general.architecture": ["llama"]}, "architecture ['llama'] is not"),
    "no vocabulary": ({"llama.vocab_size": GONE}, "has no 'tokenizer.ggml.tokens'"),
    "heads that do not divide": (
        {"llama.attention.head_count": 5, "llama.attention.key_length": GONE},
        "llama.embedding_length 64 is no multiple of the 5 heads",
    ),
    "an odd rope": ({"llama.rope.dimension_count": 7}, "rotates 7 of a head's 16 coordinates"),
    "scaling unknown": ({"llama.rope.scaling.type": "ntk"}, "GGUF rope scaling 'ntk' is not"),
    "scaling a number": ({"llama.rope.scaling.type": 3}, "GGUF rope scaling 3 is not supported"),
    "yarn of no length": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        "original_context_length is missing; yarn needs it",
    ),
    "end id past the vocabulary": ({"tokenizer.ggml.eos_token_id": 320}, "token 320 is beyond the"),
    "tensors of nothing": ({}, "tensors are missing: "),
}

# SPDX-License-Identifier: Apache-2.0
"""What a family file declares, and the readings and writings of a config that families share."""

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from engine.models.config import ModelConfig
from engine.models.specs import layer_specs, outer_specs
from engine.models.values import count, first_id, ids, number, required

Transform = Callable[[np.ndarray], np.ndarray]

TOKENS = "tokenizer.ggml.tokens"
NO_ID = 2**32 - 1  # how some GGUF writers spell -1, "there is none"

# More than any model has, and few enough that a damaged config cannot ask for gigabytes of names.
MOST_LAYERS = MOST_EXPERTS = 10_000


class Entry(NamedTuple):
    """Where a parameter stands: its tensor, `transform` from stored to ours, `inverse` back.

    Both are None where the tensor is stored as it is used. Tables of "huggingface" have an inverse
    wherever they have a transform in the families of GGUF files, which are written as folders. A
    tensor that several parameters are cut from has them as its `part`s, in rows [start, stop) of
    its first axis, or, where their transforms tell them apart, by names of their own. "{expert}" in
    a tensor's name stands for each expert, whose tensors are stacked.
    """

    tensor: str
    transform: Transform | None = None
    inverse: Transform | None = None
    part: tuple[int, int] | str | None = None

    @property
    def rows(self) -> tuple[int, int] | None:
        """The part, if it is rows."""
        return None if isinstance(self.part, str) else self.part

    @property
    def share(self) -> str | None:
        """The part, if it has a name."""
        return self.part if isinstance(self.part, str) else None


@dataclasses.dataclass(frozen=True)
class Names:
    """Where parameters stand in a checkpoint; tensor names of `layers` contain "{layer}"."""

    outer: Mapping[str, Entry]
    layers: Mapping[str, Entry]


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family. `names(kind, config)` gives the name table of a checkpoint kind.

    `to_hf(config)` is a whole config.json in the keys of transformers 5: `from_hf` of it gives the
    same ModelConfig. `predictors`: layers after the last may stand in a folder, which predict
    further tokens (multi-token prediction); they are known, and not used.
    """

    name: str
    model_types: tuple[str, ...]  # `model_type` of config.json
    architectures: tuple[str, ...]  # of GGUF files, as `family_of` in engine/loading.py has it
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    names: Callable[[str, ModelConfig], Names]
    to_hf: Callable[[ModelConfig], dict[str, Any]] | None = None  # of families that GGUF has
    from_gguf: Callable[[Mapping[str, Any]], ModelConfig] | None = None
    predictors: bool = False


def transposed(weight: np.ndarray) -> np.ndarray:
    """Returns the matrix, or each of a stack of them, from [out, in] to [in, out] and back."""
    return np.swapaxes(weight, -1, -2)


def sizes_from_hf(
    config: Mapping[str, Any], *, max_position: int, head_width: int | None = None
) -> dict[str, Any]:
    """Returns the fields of a ModelConfig that config.json of every family spells alike.

    `max_position` and `head_width` (None: the width shared by the heads) hold where it has none.
    """
    heads, width = count(config, "num_attention_heads"), count(config, "hidden_size")
    if head_width is None and config.get("head_dim") is None:
        head_width = share(width, heads, "hidden_size")
    return {
        "vocab_size": count(config, "vocab_size"),
        "width": width,
        "ffn_width": count(config, "intermediate_size"),
        "num_layers": count(config, "num_hidden_layers", most=MOST_LAYERS),
        "query_heads": heads,
        "kv_heads": count(config, "num_key_value_heads", heads),
        "head_width": count(config, "head_dim", head_width),
        "max_position": count(config, "max_position_embeddings", max_position),
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "bos_id": first_id(config, "bos_token_id"),
        "eos_ids": ids(config, "eos_token_id"),
    }


def share(width: int, heads: int, key: str) -> int:
    """Returns the width of a head where the config names none; raises ValueError for a fraction."""
    if width % heads:
        raise ValueError(
            f"{key} {width} is no multiple of the {heads} heads, and no width of a head is given"
        )
    return width // heads


def sizes_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns what config.json of every family spells alike; ids that are unknown are left out."""
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
    }
    if config.bos_id is not None:
        keys["bos_token_id"] = config.bos_id
    if config.eos_ids:
        only = len(config.eos_ids) == 1
        keys["eos_token_id"] = config.eos_ids[0] if only else list(config.eos_ids)
    return keys


def sizes_from_gguf(meta: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the fields of a ModelConfig that GGUF files of every architecture spell alike.

    Whether the embeddings are tied is settled later, by whether the file has an output matrix.
    """
    heads = count(meta, f"{architecture}.attention.head_count")
    width = count(meta, f"{architecture}.embedding_length")
    own, head_key = f"{architecture}.vocab_size", f"{architecture}.attention.key_length"
    tokens = None if own in meta else len(required(meta, TOKENS))
    head_width = None
    if head_key not in meta:
        head_width = share(width, heads, f"{architecture}.embedding_length")
    bos, eos = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
    named = {key: meta.get(key) for key in (bos, eos) if meta.get(key) != NO_ID}
    return {
        "vocab_size": count(meta, own, tokens),
        "width": width,
        "ffn_width": count(meta, f"{architecture}.feed_forward_length"),
        "num_layers": count(meta, f"{architecture}.block_count", most=MOST_LAYERS),
        "query_heads": heads,
        "kv_heads": count(meta, f"{architecture}.attention.head_count_kv", heads),
        "head_width": count(meta, head_key, head_width),
        "max_position": count(meta, f"{architecture}.context_length"),
        "norm_eps": number(meta, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "tied_embeddings": True,
        "bos_id": first_id(named, bos),
        "eos_ids": ids(named, eos),
    }


Conversions = Mapping[str, tuple[Transform, Transform | None]]
Parts = Mapping[str, tuple[int, int] | str]


def hf_names(
    config: ModelConfig,
    layers: Mapping[str, str],
    conversions: Conversions | None = None,
    parts: Parts | None = None,
) -> Names:
    """Returns the name table of a Hugging Face folder, for the parameters that `config` has.

    `layers` is {parameter: name within a layer}, `conversions` {parameter: (transform, inverse)},
    `parts` {parameter: its rows of a tensor that it shares}.
    """
    outer = {
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    }
    return _present(config, outer, layers, "model.layers.{layer}.", conversions, parts)


def gguf_names(
    config: ModelConfig,
    layers: Mapping[str, str],
    conversions: Conversions | None = None,
    parts: Parts | None = None,
) -> Names:
    """Returns the name table of a GGUF file; arguments as for `hf_names`."""
    outer = {
        "embedding": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "head": "output.weight",
    }
    return _present(config, outer, layers, "blk.{layer}.", conversions, parts)


def _present(
    config: ModelConfig,
    outer: Mapping[str, str],
    layers: Mapping[str, str],
    prefix: str,
    conversions: Conversions | None,
    parts: Parts | None,
) -> Names:
    any_dtype = np.dtype(np.float32)

    def entry(prefix, tensor, name):
        transform, inverse = (conversions or {}).get(name, (None, None))
        return Entry(prefix + tensor, transform, inverse, (parts or {}).get(name))

    def entries(prefix, tensors, specs):
        return {name: entry(prefix, tensors[name], name) for name in tensors if name in specs}

    return Names(
        entries("", outer, outer_specs(config, any_dtype)),
        entries(prefix, layers, every_layers_specs(config, any_dtype)),
    )


def every_layers_specs(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """Returns the parameters that some layer has."""
    runs = config.segments()
    return {
        name: spec for run in runs for name, spec in layer_specs(config, dtype, run.start).items()
    }


def attention_types(types: Any, layers: int) -> list[str]:
    """Returns `layer_types` of a config, which may name full and sliding attention only."""
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"layer_types must be a list of {layers}, one for each layer")
    if unknown := [kind for kind in types if kind not in known]:
        raise ValueError(
            f"layer type {reprlib.repr(unknown[0])} is not supported; use {' or '.join(known)}"
        )
    return types

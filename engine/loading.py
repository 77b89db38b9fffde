# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk becomes a ModelConfig, a tree of sharded parameters and a tokenizer."""

import contextlib
import dataclasses
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints import open_checkpoint
from checkpoints.checkpoint import DTYPES, Checkpoint
from checkpoints.folder import CONFIG, read_json
from checkpoints.load import check_parameters, load_parameters, warn_of_unused
from checkpoints.sources import NO_TENSOR, Source, Target
from checkpoints.tokenizer import Tokenizer
from engine.expert_places import COPIES, SLOTS, first_slots, tables_of
from engine.log import logger
from engine.models import FAMILIES
from engine.models.config import ModelConfig
from engine.models.family import Entry, Family, Names
from engine.models.rope_keys import with_factors
from engine.models.split import Chosen, after, arrangement, split_config
from engine.models.stages import stacked_layers
from engine.models.tree import parameter_specs
from engine.models.values import ids
from engine.params import SamplingParams
from sharding import Rules, Spec

# Where the output head stands when embeddings are not tied, by checkpoint kind.
HEAD_TENSOR = {
    "gguf": "output.weight",
    "huggingface": "lm_head.weight",
    "orbax": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # one list for any length, as Llama 3.1 has it
ROPE_LISTS = (ROPE_FACTORS, "rope_factors_short.weight", "rope_factors_long.weight")
# Biases of a GGUF file, by the tensor that only files with them have.
GGUF_BIASES = {
    "qkv_bias": "blk.0.attn_q.bias",
    "output_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_up.bias",
}
EMBEDDING_TENSOR = {
    "gguf": "token_embd.weight",
    "huggingface": "model.embed_tokens.weight",
    "orbax": "model.embed_tokens.weight",
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model opened but not loaded: its config, checkpoint, tokenizer and end ids."""

    config: ModelConfig
    family: Family
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]


def open_model(path: Path) -> Model:
    """Returns the model at `path`, its headers read and checked; no weights are read.

    Raises ValueError for a family that is not known, naming those that are.
    """
    checkpoint = open_checkpoint(path)
    family = family_of(path, checkpoint.kind, checkpoint.config)
    with faults_of(path):
        config = config_of(family, checkpoint)
        eos_ids = ids(checkpoint.generation_config, "eos_token_id")
    config = dataclasses.replace(config, tied_embeddings=embeddings_tied(config, checkpoint))
    tokenizer = checkpoint.tokenizer()
    eos_ids += config.eos_ids + (tokenizer.eos_ids if tokenizer else ())
    starts = (config.bos_id, tokenizer.bos_id if tokenizer else None)
    for token in (*eos_ids, *starts):
        if token is not None and token >= config.vocab_size:
            raise ValueError(
                f"{path}: the start or end token {token} is beyond the vocabulary of "
                f"{config.vocab_size}; correct the checkpoint's token ids"
            )
    return Model(config, family, checkpoint, tokenizer, tuple(dict.fromkeys(eos_ids)))


def read_config(path: Path) -> ModelConfig:
    """Returns what a model is made of, without its weights, which need not be there.

    `path` is a folder with config.json, such a file by itself, or a GGUF file. Of a model that
    takes more than text (a config with a `text_config`) it is the text model. Raises ValueError
    as `open_model` does.
    """
    if path.is_file() and path.suffix != ".json":
        checkpoint = open_checkpoint(path)
        family = family_of(path, checkpoint.kind, checkpoint.config)
        with faults_of(path):
            config = config_of(family, checkpoint)
        return dataclasses.replace(config, tied_embeddings=embeddings_tied(config, checkpoint))
    settings = read_json(path, CONFIG) if path.is_dir() else read_json(path.parent, path.name)
    if isinstance(nested := settings.get("text_config"), dict):
        settings = nested
    family = family_of(path, "huggingface", settings)
    with faults_of(path):
        return family.from_hf(settings)


def family_of(path: Path, kind: str, settings: Mapping[str, Any]) -> Family:
    """Returns the family that a checkpoint's settings name; ValueError names those known.

    A folder's class, where it states one, must be for generation.
    """
    gguf = kind == "gguf"
    key = "general.architecture" if gguf else "model_type"
    name = settings.get(key)
    if gguf and name == "llama" and settings.get("llama.expert_count"):
        name = "llama with experts"  # a family of its own here
    known = {n: f for f in FAMILIES for n in (f.architectures if gguf else f.model_types)}
    family = known.get(str(name))
    if family is None:
        raise ValueError(
            f"{path}: {key} {reprlib.repr(name)} is not supported in a {kind} checkpoint; "
            f"supported are {', '.join(known)}"
        )
    if not gguf and settings.get("architectures"):
        with faults_of(path):
            check_class(settings["architectures"])
    return family


def check_class(classes: Any) -> None:
    """Raises ValueError for `architectures` that do not generate.

    The tensors of a classifier may be those of a model that does, and what they mean is not.
    """
    first = classes[0] if isinstance(classes, list) else classes
    if not isinstance(first, str) or not first.endswith("ForCausalLM"):
        raise ValueError(
            f"architectures {reprlib.repr(classes)} do not generate text; a class that ends in "
            "ForCausalLM is needed"
        )


@contextlib.contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Names the model in errors of its settings: a value unlike its key's raises anything."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from None


def config_of(family: Family, checkpoint: Checkpoint) -> ModelConfig:
    """Returns the config of a checkpoint.

    What a GGUF file says by its tensors alone: biases, and lists of rope factors.
    """
    if checkpoint.kind != "gguf":
        return family.from_hf(checkpoint.config)
    assert family.from_gguf is not None, "its architectures were looked up"
    config = family.from_gguf(checkpoint.config)
    biases: dict[str, Any] = {
        field: True for field, name in GGUF_BIASES.items() if name in checkpoint.tensors
    }
    config = dataclasses.replace(config, **biases)
    stored = [name for name in ROPE_LISTS if name in checkpoint.tensors]
    if not stored:
        key = f"{checkpoint.config['general.architecture']}.rope.scaling.type"
        if checkpoint.config.get(key) == "longrope":
            raise ValueError(f"{key} is longrope, but {' and '.join(ROPE_LISTS[1:])} are missing")
        return config
    for name in stored:
        shape, needed = checkpoint.tensors[name].shape, (config.rope_width // 2,)
        if shape != needed:
            raise ValueError(f"tensor {name!r} has shape {shape}; the rope needs {needed}")
    lists = {name: checkpoint.read(name) for name in stored}
    either, *two = ROPE_LISTS
    short, long = (lists.get(name, lists.get(either)) for name in two)
    if short is None or long is None:
        raise ValueError(f"of {' and '.join(two)} one is missing")
    rope = with_factors(config.ropes[0], checkpoint.config, short.tolist(), long.tolist())
    return dataclasses.replace(config, ropes=(rope, *config.ropes[1:]))


# Of generation_config.json, by our names; what it has beside them says nothing of sampling.
DEFAULTS = {
    name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
} | {"max_new_tokens": "max_tokens"}


def generation_defaults(model: Model) -> SamplingParams:
    """Returns the sampling parameters that the checkpoint recommends, where it does.

    A `do_sample` of false is greedy. Raises ValueError for one
    that cannot be.
    """
    found = {
        ours: model.checkpoint.generation_config[theirs]
        for theirs, ours in DEFAULTS.items()
        if model.checkpoint.generation_config.get(theirs) is not None
    }
    if model.checkpoint.generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    if not found:
        return SamplingParams()
    try:
        params = SamplingParams.from_dict(found)
    except ValueError as error:
        raise ValueError(
            f"{model.checkpoint.path}: generation_config.json: {error}; or leave it out with "
            "generation_config='none'"
        ) from None
    spelled = ", ".join(f"{name}={value}" for name, value in found.items())
    logger().info("generation_config.json: %s", spelled)
    return params


def embeddings_tied(config: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Returns whether the head is the embedding.

    A stored head that differs from the embedding wins over the config's flag, with a warning; a
    GGUF file says it by having no output matrix.
    """
    head = HEAD_TENSOR[checkpoint.kind]
    if head not in checkpoint.tensors:
        return config.tied_embeddings
    if not config.tied_embeddings:
        return False
    embedding = EMBEDDING_TENSOR[checkpoint.kind]
    if checkpoint.kind == "gguf" or embedding not in checkpoint.tensors:
        return False
    same = np.array_equal(checkpoint.read(head), checkpoint.read(embedding))
    if not same:
        logger().warning(
            "%s: the config ties the embeddings, but %s differs from them; the stored head is used",
            checkpoint.path,
            head,
        )
    return same


def stored_dtype(checkpoint: Checkpoint) -> np.dtype:
    """Returns the type that a checkpoint's weights are best kept in, of float32 and the halves.

    That of the matrices where norms are in float32 beside them; bfloat16 is never narrowed to
    float16. Checkpoints with quantized weights, and so GGUF files, which nearly always have some,
    are bfloat16.
    """
    stored = {info.dtype for info in checkpoint.tensors.values()}
    name = "float16" if "F16" in stored else "float32"
    if "BF16" in stored or stored - DTYPES.keys() or checkpoint.kind == "gguf":
        name = "bfloat16"
    return np.dtype(jax.numpy.dtype(name))


def check_model(model: Model, mesh: Mesh, rules: Rules, dtype: np.dtype, *, stacked: bool) -> None:
    """Raises ValueError naming every missing or mis-shaped tensor, without reading any.

    Also for KV heads that cannot be shared out over the mesh.
    Tensors that no parameter needs are reported in one warning, known ones in a line.
    """
    sources, targets, _ = parameter_tables(model, mesh, rules, dtype, stacked=stacked)
    check_parameters(model.checkpoint, sources, {name: targets[name] for name in sources})
    ignored = {HEAD_TENSOR[model.checkpoint.kind]} if model.config.tied_embeddings else set()
    predictors = predictor_tensors(model)
    if predictors:
        logger().info(
            "%s: %d tensors of multi-token prediction are not used",
            model.checkpoint.path,
            len(predictors),
        )
    warn_of_unused(model.checkpoint, sources, ignored | predictors)


def predictor_tensors(model: Model) -> set[str]:
    """Returns the tensors of layers that predict further tokens: those after the last layer."""
    if not model.family.predictors:
        return set()
    numbered = (
        (name, re.match(r"model\.layers\.(\d+)\.", name)) for name in model.checkpoint.tensors
    )
    return {name for name, found in numbered if found and int(found[1]) >= model.config.num_layers}


def load_model(model: Model, mesh: Mesh, rules: Rules, dtype: np.dtype, *, stacked: bool) -> Any:
    """Returns the tree of parameters on `mesh`, each read once and cast to its spec's dtype.

    Raises ValueError as `check_model` does, before device memory is taken.
    """
    sources, targets, treedef = parameter_tables(model, mesh, rules, dtype, stacked=stacked)
    made = {name: targets[name] for name in targets.keys() - sources.keys()}
    stored = {name: targets[name] for name in sources}
    loaded = load_parameters(model.checkpoint, sources, stored)
    loaded |= slot_tables(model.config, made, rules.ways(mesh, "experts"))
    return jax.tree.unflatten(treedef, [loaded[name] for name in targets])


def slot_tables(
    config: ModelConfig, targets: Mapping[str, Target], ways: int
) -> dict[str, jax.Array]:
    """Returns the parameters that tell where experts are at first."""
    found: dict[str, jax.Array] = {}
    for name, target in targets.items():
        assert config.experts is not None and target.sharding is not None, "they are of slots"
        tables = tables_of(first_slots(config.experts, ways), config.experts)
        table = tables.copies_E if COPIES in name else tables.slots_EX
        whole = np.broadcast_to(table, target.shape)
        found[name] = jax.make_array_from_callback(target.shape, target.sharding, whole.__getitem__)
    return found


def check_counts(model: Model) -> None:
    """Raises ValueError where the config has more layers, or more experts that stand alone in the
    checkpoint, than there are tensors: their names alone could fill the memory."""
    config, tensors = model.config, len(model.checkpoint.tensors)
    if config.num_layers > tensors:
        raise ValueError(
            f"{model.checkpoint.path}: the config has {config.num_layers} layers, the checkpoint "
            f"{tensors} tensors; one of them is not whole"
        )
    names = model.family.names(model.checkpoint.kind, config)
    alone = any("{expert}" in entry.tensor for entry in names.layers.values())
    if alone and config.experts and sum(config.expert_layers) * config.experts.count > tensors:
        raise ValueError(
            f"{model.checkpoint.path}: the config has {config.experts.count} experts in "
            f"{sum(config.expert_layers)} layers, the checkpoint {tensors} tensors; one of them is "
            "not whole"
        )


def parameter_tables(
    model: Model, mesh: Mesh, rules: Rules, dtype: np.dtype, *, stacked: bool
) -> tuple[dict[str, Source], dict[str, Target], Any]:
    """Returns where each parameter comes from, what it shall be, and the tree they make.

    It shall be that of the config as it is split over the mesh.
    """
    check_counts(model)
    ways = rules.ways(mesh, "kv_heads")
    names = model.family.names(model.checkpoint.kind, model.config)
    is_spec = lambda leaf: isinstance(leaf, Spec)  # noqa: E731
    form = dict(stacked=stacked, stages=mesh.shape["pipe"])
    stored = parameter_specs(model.config, dtype, **form)
    split = split_config(model.config, ways, rules.ways(mesh, "expert_ffn"))
    specs = parameter_specs(split, dtype, **form)
    paths, treedef = jax.tree.flatten_with_path(specs, is_leaf=is_spec)
    arranged = {
        path: arrangement(spec, was, model.config, ways)
        for (path, spec), was in zip(paths, jax.tree.leaves(stored, is_leaf=is_spec), strict=True)
    }
    experts, placed = model.config.experts, None
    if experts is not None and experts.slots:
        placed = first_slots(experts, rules.ways(mesh, "experts"))
    sources: dict[str, Source] = {}
    targets: dict[str, Target] = {}
    for path, spec in paths:
        name = jax.tree_util.keystr(path)
        place = rules.sharding(mesh, spec), rules.layout(mesh, spec)
        targets[name] = Target(spec.shape, spec.dtype, *place)
        if path_keys(path)[-1] in (SLOTS, COPIES):
            continue  # of no checkpoint
        source = source_of(path, names, model.config, stacked, mesh.shape["pipe"], placed)
        sources[name] = source._replace(transform=after(source.transform, arranged[path]))
    return sources, targets, treedef


def source_of(
    path: tuple[Any, ...],
    names: Names,
    config: ModelConfig,
    stacked: bool,
    stages: int = 1,
    placed: Sequence[int] | None = None,
) -> Source:
    """Returns where the parameter at a tree path stands in the checkpoint.

    `placed`: the expert of each slot, where experts have slots.
    """
    keys = path_keys(path)
    entry = entry_of(path, names, config)
    layers: list[int | None] = [0]
    if keys[0] == "segments":
        run = config.segments()[keys[1]]
        layers = stacked_layers(config, stages)[keys[1]] if stacked else [run[keys[2]]]
    several = "{expert}" in entry.tensor
    experts: Sequence[int] = range(1)
    transform = entry.transform
    if several:
        assert config.experts is not None, "there are several"
        experts = placed or range(config.experts.count)
    elif placed is not None and keys[-1].startswith("experts_"):
        transform = after(transform, Chosen(tuple(placed)))
    tensors = tuple(
        NO_TENSOR if i is None else entry.tensor.format(layer=i, expert=e)
        for i in layers
        for e in experts
    )
    stack = int(stacked and keys[0] == "segments") + int(several)
    return Source(tensors, transform, stack, entry.rows, entry.share)


def entry_of(path: tuple[Any, ...], names: Names, config: ModelConfig) -> Entry:
    """Returns the entry of the parameter at a tree path."""
    keys = path_keys(path)
    table = names.layers if keys[0] == "segments" else names.outer
    if keys[-1] not in table:
        raise ValueError(f"a {config.family} has no {keys[-1]} in checkpoints of this kind")
    return table[keys[-1]]


def path_keys(path: tuple[Any, ...]) -> list[Any]:
    """Returns the keys and indices of a tree path."""
    return [getattr(key, "key", getattr(key, "idx", None)) for key in path]


def abstract_parameters(
    config: ModelConfig, mesh: Mesh, rules: Rules, dtype: np.dtype, *, stacked: bool
) -> Any:
    """Returns the tree of parameters as abstract arrays with their shardings on `mesh`.

    They are those of the config as it is split over the mesh.
    """
    split = split_config(config, rules.ways(mesh, "kv_heads"), rules.ways(mesh, "expert_ffn"))
    specs = parameter_specs(split, dtype, stacked=stacked, stages=mesh.shape["pipe"])
    leaf = lambda spec: isinstance(spec, Spec)  # noqa: E731
    return jax.tree.map(lambda spec: rules.abstract(mesh, spec), specs, is_leaf=leaf)

# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints and tokenizers, written as real Hugging Face folders: no mock in the engine.

- `write_script`: a llama whose logits after a token are a given table's row (SCRIPT, F1).
- `write_tiny`: a random llama, for comparison with a full recompute (TINY, F2).
- `byte_tokenizer`, `fallback_tokenizer`: where a character takes several tokens (F3 and F3b).

Everything is the same each time it is made.
"""

import functools
import json
import pathlib

import numpy as np
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCABULARY = 300
BOS, EOS = "<s>", "</s>"
NOTE = "<note>"  # an added token that is not special: its text is shown

# ASCII only, so that no merge ever joins the bytes of another character.
CORPUS = [
    "the water comes down the head race and turns the wheel of the mill",
    "the miller sets the gate in the morning and the wheel turns all day",
    "where the race ends the water falls and the stream takes it to the sea",
] * 4


def write_checkpoint(folder, config, tensors, tokenizer):
    """Writes a Hugging Face folder, with a tokenizer if there is one; returns the folder."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def llama_config(**changes):
    """Returns the config of a small llama with the ids of the tokenizers below."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "vocab_size": VOCABULARY,
    } | changes


def llama_shapes(config):
    """Returns {tensor name: shape} of a llama checkpoint with an own head."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
        "lm_head.weight": (config["vocab_size"], width),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
                "self_attn.q_proj": (queries, width),
                "self_attn.k_proj": (keys, width),
                "self_attn.v_proj": (keys, width),
                "self_attn.o_proj": (width, queries),
                "mlp.gate_proj": (inner, width),
                "mlp.up_proj": (inner, width),
                "mlp.down_proj": (width, inner),
            }.items()
        }
    return shapes


def write_script(folder, table, *, tokenizer=None, layers=1, **changes):
    """Writes a llama whose next-token logits are `table[last token]`; returns the folder.

    `table` is [vocabulary, vocabulary]. Embeddings are one-hot and every layer adds zero, so the
    last norm sees the token's unit vector and scales it by 1/sqrt(1/width + eps); the head undoes
    that. Keyword `changes` go into config.json.
    """
    table = np.asarray(table, np.float32)
    vocabulary = len(table)
    width = -(-vocabulary // 8) * 8
    config = llama_config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        **changes,
    )
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in llama_shapes(config).items():
        if "norm" in name:
            tensors[name] = np.ones(shape, np.float32)
        elif "o_proj" in name or "down_proj" in name:
            tensors[name] = np.zeros(shape, np.float32)
        else:
            tensors[name] = rng.normal(0, 0.1, shape).astype(np.float32)
    scale = np.sqrt(1 / width + config["rms_norm_eps"])
    tensors["model.embed_tokens.weight"] = np.eye(vocabulary, width, dtype=np.float32)
    tensors["lm_head.weight"] = np.zeros((vocabulary, width), np.float32)
    tensors["lm_head.weight"][:, :vocabulary] = table.T * scale
    return write_checkpoint(folder, config, tensors, tokenizer)


def script_table(token_ids, *, vocabulary=VOCABULARY, high=10.0, then=2):
    """Returns the table of a model that says `token_ids` one after another, then the id `then`.

    The first id follows every token that is not in the list. An id can have one successor only, so
    a list that repeats an id with two successors raises ValueError.
    """
    successor = dict.fromkeys(range(vocabulary), token_ids[0])
    said = {}
    for here, there in zip(token_ids, [*token_ids[1:], then], strict=True):
        if said.setdefault(here, there) != there:
            raise ValueError(f"token {here} would be followed by {said[here]} and by {there}")
    successor |= said
    table = np.zeros((vocabulary, vocabulary), np.float32)
    for here, there in successor.items():
        table[here, there] = high
    return table


def write_tiny(folder, *, seed=0, tokenizer=None, **changes):
    """Writes a random llama: 2 layers, 4 query and 2 KV heads of 16, float32; returns the folder.

    Every other dimension is different, so that a transposed array cannot hide; the head is scaled
    up so that the two best logits are rarely near each other.
    """
    config = llama_config(
        **{
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        }
        | changes
    )
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in llama_shapes(config).items():
        if "norm" in name:
            tensors[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            spread = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 5 / shape[-1] ** 0.5}
            scale = spread.get(name, 1.5 / shape[-1] ** 0.5)
            tensors[name] = rng.normal(0, scale, shape).astype(np.float32)
    return write_checkpoint(folder, config, tensors, tokenizer)


@functools.cache
def byte_tokenizer():
    """Returns a byte-level BPE of 300 entries (F3): a character beyond ASCII is several tokens.

    Ids 0, 1 and 2 are the special tokens <unk>, <s> and </s>; NOTE is an added, ordinary token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        special_tokens=["<unk>", BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(NOTE, special=False, normalized=False)])
    return tokenizer


@functools.cache
def fallback_tokenizer():
    """Returns a SentencePiece-style BPE (F3b): byte fallback, and a dummy space in front of a text.

    Ids 0, 1 and 2 are <unk>, <s> and </s>; a BOS comes first. NOTE is an added, ordinary token.
    """
    words = [" " + text for text in CORPUS]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=40, show_progress=False)
    trained.train_from_iterator(words, trainer)
    learned = json.loads(trained.to_str())["model"]

    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 1)]
    )
    tokenizer.add_special_tokens(["<unk>", BOS, EOS])
    tokenizer.add_tokens([AddedToken(NOTE, special=False, normalized=False)])
    return tokenizer

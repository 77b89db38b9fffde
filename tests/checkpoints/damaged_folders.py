# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders that are damaged or hostile: how each is written, and what is said of it.

`CASES` is {name: (what it does to a good folder, a part of the error)}. All are small on disk; what
claims to be large is a sparse file.
"""

import io
import json
import os
import pathlib
import pickle
import struct
import zipfile

import numpy as np
from safetensors.numpy import save_file

from tests.fixtures import byte_tokenizer, write_checkpoint

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
CONFIG = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}
TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}
MARKER = "marker"
NOT_SAFETENSORS = "model.safetensors: truncated, damaged or not safetensors ("


def write_good(folder):
    """Writes a folder that loads, of two tensors and a tokenizer; returns it."""
    return write_checkpoint(folder, CONFIG, TENSORS, byte_tokenizer())


class Toucher:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def pickled(folder):
    return pickle.dumps(Toucher(pathlib.Path(folder) / MARKER))


def sparse(path, num_bytes, start=b""):
    """Writes a file that claims `num_bytes` and takes nearly none."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(num_bytes)


def put(name, content):
    """Returns the damage that gives a file of the folder other contents: bytes, text, JSON."""

    def damage(folder):
        data = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    return damage


def claims(name, num_bytes, start=b""):
    return lambda folder: sparse(folder / name, num_bytes, start)


def is_folder(name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


def is_pipe(name):
    """A reader of a pipe would wait for ever."""

    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def leads_out(name):
    """The file is there, but as a link to one outside of the folder."""

    def damage(folder):
        outside = folder.parent / "outside"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return damage


def safetensors(header, data=b"\0" * 32, length=None):
    """Returns the bytes of a file; `header` is bytes, text or JSON."""
    if not isinstance(header, str | bytes):
        header = json.dumps(header)
    header = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(dtype="F32", shape=(2, 4), offsets=(0, 32), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)} | more


def weights(header, data=b"\0" * 32, length=None):
    return put(WEIGHTS, safetensors(header, data, length))


def damaged_weights(said, damage):
    return damage, NOT_SAFETENSORS + said


ENTRY = '"a": ' + json.dumps(tensor())
HEADERS = {
    "no bytes": damaged_weights("", put(WEIGHTS, b"")),
    "half a header length": damaged_weights("", put(WEIGHTS, b"\x10\0\0\0")),
    "a header length alone": damaged_weights("", put(WEIGHTS, struct.pack("<Q", 64))),
    "a header cut short": damaged_weights("", weights("{" + ENTRY, b"", length=999)),
    "a header of 2^60 bytes": damaged_weights(
        f"its header has {1 << 60} bytes; at most 16777216", weights("{}", length=1 << 60)
    ),
    "a header of 2^64 - 1 bytes": damaged_weights(
        "its header has 18446744073709551615 bytes", weights("{}", length=2**64 - 1)
    ),
    "a header of 90 MB": damaged_weights(
        "its header has 90000000 bytes",
        claims(WEIGHTS, 100_000_000, struct.pack("<Q", 90_000_000) + b"{"),
    ),
    "a header that is no JSON": damaged_weights("", weights("not JSON at all")),
    "a header that is not UTF-8": damaged_weights("", weights(b'{"\xff\xfe": 1}')),
    "a header that is a list": damaged_weights("", weights("[1, 2]")),
    "a header that is null": damaged_weights("", weights("null")),
    "a nested header": damaged_weights("", weights('{"a":' * 3000 + "1" + "}" * 3000)),
    "a tensor twice": damaged_weights("'a' is there twice", weights(f"{{{ENTRY}, {ENTRY}}}")),
    "a tensor that is null": damaged_weights("", weights({"a": None})),
    "no offsets": damaged_weights("", weights({"a": {"dtype": "F32", "shape": [2]}})),
    "no shape": damaged_weights("", weights({"a": {"dtype": "F32", "data_offsets": [0, 32]}})),
    "one offset": damaged_weights("", weights({"a": tensor(offsets=[0])})),
    "offsets turned round": damaged_weights("", weights({"a": tensor(offsets=[32, 0])})),
    "a negative offset": damaged_weights("", weights({"a": tensor(offsets=[-32, 0])})),
    "offsets past the end": damaged_weights("", weights({"a": tensor(offsets=[0, 32])}, b"\0" * 8)),
    "offsets of 2^63": damaged_weights("", weights({"a": tensor(offsets=[2**63, 2**63 + 32])})),
    "tensors that overlap": damaged_weights(
        "", weights({"a": tensor(), "b": tensor(shape=[4], offsets=[16, 32])})
    ),
    "a hole between tensors": damaged_weights(
        "", weights({"a": tensor(shape=[2], offsets=[0, 8]), "b": tensor("F32", [2], [16, 24])})
    ),
    "bytes that no tensor has": damaged_weights("", weights({"a": tensor()}, b"\0" * 64)),
    "a type that is none": damaged_weights("", weights({"a": tensor("F31")})),
    "a type that is a number": damaged_weights("", weights({"a": tensor(32)})),
    "a negative dimension": damaged_weights("", weights({"a": tensor(shape=[-2, -4])})),
    "a dimension that is no integer": damaged_weights("", weights({"a": tensor(shape=[2.0, 4])})),
    "a dimension of 2^70": damaged_weights("", weights({"a": tensor(shape=[2**70])})),
    "a product that overflows": damaged_weights("", weights({"a": tensor(shape=[2**40] * 3)})),
    "a shape of other bytes": damaged_weights("", weights({"a": tensor(shape=[2, 5])})),
    "a name of two lines": damaged_weights("", weights({"a\nb": tensor(shape=[2, 5])})),
    "metadata of numbers": damaged_weights("", weights({"__metadata__": {"n": 1}, "a": tensor()})),
    "a type that we do not read": (weights({"a": tensor("C64", [4])}), "has type C64, which is"),
    "weights that are a folder": (is_folder(WEIGHTS), "model.safetensors: the shard is missing"),
    "weights that are a pipe": (is_pipe(WEIGHTS), "model.safetensors: the shard is missing"),
    "weights that lead out": (leads_out(WEIGHTS), "'model.safetensors' leads out of the model"),
}


def shard_named(name):
    return put(INDEX, {"weight_map": {"a": name}})


def loop_of_links(folder):
    (folder / "x.safetensors").symlink_to("y.safetensors")
    (folder / "y.safetensors").symlink_to("x.safetensors")
    shard_named("x.safetensors")(folder)


def pickled_shard(folder):
    (folder / "a.pt").write_bytes(pickled(folder))
    shard_named("a.pt")(folder)


def in_the_other_shard(folder):
    (folder / WEIGHTS).unlink()
    for shard, name in (("1.safetensors", "a"), ("2.safetensors", "b")):
        save_file({name: TENSORS[name]}, folder / shard)
    put(INDEX, {"weight_map": {"a": "2.safetensors", "b": "2.safetensors"}})(folder)


INDICES = {
    "an index that is a list": (put(INDEX, "[]"), "index.json: a JSON object is needed"),
    "an index cut short": (put(INDEX, '{"weight_map": {"a": '), "index.json: Expecting value"),
    "a nested index": (put(INDEX, '{"weight_map":' * 999), "index.json: nested deeper than 64"),
    "an index of 4 GB": (claims(INDEX, 1 << 32, b"{"), "index.json: has 4294967296 bytes; at most"),
    "a shard that is a number": (shard_named(7), "index.json: tensor 'a' names no shard"),
    "a shard without a name": (shard_named(""), "weights are read from safetensors only"),
    "a shard that is the folder": (shard_named("."), "weights are read from safetensors only"),
    "a shard of two lines": (shard_named("a\nb.safetensors"), "'a\\nb.safetensors' is no usable"),
    "a shard with a null": (shard_named("a\0.safetensors"), "is no usable path"),
    "a shard of a long name": (shard_named("a" * 5000 + ".safetensors"), "File name too long"),
    "a shard in the parent": (shard_named("../x.safetensors"), "leads out of the model folder"),
    "a shard at the root": (shard_named("/x.safetensors"), "leads out of the model folder"),
    "a shard that is a pickle": (pickled_shard, "convert them with save_pretrained"),
    "shards that are a loop of links": (loop_of_links, "x.safetensors"),
    "a tensor in the other shard": (
        in_the_other_shard,
        "2.safetensors: tensor 'a' is missing, though the index says that it is here",
    ),
}


def only_pickle(name):
    def damage(folder):
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickled(folder))

    return damage


def zipped(folder):
    """A checkpoint as torch.save writes it: a zip with a pickle, under a name that is trusted."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(folder))
    (folder / WEIGHTS).write_bytes(buffer.getvalue())


PICKLES = {
    **{
        f"a pickle {name}": (
            only_pickle(name),
            f"the weights are in {name}; weights are read from safetensors only, since opening a "
            "pickle (.bin, .pt) can run code; convert them with save_pretrained",
        )
        for name in ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "weights.pkl")
    },
    "a pickle under a trusted name": damaged_weights(
        "", lambda folder: (folder / WEIGHTS).write_bytes(pickled(folder))
    ),
    "a torch archive under a trusted name": damaged_weights("", zipped),
    "a pickle for a tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_bytes(pickled(folder)),
        "tokenizer.json: not a tokenizer that can be read",
    ),
}


def bpe(vocabulary, merges=()):
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": list(merges)}}


DEEP = '{"a":' * 100 + "1" + "}" * 100
SETTINGS = {
    "settings cut short": (put("config.json", '{"a": 1,'), "config.json: Expecting property name"),
    "settings that are nothing": (put("config.json", ""), "config.json: Expecting value"),
    "settings that are null": (put("config.json", "null"), "config.json: a JSON object is needed"),
    "nested settings": (put("config.json", DEEP), "config.json: nested deeper than 64 levels"),
    "settings nested beyond a parser": (
        put("config.json", '{"a":' + "[" * 100_000),
        "config.json: nested deeper than 64 levels",
    ),
    "settings not in UTF-8": (put("config.json", b'{"a": "\xff"}'), "config.json: 'utf-8' codec"),
    "settings in UTF-16": (put("config.json", '{"a": 1}'.encode("utf-16")), "config.json: 'utf-8'"),
    "settings with a mark ahead": (put("config.json", "\ufeff{}"), "config.json: Unexpected UTF-8"),
    "a key twice": (put("config.json", '{"a": 1, "a": 2}'), "config.json: 'a' is there twice"),
    "a number of 5000 digits": (
        put("config.json", f'{{"a": {"9" * 5000}}}'),
        "config.json: Exceed",
    ),
    "settings of 4 GB": (claims("config.json", 1 << 32, b"{"), "config.json: has 4294967296 bytes"),
    "settings that are a folder": (is_folder("config.json"), "config.json: is no regular file"),
    "settings that are a pipe": (is_pipe("config.json"), "config.json: is no regular file"),
    "settings that lead out": (leads_out("config.json"), "'config.json' leads out of the model"),
    "no settings": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "defaults that are a list": (
        put("generation_config.json", "[1]"),
        "generation_config.json: a JSON object is needed",
    ),
    "defaults that are a pipe": (
        is_pipe("generation_config.json"),
        "generation_config.json: is no regular file",
    ),
    "a tokenizer of nothing": (put("tokenizer.json", "{}"), "tokenizer.json: not a tokenizer"),
    "a tokenizer cut short": (
        lambda folder: (folder / "tokenizer.json").write_bytes(
            (folder / "tokenizer.json").read_bytes()[:500]
        ),
        "tokenizer.json: not a tokenizer that can be read",
    ),
    "a nested tokenizer": (put("tokenizer.json", DEEP * 100), "tokenizer.json: not a tokenizer"),
    "a tokenizer of a kind of two lines": (
        put("tokenizer.json", {"model": {"type": "a\nb", "vocab": {}}}),
        "tokenizer.json: not a tokenizer that can be read",
    ),
    "a tokenizer of 4 GB": (
        claims("tokenizer.json", 1 << 32, b"{"),
        "tokenizer.json: has 4294967",
    ),
    "a tokenizer that is a pipe": (is_pipe("tokenizer.json"), "tokenizer.json: is no regular file"),
    "a tokenizer that leads out": (leads_out("tokenizer.json"), "'tokenizer.json' leads out of"),
    "merges of no tokens": (
        put(
            "tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}
        ),
        "tokenizer.json: not a tokenizer that can be read",
    ),
    "an id of a token below zero": (
        put("tokenizer.json", bpe({"a": -1})),
        "tokenizer.json: not a tokenizer that can be read",
    ),
    "an id of a token beyond 32 bits": (
        put("tokenizer.json", bpe({"a": 1 << 32})),
        "tokenizer.json: not a tokenizer that can be read",
    ),
    "a tokenizer's settings cut short": (
        put("tokenizer_config.json", "{"),
        "tokenizer_config.json: Expecting property name",
    ),
    "a BOS rule in words": (
        put("tokenizer_config.json", {"add_bos_token": "no"}),
        "tokenizer_config.json has add_bos_token 'no'; true or false is needed",
    ),
    "a BOS that is no token": (
        put("tokenizer_config.json", {"bos_token": ["<s>"]}),
        "tokenizer_config.json names bos_token ['<s>'], which is no token",
    ),
    "an EOS that is no token": (
        put("tokenizer_config.json", {"eos_token": "<end>"}),
        "tokenizer_config.json names eos_token '<end>', which is no token",
    ),
    "end ids in words": (
        put("generation_config.json", {"eos_token_id": ["2"]}),
        "eos_token_id is ['2']; token ids are needed",
    ),
    "a template not in UTF-8": (
        put("chat_template.jinja", b"\xff{{ messages }}"),
        "chat_template.jinja: 'utf-8' codec can't decode",
    ),
    "a template of 4 GB": (
        claims("chat_template.jinja", 1 << 32),
        "chat_template.jinja: has 4294967296 bytes",
    ),
    "a template that leads out": (
        lambda folder: (folder / "chat_template.jinja").symlink_to("/etc/passwd"),
        "'chat_template.jinja' leads out of the model folder",
    ),
}

CASES = HEADERS | INDICES | PICKLES | SETTINGS

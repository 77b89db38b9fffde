# SPDX-License-Identifier: Apache-2.0
"""Orbax folders that are damaged or hostile: how each is written, and what is said of it.

`CASES` is {name: (what it does to a good folder, a part of the error)}.
"""

import json
import shutil
import zlib

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from tests.checkpoints.damaged_folders import claims, leads_out, put

MANIFEST = "headrace.json"
METADATA = "parameters/_METADATA"
DAMAGED = "; the folder is damaged or truncated, convert the model again"


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def files_of_data(folder):
    return [path for path in (folder / "parameters").rglob("d/*") if path.is_file()]


def cut_data(folder):
    for path in files_of_data(folder):
        cut(path)


def lose_data(folder):
    for path in files_of_data(folder):
        path.unlink()


def cut_values(folder):
    """Cuts the file of the tensors' values, not that of their metadata."""
    cut(max(files_of_data(folder), key=lambda path: path.stat().st_size))


def noise(folder):
    for path in [*files_of_data(folder), folder / "parameters/manifest.ocdbt"]:
        path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


def keys(folder):
    """Returns the store of the parameters' keys and values."""
    files = {"driver": "file", "path": f"{folder / 'parameters'}/"}
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": files}).result()


def lose_chunk(folder):
    """Takes the values of one tensor away and leaves its metadata: they must not read as zeros."""
    store = keys(folder)
    chunks = [key for key in store.list().result() if not key.endswith((b".zarray", b"zarr.json"))]
    store.delete_range(tensorstore.KvStore.KeyRange(chunks[0], chunks[0] + b"\0")).result()


def array(**changes):
    """Returns the damage that changes what is said of the tensor "norm", of 24 numbers."""

    def damage(folder):
        store = keys(folder)
        said = json.loads(store.read("norm/.zarray").result().value)
        store.write("norm/.zarray", json.dumps(said | changes)).result()

    return damage


def bomb(folder):
    """24 numbers in a chunk of 100 MB of zeros, packed to 100 kB."""
    array(chunks=[50_000_000], compressor={"id": "zlib", "level": 9})(folder)
    keys(folder).write("norm/0", zlib.compress(b"\0" * 100_000_000, 9)).result()


def tree(value):
    """Returns the damage that puts another tree in place of the model's parameters."""

    def damage(folder):
        shutil.rmtree(folder / "parameters")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder / "parameters", args=ocp.args.PyTreeSave(value))

    return damage


def listed(leaf, path="('x',)"):
    return put(METADATA, {"tree_metadata": {path: leaf}})


def manifest(**changes):
    return put(MANIFEST, {"format_version": 1, "dtype": "bfloat16"} | changes)


def named(name):
    return listed({"key_metadata": [{"key": name}]})


def without(name):
    def damage(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


VERSION = "headrace.json: format_version is "
CASES = {
    "no manifest": (without(MANIFEST), "headrace.json is missing, which names the format's"),
    "a manifest cut short": (put(MANIFEST, "{"), "headrace.json: Expecting property name"),
    "no version": (put(MANIFEST, {"dtype": "bfloat16"}), VERSION + "None; an integer from 1 on"),
    "a version in words": (manifest(format_version="1"), VERSION + "'1'; an integer from 1 on"),
    "a version that is true": (manifest(format_version=True), VERSION + "True; an integer"),
    "version 0": (manifest(format_version=0), VERSION + "0; an integer from 1 on"),
    "a later version": (manifest(format_version=2), VERSION + "2, and this Headrace reads 1 at mo"),
    "a type that is none": (manifest(dtype="int4"), "dtype is 'int4'; one of float64, float32"),
    "no type": (manifest(dtype=None), "dtype is None; one of float64, float32"),
    "a type that is a list": (manifest(dtype=["float32"]), "dtype is ['float32']; one of float64"),
    "another type": (
        manifest(dtype="float32"),
        "tensor 'embed' is bfloat16, though headrace.json says float32; convert the model again",
    ),
    "a manifest of 4 GB": (claims(MANIFEST, 1 << 32), "headrace.json: has 4294967296 bytes"),
    "no settings": (without("config.json"), "config.json is missing"),
    "no parameters": (without("parameters"), "_METADATA: is missing; convert the model again"),
    "parameters that lead out": (leads_out("parameters"), "'parameters' leads out of the model"),
    "no metadata": (without(METADATA), "_METADATA: is missing; convert the model again"),
    "metadata cut short": (lambda folder: cut(folder / METADATA), "parameters/_METADATA: "),
    "metadata that is a list": (put(METADATA, "[1]"), "_METADATA: a JSON object is needed"),
    "metadata of no tensors": (put(METADATA, {}), "tree_metadata is missing or empty"),
    "metadata of a list": (put(METADATA, {"tree_metadata": [1]}), "tree_metadata is missing or"),
    "metadata that leads out": (leads_out(METADATA), "'_METADATA' leads out of the model folder"),
    "a tensor that is null": (listed(None), "('x',) is nested; one flat dict"),
    "a tensor of no keys": (listed({}), "('x',) is nested; one flat dict"),
    "a tensor whose key is a text": (listed({"key_metadata": ["x"]}), "('x',) is nested; one flat"),
    "a tensor whose name is a number": (named(7), "('x',) is nested; one flat dict"),
    "a tensor of two lines": (named("a\nb"), "('x',) is nested; one flat dict"),
    "a path of two lines": (listed(None, "a\nb"), "'a\\nb' is nested; one flat dict"),
    "a tensor that is not stored": (named("x"), "tensor 'x' cannot be read: "),
    "a tensor of the parent": (named("../../x"), "tensor '../../x' cannot be read: "),
    "a nested tree": (
        tree({"x": {"w": np.zeros(3, np.float32)}}),
        "('x', 'w') is nested; one flat",
    ),
    "complex numbers": (tree({"w": np.zeros(3, np.complex64)}), "tensor 'w' has type complex64"),
    "no database": (without("parameters/manifest.ocdbt"), DAMAGED),
    "a database cut short": (lambda folder: cut(folder / "parameters/manifest.ocdbt"), DAMAGED),
    "noise": (noise, DAMAGED),
    "data cut short": (cut_data, DAMAGED),
    "no data": (lose_data, DAMAGED),
    "values cut short": (cut_values, DAMAGED),
    "no values": (lose_chunk, DAMAGED),
    "a negative dimension": (array(shape=[-24]), "tensor 'norm' cannot be read: "),
    "a dimension of 2^60": (
        array(shape=[1 << 60]),
        "tensor 'norm' of shape (1152921504606846976",
    ),
    "a dimension of 2^70": (array(shape=[1 << 70]), "tensor 'norm' cannot be read: "),
    "a chunk of 2^40": (
        array(chunks=[1 << 40]),
        "tensor 'norm' of shape (24,) takes 2199023255",
    ),
    "a chunk that bursts": (bomb, "tensor 'norm' of shape (24,) takes 100000000 bytes, but only"),
    "an unknown type of numbers": (array(dtype="<f3"), "tensor 'norm' cannot be read: "),
    "a codec that is none": (array(compressor={"id": "x"}), "tensor 'norm' cannot be read: "),
    "more dimensions than chunks": (array(shape=[2, 12]), "tensor 'norm' cannot be read: "),
}

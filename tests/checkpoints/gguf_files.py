# SPDX-License-Identifier: Apache-2.0
"""Writes GGUF files: whole ones by the format's own package, damaged ones byte by byte."""

import struct

import gguf
import numpy as np

STRING, ARRAY, UINT32, INT32, FLOAT32, BOOL = 8, 9, 4, 5, 6, 7


def write_gguf(path, tensors, metadata=(), architecture="llama"):
    """Writes `tensors` {name: (bytes or float32 values, gguf type)} by the gguf package.

    `metadata` is a list of (method of GGUFWriter, arguments). Returns the path.
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    for method, *arguments in metadata:
        getattr(writer, method)(*arguments)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer_gguf(path, tokens, types, *, kind, pre=None, merges=None, scores=None, **more):
    """Writes a GGUF with the tables of a tokenizer and one tensor; returns the path.

    Keywords in `more` are keys below tokenizer.ggml: an id, a flag, or a text.
    """
    metadata = [
        ("add_tokenizer_model", kind),
        ("add_token_list", tokens),
        ("add_token_types", types),
    ]
    if pre is not None:
        metadata.append(("add_tokenizer_pre", pre))
    if merges is not None:
        metadata.append(("add_token_merges", merges))
    if scores is not None:
        metadata.append(("add_token_scores", scores))
    for key, value in more.items():
        method = {bool: "add_bool", int: "add_uint32", str: "add_string"}[type(value)]
        metadata.append((method, f"tokenizer.ggml.{key}", value))
    values = np.zeros((2, 32), np.float32)
    return write_gguf(path, {"one": (values, gguf.GGMLQuantizationType.F32)}, metadata)


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key, kind, value):
    """Returns a metadata pair; `value` is bytes already."""
    return string(key) + struct.pack("<I", kind) + value


def array(key, kind, length, items):
    return pair(key, ARRAY, struct.pack("<IQ", kind, length) + items)


def record(name, dims=(32, 2), kind=0, offset=0):
    """Returns a tensor record; the default is a float32 tensor of 256 bytes."""
    head = string(name) + struct.pack("<I", len(dims))
    return head + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, offset)


def raw_gguf(pairs=(), records=(), *, num_bytes=256, counts=None, version=3, magic=b"GGUF"):
    """Returns the bytes of a file with the given pairs, records and zeroed tensor data."""
    num_tensors, num_pairs = counts or (len(records), len(pairs))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_pairs)
    head += b"".join(pairs) + b"".join(records)
    return head + b"\0" * (-len(head) % 32) + b"\0" * num_bytes

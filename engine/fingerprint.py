# SPDX-License-Identifier: Apache-2.0
"""What the numbers in a page depend on, as a digest: weights, program and layout."""

import hashlib
from pathlib import Path

from engine.kv import KVLayout
from engine.memo import Memo
from engine.models.config import ModelConfig
from engine.program_store import source_fingerprint


def kv_fingerprint(
    path: Path, config: ModelConfig, layout: KVLayout, exact: object, memo: Memo
) -> str:
    """Returns the digest of all that decides what pages of a model hold, a hexadecimal text.

    `exact`: what decides their last bits, where those matter; its text is taken.
    The model's files are read whole once; a file of the same name, size and time is remembered.
    """
    digest = hashlib.sha256()
    digest.update(source_fingerprint().encode())
    digest.update(repr((config, layout, exact)).encode())
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        digest.update(file.name.encode())
        digest.update(_file_digest(file, memo).encode())
    return digest.hexdigest()


def _file_digest(path: Path, memo: Memo) -> str:
    status = path.stat()
    key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    known = memo.get(key)
    if known is None:
        with path.open("rb") as file:
            known = hashlib.file_digest(file, hashlib.blake2b).hexdigest()[:64]
        memo.set(key, known)
    return known

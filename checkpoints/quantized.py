# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose weights are codes with scales, seen as if their weights were plain.

    X.weight F8_E4M3 or F8_E5M2, with X.weight_scale or X.weight_scale_inv: one number, one a row
        [out] or [out, 1], or one a block. All are factors, "inv" too.
    X_blocks and X_scales, both U8: MXFP4 as gpt-oss has it, seen as X.

Which tensors are coded is read from the tensors, so what a quantization leaves out (an embedding,
`modules_to_not_convert`, `ignore`) is as it is stored. Its config must name a method that stores
weights so, and is believed for the size of blocks only. Scales of activations and of cached keys
and values are left out: we compute with neither in 8 bits.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from checkpoints.checkpoint import Checkpoint, TensorInfo
from checkpoints.float_codes import (
    BYTES_PER_GROUP,
    FLOAT8,
    decode_fp8,
    decode_mxfp4,
    scale_block,
)
from checkpoints.tokenizer import Tokenizer

METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "mxfp4")
MXFP4 = "MXFP4"
SETTINGS = "quantization_config"

_USUAL_BLOCK = (128, 128)
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP8_SCALES = ("_scale", "_scale_inv")
_SCALE_DTYPES = ("F32", "BF16", "F16")
# Last parts of names: what is not of a weight, and what a weight would be read wrongly without.
_UNUSED = (
    "input_scale", "input_scale_ub", "activation_scale", "output_scale",
    "q_scale", "k_scale", "v_scale", "prob_scale",
)  # fmt: skip
_OF_A_WEIGHT = (
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
    "weight_zero_point", "weight_packed",
)  # fmt: skip


class _Coded(NamedTuple):
    """A weight: the tensors that it is made of, and in FP8 the block that a scale is for."""

    info: TensorInfo
    codes: str
    scales: str
    block: tuple[int, int] | None


class DecodedCheckpoint:
    """A `Checkpoint` that decodes the weights of another as they are read, one at a time.

    Decoded weights have the names, shapes and orientation of the model's checkpoint in bfloat16;
    `TensorInfo.dtype` says how they are stored ("F8_E4M3", "F8_E5M2", "MXFP4"). The tensors of
    scales are not seen, and neither are the settings of the quantization.
    """

    def __init__(self, checkpoint: Checkpoint, coded: Mapping[str, _Coded]) -> None:
        self._checkpoint, self._coded = checkpoint, coded
        self.kind, self.path = checkpoint.kind, checkpoint.path
        self.config = {key: v for key, v in checkpoint.config.items() if key != SETTINGS}
        self.generation_config = checkpoint.generation_config
        parts = {part for weight in coded.values() for part in (weight.codes, weight.scales)}
        self.tensors: Mapping[str, TensorInfo] = {
            name: info
            for name, info in checkpoint.tensors.items()
            if name not in parts and _last(name) not in _UNUSED
        } | {name: weight.info for name, weight in coded.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor: FP8 as float32, MXFP4 as bfloat16, and all else as stored."""
        if name not in self.tensors:
            raise KeyError(name)
        if name not in self._coded:
            return self._checkpoint.read(name)
        weight = self._coded[name]
        codes, scales = self._checkpoint.read(weight.codes), self._checkpoint.read(weight.scales)
        if weight.block is None:
            return decode_mxfp4(codes, scales)
        return decode_fp8(codes, scales, weight.block)

    def read_part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor; one that is quantized is read whole."""
        if name in self.tensors and name not in self._coded:
            return self._checkpoint.read_part(name, index)
        return self.read(name)[index]

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer of the other."""
        return self._checkpoint.tokenizer()


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with its weights decoded; itself where none are coded.

    No tensor is read. Raises ValueError, naming the tensor or the key, for a quantization that is
    not supported, a scale that is missing, or that does not fit its weight.
    """
    settings = checkpoint.config.get(SETTINGS)
    try:
        block = _block_size(settings)
        coded = _find(checkpoint.tensors, block)
        _check_rest(checkpoint.tensors, coded)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from None
    return DecodedCheckpoint(checkpoint, coded) if coded or settings is not None else checkpoint


def _block_size(settings: Any) -> tuple[int, int]:
    """Returns the size of blocks that the settings name, or the usual one; checks the method."""
    if settings is None:
        return _USUAL_BLOCK
    if not isinstance(settings, dict):
        raise ValueError(f"{SETTINGS} is {settings!r}; an object is needed")
    method = settings.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"{SETTINGS} has quant_method {method!r}, which is not supported; supported are "
            f"{', '.join(METHODS)}: use such a checkpoint, or one that is not quantized"
        )
    sizes = [("weight_block_size", settings.get("weight_block_size"))]
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            sizes.append(("block_structure", weights.get("block_structure")))
    stated = [(key, size) for key, size in sizes if size is not None]
    for key, size in stated:
        whole = isinstance(size, list) and all(type(n) is int and n > 0 for n in size)
        if not whole or len(size) != 2 or size != stated[0][1]:
            raise ValueError(
                f"{SETTINGS} has {key} {size!r}; two positive integers are needed, the same for "
                "all weights"
            )
    return (stated[0][1][0], stated[0][1][1]) if stated else _USUAL_BLOCK


def _find(tensors: Mapping[str, TensorInfo], block: tuple[int, int]) -> dict[str, _Coded]:
    """Returns the coded weights by the names under which they are seen."""
    coded = {}
    for name, info in tensors.items():
        if info.dtype in FLOAT8 and not name.endswith(_FP8_SCALES):
            coded[name] = _fp8(tensors, name, block)
        elif info.dtype == "U8" and name.endswith(_BLOCKS):
            seen = name.removesuffix(_BLOCKS)
            if seen in tensors:
                raise ValueError(f"tensor {seen!r} is there, and again in codes as {name!r}")
            coded[seen] = _mxfp4(tensors, name, seen + _SCALES)
    return coded


def _fp8(tensors: Mapping[str, TensorInfo], name: str, block: tuple[int, int]) -> _Coded:
    info = tensors[name]
    scales = [name + suffix for suffix in _FP8_SCALES if name + suffix in tensors]
    if len(scales) != 1:
        both = " and ".join(repr(name + suffix) for suffix in _FP8_SCALES)
        raise ValueError(
            f"tensor {name!r} is stored as {info.dtype}, so one scale is needed, but of {both} "
            f"{'both are' if scales else 'none is'} there"
        )
    [scale] = scales
    found = scale_block(info.shape, tensors[scale].shape, block)
    if found is None:
        raise ValueError(
            f"tensor {scale!r} has shape {tensors[scale].shape}, which does not suit {name!r} of "
            f"shape {info.shape}: one number is needed, one a row, or one a block of {block} "
            f"(weight_block_size in {SETTINGS})"
        )
    if tensors[scale].dtype not in _SCALE_DTYPES:
        raise ValueError(
            f"tensor {scale!r} has type {tensors[scale].dtype}; a scale is needed in "
            f"{', '.join(_SCALE_DTYPES)}"
        )
    return _Coded(info, name, scale, found)


def _mxfp4(tensors: Mapping[str, TensorInfo], blocks: str, scales: str) -> _Coded:
    if scales not in tensors:
        raise ValueError(f"tensor {blocks!r} holds codes, but its scales {scales!r} are missing")
    shape = tensors[blocks].shape
    if len(shape) != 4 or shape[-1] != BYTES_PER_GROUP:
        raise ValueError(
            f"tensor {blocks!r} has shape {shape}; [experts, out, groups, {BYTES_PER_GROUP}] is "
            "needed"
        )
    if tensors[scales] != TensorInfo(shape[:-1], "U8"):
        raise ValueError(
            f"tensor {scales!r} is {tensors[scales].dtype} of shape {tensors[scales].shape}; its "
            f"blocks need U8 of shape {shape[:-1]}"
        )
    experts, outputs, groups, _ = shape
    seen = (experts, 2 * BYTES_PER_GROUP * groups, outputs)
    return _Coded(TensorInfo(seen, MXFP4), blocks, scales, None)


def _check_rest(tensors: Mapping[str, TensorInfo], coded: Mapping[str, _Coded]) -> None:
    """Raises ValueError for a tensor that says how some weight is coded, but is not used."""
    used = {part for weight in coded.values() for part in (weight.codes, weight.scales)}
    for name, info in tensors.items():
        codes_scale = info.dtype == "U8" and name.endswith(_SCALES)
        plain_scale = info.dtype in FLOAT8 or _last(name) in _OF_A_WEIGHT
        if name not in used and (codes_scale or plain_scale):
            raise ValueError(
                f"tensor {name!r} is of a quantized weight, but of none in FP8 or MXFP4; no other "
                "kind is supported, use a checkpoint that is not quantized"
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]

# SPDX-License-Identifier: Apache-2.0
"""Writes a model as a folder: Hugging Face's layout with safetensors, or with Orbax parameters.

    python -m scripts.convert --model=M --to=orbax|safetensors --output=FOLDER
        [--dtype=float32|bfloat16|float16] [--max_shard_gb=2]

The folder appears when it is whole, and holds all that the engine needs: parameters, config,
tokenizer.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp
import numpy as np
from absl import flags

from checkpoints import store
from checkpoints.checkpoint import total_bytes
from checkpoints.folder import check_free
from checkpoints.huggingface_writer import DEFAULT_SHARD_BYTES, write_huggingface
from checkpoints.orbax_writer import write_orbax
from engine.export import Export
from engine.loading import open_model, stored_dtype
from scripts.command_line import UsageError, run_command, usage_errors

DTYPES = ("float32", "bfloat16", "float16")


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    model = "A known name, a GGUF file, or a Hugging Face or Orbax folder."
    flags.DEFINE_string("model", None, model, flag_values=values)
    flags.DEFINE_enum(
        "to", None, ["orbax", "safetensors"], "What holds the parameters.", flag_values=values
    )
    flags.DEFINE_string("output", None, "The folder to make.", flag_values=values)
    flags.DEFINE_enum(
        "dtype", None, DTYPES, "Their type; as the model has it by default.", flag_values=values
    )
    flags.DEFINE_float(
        "max_shard_gb",
        None,
        "Most gigabytes of a safetensors file; 2 by default.",
        flag_values=values,
    )
    return values


FLAGS = define_flags()


def main() -> None:
    for name in ("model", "to", "output"):
        if not FLAGS[name].value:
            raise UsageError(f"--{name} is missing; --help shows the flags")
    shard_bytes = max_shard_bytes(FLAGS.to, FLAGS.max_shard_gb)
    output = Path(FLAGS.output)
    with usage_errors():
        check_free(output)
        model = open_model(store.resolve(FLAGS.model))
        dtype = np.dtype(jnp.dtype(FLAGS.dtype)) if FLAGS.dtype else stored_dtype(model.checkpoint)
        export = Export(model, dtype)
        if FLAGS.to == "orbax":
            write_orbax(export, output)
        else:
            write_huggingface(export, output, max_shard_bytes=shard_bytes)
    size_gb = total_bytes(export) / 1e9
    print(f"{output}: {len(export.tensors)} tensors, {size_gb:.2f} GB in {dtype}")


def max_shard_bytes(to: str, max_shard_gb: float | None) -> int:
    """Returns the flag in bytes; raises UsageError where it says nothing that can be done."""
    if max_shard_gb is None:
        return DEFAULT_SHARD_BYTES
    if to != "safetensors":
        raise UsageError("--max_shard_gb is of safetensors files; leave it out with --to=orbax")
    if not (math.isfinite(max_shard_gb) and max_shard_gb > 0):
        raise UsageError(f"--max_shard_gb={max_shard_gb} must be a number above 0")
    return int(max_shard_gb * 1e9)


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, or 2 with one line on stderr that names the fault and the remedy."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

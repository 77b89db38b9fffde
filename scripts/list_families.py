# SPDX-License-Identifier: Apache-2.0
"""Prints README's tables of model families and formats, from what the code registers.

    python -m scripts.list_families

A test compares README with it: after a change of families or formats, paste what this prints.
"""

from collections.abc import Sequence
from typing import NoReturn

from absl import flags

from checkpoints.float_codes import FLOAT8
from checkpoints.gguf_blocks import BLOCK_TYPES
from checkpoints.quantized import METHODS
from engine.models import FAMILIES
from scripts.command_line import run_command

# Where a test is called otherwise than its model type or architecture: `test_file[parameter]`.
GOLDEN_NAMES = {"gemma3_text": "gemma3"}
GGUF_NAMES = {
    "llama with experts": "mixtral",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
# Model types without golden logits; their parameters and configs are compared.
WITHOUT_GOLDEN = {"gemma": "test_models"}
FORMATS = [
    (
        "Hugging Face folder",
        "safetensors in F32, F16, BF16",
        "yes",
        ["test_huggingface", "test_export"],
    ),
    (
        "the same, quantized",
        f"{', '.join(FLOAT8)} (`quant_method` {', '.join(METHODS)}) and MXFP4",
        "no",
        ["test_quantized", "test_quantized_checkpoints"],
    ),
    ("Orbax folder", "as `scripts.convert` writes it", "yes", ["test_orbax", "test_export"]),
    ("GGUF file", ", ".join(BLOCK_TYPES), "no", ["test_gguf", "test_gguf_families"]),
]

FLAGS = flags.FlagValues()


def family_rows() -> list[list[str]]:
    """Returns [family, model types, GGUF architectures, tests], a row a family."""
    rows = []
    for family in FAMILIES:
        tests = [
            WITHOUT_GOLDEN.get(name, f"test_golden[{GOLDEN_NAMES.get(name, name)}]")
            for name in family.model_types
        ]
        tests += [
            f"test_gguf_families[{GGUF_NAMES.get(name, name)}]" for name in family.architectures
        ]
        rows.append(
            [family.name, coded(family.model_types), coded(family.architectures), coded(tests)]
        )
    return rows


def coded(names: Sequence[str]) -> str:
    """Returns names as Markdown code, a dash where there are none."""
    return ", ".join(f"`{name}`" for name in names) or "-"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---")


def families_table() -> str:
    """Returns the table of families."""
    heads = ["family", "`model_type` of folders", "architecture of GGUF files", "tests"]
    return markdown(heads, family_rows())


def formats_table() -> str:
    """Returns the table of formats."""
    rows = [[name, types, written, coded(tests)] for name, types, written, tests in FORMATS]
    return markdown(["format", "types", "written too", "tests"], rows)


def main() -> None:
    print(families_table())
    print(formats_table(), end="")


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits 0, or 2 with one line on stderr that names the fault and the remedy."""
    run_command(main, FLAGS, __doc__, argv)


if __name__ == "__main__":
    run()

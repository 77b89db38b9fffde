# SPDX-License-Identifier: Apache-2.0
"""What the commands share: flags, one-line errors, the engine's options, files written whole."""

import contextlib
import errno
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import flags

from sharding import parse_mesh
from sharding.processes import LostProcess, finish, leave, num_processes

ENGINE_OPTIONS = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "num_pages",
    "mesh",
    "replicas",
    "expert_parallel",
    "num_redundant_experts",
    "rebalance_interval",
    "attention_backend",
    "matmul_backend",
    "ring_layout",
    "memory_fraction",
    "prefix_cache",
    "host_cache_gb",
    "disk_cache_dir",
    "disk_cache_gb",
    "preemption",
    "policy",
    "age_bound",
    "max_num_waiting",
    "watermark",
    "max_num_seqs_per_tenant",
    "tokens_per_s_per_tenant",
    "overlap",
    "batching",
    "generation_config",
    "deterministic",
    "decode_steps",
    "strict",
)

# No space, a quota, or a file as large as it may be.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Legal in JSON, but many readers end a line at them.
OTHER_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


class UsageError(Exception):
    """A wrong flag, file, field or model. Its text is one line: the fault and the remedy."""


class Interrupted(Exception):
    """The user ended the command. Its text says what was finished."""


def make_cpu_devices(mesh: str, processes: int = 1) -> None:
    """Has CPU show this process's share of the devices that a mesh over several needs.

    If that is where the command will run. To be called before anything asks for a device.
    """
    try:
        count = math.prod(parse_mesh(mesh).values())
    except ValueError as error:
        raise UsageError(str(error)) from None
    if count % processes:
        raise UsageError(
            f"mesh={mesh!r} has {count} devices, and there are {processes} processes to share "
            "them out to; use a mesh of a multiple of that"
        )
    if count > processes:
        jax.config.update("jax_num_cpu_devices", count // processes)


def define_engine_flags(values: flags.FlagValues) -> None:
    """Defines --model and the engine's options; an option that is not given keeps its default."""

    def integer(name: str, text: str) -> None:
        flags.DEFINE_integer(name, None, text, flag_values=values)

    flags.DEFINE_string(
        "model",
        "smollm2-135m",
        "A GGUF file, a Hugging Face or Orbax folder, a known name, or owner/name of the hub.",
        flag_values=values,
    )
    flags.DEFINE_string("dtype", None, "auto, float32, bfloat16 or float16.", flag_values=values)
    integer("max_model_len", "Most prompt and output tokens of a request.")
    integer("max_num_seqs", "Requests that run at once.")
    integer("max_num_batched_tokens", "Tokens of one step.")
    integer("page_size", "Tokens of a KV page, a power of two.")
    integer("num_pages", "Pages of the KV pool.")
    text = 'Devices by what is split over them, such as "tensor=4".'
    flags.DEFINE_string("mesh", None, text, flag_values=values)
    integer("replicas", "Groups of processes that each have the model.")
    flags.DEFINE_bool(
        "expert_parallel", None, "Experts whole, over data x expert x tensor.", flag_values=values
    )
    integer("num_redundant_experts", "Places for copies of experts that are much asked for.")
    integer("rebalance_interval", "Steps between looks at the experts' loads; 0 is never.")
    text = "Who computes attention: auto, pallas (kernels) or xla."
    flags.DEFINE_string("attention_backend", None, text, flag_values=values)
    text = "Who multiplies for experts: auto, pallas (kernels) or xla."
    flags.DEFINE_string("matmul_backend", None, text, flag_values=values)
    text = "Tokens of each device of a sequence axis: striped, contiguous or zig-zag."
    flags.DEFINE_string("ring_layout", None, text, flag_values=values)
    flags.DEFINE_float("memory_fraction", None, "Share of the memory to use.", flag_values=values)
    define_cache_flags(values)
    flags.DEFINE_bool(
        "overlap", None, "Plan a step before the last one is read.", flag_values=values
    )
    flags.DEFINE_string(
        "generation_config",
        None,
        "auto: sampling defaults from the checkpoint's generation_config.json; none.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "deterministic", None, "The same to the last bit in any company.", flag_values=values
    )
    integer("decode_steps", "Decodes in one dispatch while nothing else is to do; 1 is off.")
    flags.DEFINE_bool("strict", None, "Warnings and late compilations fail.", flag_values=values)
    flags.DEFINE_string(
        "batching", None, "continuous, or static, the benchmarks' baseline.", flag_values=values
    )


def define_cache_flags(values: flags.FlagValues) -> None:
    """Defines the options of what is kept of requests, and of who may start."""
    for name, text in {
        "host_cache_gb": "Host memory for pages that the device has no room for.",
        "disk_cache_gb": "How much of --disk_cache_dir.",
        "watermark": "Share of the pages that stays free when another request starts.",
        "tokens_per_s_per_tenant": "What a tenant may have computed, on average.",
    }.items():
        flags.DEFINE_float(name, None, text, flag_values=values)
    for name, text in {
        "disk_cache_dir": "A folder for pages, which later starts find again.",
        "preemption": "recompute, or park: copy what gives way to the host at once.",
        "policy": "fcfs, priority, shortest_first or longest_prefix.",
    }.items():
        flags.DEFINE_string(name, None, text, flag_values=values)
    for name, text in {
        "age_bound": "Steps after which a request comes before later ones.",
        "max_num_waiting": "Requests that may wait.",
        "max_num_seqs_per_tenant": "Requests of a tenant that run at once.",
    }.items():
        flags.DEFINE_integer(name, None, text, flag_values=values)
    flags.DEFINE_bool(
        "prefix_cache", None, "Keep what was computed for prompts alike.", flag_values=values
    )


def given(values: flags.FlagValues, names: Sequence[str]) -> dict[str, Any]:
    """Returns {name: value} of those of the flags that were given."""
    return {name: values[name].value for name in names if values[name].value is not None}


def run_command(
    main: Callable[[], None], values: flags.FlagValues, text: str, argv: Sequence[str] | None
) -> NoReturn:
    """Parses `argv` into `values`, runs `main` and exits: 0, or 2 with one line on stderr.

    `text` describes the command; --help prints it with the flags. One of several processes that
    fails has the others end too.
    """
    argv = list(sys.argv if argv is None else argv)
    flags.DEFINE_bool("help", False, "Shows this text.", flag_values=values)
    try:
        rest = values(argv)[1:]
        if values["help"].value:
            print(f"{text}\n{values.get_help()}")
            sys.exit(0)
        if rest:
            raise UsageError(f"{rest[0]!r} is not a flag; every argument is --name=value")
        main()
        if num_processes() > 1:
            finish()
    except flags.Error as error:
        fail(argv[0], f"{error}; --help shows the flags")
    except UsageError as error:
        fail(argv[0], str(error))
    except LostProcess as error:
        fail(argv[0], str(error), code=1)
    except BrokenPipeError:
        # The reader of our output has gone. Nothing may be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        end(1, "the reader of its output has gone")
    except (KeyboardInterrupt, Interrupted) as error:
        finished = f"; {error}" if str(error) else ""
        fail(argv[0], f"interrupted{finished}", code=130)
    except Exception as error:
        if num_processes() == 1:
            raise
        traceback.print_exc()
        end(1, repr(error))
    sys.exit(0)


def fail(program: str, text: str, code: int = 2) -> NoReturn:
    """Ends the command with one line on stderr, whatever line ends `text` has."""
    line = " ".join(text.split())
    print(f"{Path(program).stem}: {line}", file=sys.stderr)
    end(code, line)


def end(code: int, reason: str) -> NoReturn:
    """Exits; where there are several processes, so that all of them do, for this reason."""
    if num_processes() > 1:
        leave(code, reason)
    sys.exit(code)


@contextlib.contextmanager
def usage_errors(prefix: str = "") -> Iterator[None]:
    """Turns the library's refusals of an input (ValueError, OSError) into UsageError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        raise UsageError(f"{prefix}{error}") from error


class NewFile:
    """A text file that is being written for `--flag=path`; a full disk is a UsageError."""

    def __init__(self, part: Path, flag: str, path: str) -> None:
        self._file = part.open("x", encoding="utf-8")
        self._setting = f"--{flag}={path}"

    def write(self, text: str) -> None:
        with self._whole():
            self._file.write(text)

    def close(self) -> None:
        with self._whole():
            self._file.close()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise UsageError(
                f"{self._setting} could not be written whole ({error.strerror}), so nothing was "
                "kept; free some space or name another folder"
            ) from error


@contextlib.contextmanager
def replaced_file(flag: str, path: str) -> Iterator[NewFile]:
    """Yields a text file that takes the place of `path` when the block ends well.

    Until then `path` is as it was; a block that raises leaves nothing behind. `flag` names the
    setting in errors. A full disk is a UsageError.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise UsageError(f"--{flag}={path} is not a regular file; name a file to write")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        file = NewFile(part, flag, path)
    except OSError as error:
        raise UsageError(
            f"--{flag}={path} cannot be written ({error.strerror}); name a file in a folder that "
            "exists and is writable"
        ) from error
    try:
        with contextlib.closing(file):
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def to_json(value: Any) -> str:
    """Returns one line of JSON; NaN and infinities, which JSON has not, become null."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    return text.translate(OTHER_LINE_ENDS)


def finite(value: Any) -> Any:
    """Returns `value` with every number that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value

# SPDX-License-Identifier: Apache-2.0
"""Starts a command as one of several processes, which run one engine, or replicas of it.

    python -m scripts.launch --local=N ENTRY --model=M --mesh=... [the entry's flags]
    python -m scripts.launch [--coordinator=HOST:PORT --num_processes=N --process_id=I] ENTRY ...

Run it with the same flags on every host: under Slurm, Open MPI, on Cloud TPU and GKE the cluster
tells who is who. --local starts all processes on this machine, for CPU. ENTRY is generate. The
first process takes the input and writes the output; with --replicas=R there are R such, each of
which does its share.
"""

import contextlib
import importlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

from absl import flags

from scripts.command_line import UsageError, run_command, usage_errors
from sharding.launch import HEARTBEAT_S, START_S, join
from sharding.processes import Channel, Group, differences, num_processes, process_id

ENTRIES = ("generate", "benchmarks.processes_once")
_GRACE_S = 30  # beyond the heartbeat's timeout, until those that are left are ended


def define_flags() -> flags.FlagValues:
    values = flags.FlagValues()

    def integer(name: str, default: int | None, low: int, text: str) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=low, flag_values=values)

    integer("local", None, 1, "Processes to start on this machine.")
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.", flag_values=values)
    integer("num_processes", None, 1, "Processes in all.")
    integer("process_id", None, 0, "Which of them this is.")
    integer("heartbeat_timeout_s", HEARTBEAT_S, 5, "After which a silent process counts as lost.")
    integer("start_timeout_s", START_S, 1, "To wait for the others at the start.")
    return values


FLAGS = define_flags()


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns our own arguments, and the entry with its own."""
    own = 1
    while own < len(argv) and argv[own].startswith("-"):
        own += 1
    return list(argv[:own]), list(argv[own:])


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: exits as the entry does; with --local, as the first process that fails."""
    own, entry = split(sys.argv if argv is None else argv)
    run_command(lambda: main(entry), FLAGS, __doc__, own)


def main(entry: list[str]) -> None:
    if not entry or entry[0] not in ENTRIES:
        named = repr(entry[0]) if entry else "nothing"
        raise UsageError(f"{named} is no entry; name one of {', '.join(ENTRIES[:1])}")
    places = ("coordinator", "num_processes", "process_id")
    if FLAGS.local:
        if given := [name for name in places if FLAGS[name].value is not None]:
            raise UsageError(f"--local and --{given[0]} do not go together; give one of them")
        sys.exit(run_local(FLAGS.local, entry))
    with usage_errors():
        join(
            *(FLAGS[name].value for name in places),
            heartbeat_timeout_s=FLAGS.heartbeat_timeout_s,
            start_timeout_s=FLAGS.start_timeout_s,
        )
    if process_id() > 0:
        logging.getLogger("headrace").setLevel(logging.WARNING)
    if num_processes() > 1:
        everyone = Channel(Group(process_id(), num_processes()))
        if told := differences(everyone.agree("command", "\n".join(entry))):
            raise UsageError(
                f"the processes are not started alike: {told}; give all the same flags"
            )
    importlib.import_module(f"scripts.{entry[0]}").run(entry)


def run_local(count: int, entry: list[str]) -> int:
    """Runs the entry in `count` processes here; returns the exit code of the first, or who fails.

    When one has failed, the others have time to notice before they are ended.
    """
    command = [
        *(sys.executable, "-m", "scripts.launch"),
        f"--coordinator=127.0.0.1:{free_port()}",
        f"--num_processes={count}",
        f"--heartbeat_timeout_s={FLAGS.heartbeat_timeout_s}",
        f"--start_timeout_s={FLAGS.start_timeout_s}",
    ]
    processes = []
    for number in range(count):
        source = None if number == 0 else subprocess.DEVNULL
        place = f"--process_id={number}"
        processes.append(subprocess.Popen([*command, place, *entry], stdin=source))
    with passed_on(processes):
        return wait_for(processes, FLAGS.heartbeat_timeout_s + _GRACE_S)


@contextlib.contextmanager
def passed_on(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Leaves it to the processes that were started to end when this one is to.

    The keyboard's interrupt reaches them by itself; to end (SIGTERM), they are told.
    """

    def end(*_: object) -> None:
        for process in processes:
            process.terminate()

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, end),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for(processes: list[subprocess.Popen], grace_s: float) -> int:
    """Returns, when all have ended, the exit code of the first process, or of who failed first."""
    failed, deadline = 0, float("inf")
    running = list(processes)
    while running:
        for process in [one for one in running if one.poll() is not None]:
            running.remove(process)
            if process.returncode and not failed:
                failed, deadline = process.returncode, time.monotonic() + grace_s
        if time.monotonic() > deadline:
            for process in running:
                process.kill()
        time.sleep(0.05)
    failed = processes[0].returncode or failed
    return failed if failed >= 0 else 128 - failed


def free_port() -> int:
    """Returns a port that nobody on this machine listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    run()

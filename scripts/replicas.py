# SPDX-License-Identifier: Apache-2.0
"""What replicas of a model do of one input: each its share, in files that the first joins."""

import heapq
import json
import time
from pathlib import Path

from scripts.command_line import UsageError, replaced_file, to_json
from sharding.processes import Channel, Group

_SEEN_S = 30  # until a file that another host has written is to be seen in a shared folder


def check_replicas(group: Group, output: str | None, source: str | None) -> None:
    """Raises UsageError where a command's results cannot be those of several replicas."""
    if group.count == 1:
        return
    if not output:
        raise UsageError(
            f"--replicas={group.count} writes files that are joined; give --output, in a folder "
            "that all processes see"
        )
    if Path(output).exists() and not Path(output).is_file():
        raise UsageError(f"--output={output} is not a regular file; name a file to write")
    if source == "-":
        raise UsageError(
            f"--replicas={group.count} reads the input in several processes, which standard input "
            "is not; give --input a file that all of them see"
        )


def wait_for_leaders(group: Group) -> None:
    """Returns when all replicas are here: what one refuses ends all before they work."""
    if group.count > 1:
        Channel(group.leaders).agree("prepared", "")


def part_name(path: str, group: Group) -> str:
    """Returns where a replica writes its part of the file at `path`."""
    return path if group.count == 1 else f"{path}.{group.number}-of-{group.count}"


def join_parts(group: Group, output: str, report: str | None) -> None:
    """Joins the replicas' files when all of them are written: rows by index, reports in a list.

    To be called by each replica's leader.
    """
    if group.count == 1:
        return
    channel = Channel(group.leaders)
    channel.agree("written", "")
    if group.number == 0:
        join_rows(parts_of(output, group.count), output)
        if report:
            join_reports(parts_of(report, group.count), report)
    channel.agree("joined", "")


def parts_of(path: str, count: int) -> list[Path]:
    """Returns the files of all replicas; UsageError where one is not to be seen."""
    parts = [Path(part_name(path, Group(number=number, count=count))) for number in range(count)]
    deadline = time.monotonic() + _SEEN_S
    while missing := [part for part in parts if not part.is_file()]:
        if time.monotonic() > deadline:
            raise UsageError(
                f"{missing[0]} of another process is not here; name a folder that all see"
            )
        time.sleep(0.2)
    return parts


def join_rows(parts: list[Path], output: str) -> None:
    """Writes the lines of all parts to `output`, by their indices, and removes the parts."""
    files = [part.open(encoding="utf-8") for part in parts]
    try:
        with replaced_file("output", output) as whole:
            for line in heapq.merge(*files, key=lambda line: json.loads(line)["index"]):
                whole.write(line)
    finally:
        for file in files:
            file.close()
    for part in parts:
        part.unlink()


def join_reports(parts: list[Path], report: str) -> None:
    """Writes what all reports say to one, and removes them."""
    with replaced_file("report", report) as whole:
        reports = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
        whole.write(to_json({"replicas": reports}) + "\n")
    for part in parts:
        part.unlink()

# SPDX-License-Identifier: Apache-2.0
"""Who is in a group of processes, and what differs between them. What they say to each other takes
several: tests/scripts/test_launch.py."""

import pytest

from sharding import processes
from sharding.processes import Group, differences, group_of


class Told:
    """What jax knows of the processes."""

    client = None

    def __init__(self, num_processes, process_id):
        self.num_processes, self.process_id = num_processes, process_id


@pytest.fixture
def of(monkeypatch):
    """Returns `group_of` as one of several processes sees it."""

    def of(num_processes, process_id, count):
        told = Told(num_processes, process_id)
        monkeypatch.setattr(processes.distributed, "global_state", told)
        return group_of(count)

    return of


def test_groups_are_runs_of_processes(of):
    groups = [of(6, process, 2) for process in range(6)]
    assert [(g.number, g.rank) for g in groups] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [list(g.processes) for g in groups[::3]] == [[0, 1, 2], [3, 4, 5]]
    assert groups[3].leaders == Group(rank=1, size=2, number=-1)
    assert of(1, 0, 1) == Group()


def test_groups_of_unlike_sizes_are_refused(of):
    with pytest.raises(ValueError, match="replicas=4 must divide the number of processes, 6"):
        of(6, 0, 4)


def test_differences_name_the_lines_that_differ():
    texts = ["a=1\nb=2\nc=3"] * 3 + ["a=1\nb=5"]
    assert differences(texts[:3]) == ""
    assert differences(texts) == "process 3 has b=5 where process 0 has b=2, c=3"
    assert differences(["a", "a\nb"]) == "process 1 has b where process 0 has nothing"

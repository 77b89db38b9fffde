# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: eight CPU devices, strict arrays, warnings as errors, an empty cache.

The summary of a run gives the seconds by area (a folder of tests/) and the skips.
"""

import os

import jax
import pytest

from checkpoints import store
from tests.shape_suffixes import checked_shapes

# Before any device is asked for. A run on an accelerator says so: JAX_PLATFORMS=cuda,cpu.
if not jax.config.jax_platforms:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

USERS_CACHE = os.environ.get("HEADRACE_CACHE")
SECONDS_BY_AREA: dict[str, float] = {}


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Points the cache at a folder of this run, so that nothing depends on the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def users_model(own_cache):
    """Returns `path_of(name)` of a named model in the user's own cache, fetched when absent."""

    def path_of(name):
        with pytest.MonkeyPatch.context() as patch:
            if USERS_CACHE is None:
                patch.delenv("HEADRACE_CACHE")
            else:
                patch.setenv("HEADRACE_CACHE", USERS_CACHE)
            return store.resolve(name)

    return path_of


@pytest.fixture
def shape_suffixes():
    """Holds every local of the project's functions to the shape that its name states."""
    with checked_shapes():
        yield


def area(nodeid):
    """Returns the folder of tests/ that a test stands in: `engine`, or `tests` for those beside."""
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else parts[0]


def pytest_runtest_logreport(report):
    name = area(report.nodeid)
    SECONDS_BY_AREA[name] = SECONDS_BY_AREA.get(name, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("seconds by area")
    for name, seconds in sorted(SECONDS_BY_AREA.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"skipped: {skipped}")

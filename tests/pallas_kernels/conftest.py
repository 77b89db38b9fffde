# SPDX-License-Identifier: Apache-2.0
"""What the tests of all operations share."""

import gc

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go(request):
    """A process may have 65,530 mappings, and a program takes many: a file's go with it."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()

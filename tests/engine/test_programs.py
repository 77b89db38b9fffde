# SPDX-License-Identifier: Apache-2.0
"""Programs are compiled once, kept, found again, and never taken from where others can write."""

import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.kv import kv_layout
from engine.memo import Memo
from engine.memory import coarse_pages, pool_pages
from engine.program_store import Executables, Program, ProgramStore
from sharding import make_mesh
from tests.engine.test_step import FULL, WINDOWED

DEVICE = jax.sharding.NamedSharding(
    make_mesh(jax.local_devices()[:1]), jax.sharding.PartitionSpec()
)
VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=DEVICE)


def double(x):
    return x * 2


def program(name="double", function=double):
    return Program(name, function, (VECTOR,), VECTOR)


def call(executable):
    return np.asarray(executable(np.arange(4, dtype=np.float32)))


def counts(store):
    return store.compiled, store.loaded


def test_a_second_store_loads_what_the_first_compiled(tmp_path):
    folder = tmp_path / "programs"
    for expected in ((1, 0), (0, 1), (0, 1)):
        store = ProgramStore(folder)
        np.testing.assert_array_equal(call(store.get(program())), [0, 2, 4, 6])
        assert counts(store) == expected
    assert folder.stat().st_mode & 0o077 == 0
    assert [path.suffix for path in folder.iterdir()] == [".xla"], "no partial file stays"


def test_another_program_has_another_key(tmp_path):
    store = ProgramStore(tmp_path)
    other_shape = jax.ShapeDtypeStruct((5,), jnp.float32, sharding=DEVICE)
    programs = [
        program(),
        program(name="twice"),
        Program("double", double, (other_shape,), other_shape),
        Program("double", double, (VECTOR,), VECTOR, donated=(0,)),
    ]
    assert len({store.key(one) for one in programs}) == len(programs)
    assert store.key(program()) == ProgramStore(None).key(program())


def test_a_torn_file_is_compiled_again(tmp_path):
    store = ProgramStore(tmp_path)
    store.get(program())
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    for torn in (b"", b"no executable", whole[: len(whole) // 2]):
        path.write_bytes(torn)
        again = ProgramStore(tmp_path)
        np.testing.assert_array_equal(call(again.get(program())), [0, 2, 4, 6])
        assert counts(again) == (1, 0)
        assert len(path.read_bytes()) > len(whole) // 2


def test_a_full_disk_costs_the_file_and_not_the_start(tmp_path, caplog):
    """A limit on the size of files stands in for the disk: the write fails just so."""
    store = ProgramStore(tmp_path)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, unlimited[1]))
    try:
        executable = store.get(program())
        memo = Memo(tmp_path / "sizes.json")
        memo.set("a long name of a program", 7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    np.testing.assert_array_equal(call(executable), [0, 2, 4, 6])
    assert memo.get("a long name of a program") == 7
    assert caplog.text.count("cannot be kept (File too large)") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chmod(folder, 0o777)
    with pytest.raises(PermissionError, match="not yours alone; set HEADRACE_CACHE"):
        ProgramStore(folder)


def test_many_are_made_in_parallel_and_reported(tmp_path):
    store = ProgramStore(tmp_path)
    wanted = {n: program(name=f"double {n}") for n in range(5)}
    lines = []
    made = Executables(store, wanted, lines.append, threads=2)
    made.wait()
    assert made.keys() == wanted.keys() and counts(store) == (5, 0)
    np.testing.assert_array_equal(call(made[3]), [0, 2, 4, 6])
    assert len(lines) == 5 and "programs 5/5 (5 compiled, 0 loaded" in lines[-1]


def test_who_asks_first_makes_it_and_a_failure_is_raised_to_who_asks(tmp_path):
    def broken(x):
        raise RuntimeError("no such program")

    store = ProgramStore(tmp_path)
    wanted = {n: program(name=f"double {n}") for n in range(20)} | {
        "broken": program(name="broken", function=broken)
    }
    made = Executables(store, wanted, lambda line: None, threads=2)
    np.testing.assert_array_equal(call(made[19]), [0, 2, 4, 6])
    made.stop()
    with pytest.raises(RuntimeError, match="no such program"):
        made["broken"]


@pytest.mark.parametrize(
    ("pages", "coarse"), [(1, 1), (2, 2), (3, 3), (5, 4), (6, 6), (11, 8), (12, 12), (1000, 768)]
)
def test_the_grid_of_pool_sizes_has_two_steps_an_octave(pages, coarse):
    assert coarse_pages(pages) == coarse


def test_the_pool_holds_what_is_wanted_or_what_fits():
    layout = kv_layout(FULL, 16, np.dtype(np.float32))
    assert layout.page_bytes == 4 * 2 * 16 * 2 * 8 * 4  # layers, heads, cells, K and V, width
    sizes = {"free_bytes": 10**9, "limit_bytes": None}
    assert pool_pages(layout, tokens_wanted=160, **sizes) == 11  # and the null page
    free = 20 * layout.page_bytes
    assert pool_pages(layout, tokens_wanted=10**6, free_bytes=free, limit_bytes=None) == 16
    assert pool_pages(layout, tokens_wanted=10**6, free_bytes=10**9, limit_bytes=free) == 16
    with pytest.raises(ValueError, match=f"one page takes {layout.page_bytes}; free memory"):
        pool_pages(layout, tokens_wanted=160, free_bytes=layout.page_bytes, limit_bytes=None)


def test_layers_of_a_kind_share_groups_of_equal_size():
    layout = kv_layout(WINDOWED, 16, np.dtype(np.float32))
    assert [group.window for group in layout.groups] == [20, 20, 20, None]
    assert layout.places == 1
    assert layout.group_of_layer == (0, 1, 3, 2)
    deep = FULL.__class__(
        **{
            **{f: getattr(FULL, f) for f in FULL.__dataclass_fields__},
            "num_layers": 7,
            "windows": (9, 9, None, 9, 9, 9, None),
            "rope_of_layer": (0,) * 7,
        }
    )
    layout = kv_layout(deep, 16, np.dtype(np.float32))
    assert [group.window for group in layout.groups] == [9, 9, 9, None]  # the last 9 is short
    assert layout.places == 2
    pairs = list(zip(layout.group_of_layer, layout.place_of_layer, strict=True))
    assert pairs == [(0, 0), (0, 1), (3, 0), (1, 0), (1, 1), (2, 0), (3, 1)]

# SPDX-License-Identifier: Apache-2.0
"""Pages on disk come back as they were written, or not at all, whatever has become of the files.

Pages here are [2, 1, 4, 6]: 2 places, 1 KV head, 4 tokens, 6 numbers. Folders are read by a second
DiskCache, as by a later process.
"""

import array
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from engine.disk_cache import DiskCache
from engine.moves import HOST, Load, Save
from engine.pages import FilePool, PageGroup, PagePool
from engine.prefix_cache import PrefixCache
from tests.cost import bounded

MODEL, OTHER = "5" * 64, "7" * 64
SHAPE, PAGE_SIZE = (2, 1, 4, 6), 4
START = 32 + 16  # bytes of a digest and two sizes
SPACE = ("a tenant", (0,))


def opened(folder, model=MODEL, dtype=np.float32):
    folder.mkdir(exist_ok=True)
    return DiskCache(folder, model, SHAPE, dtype)


def make_pages(count, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return list(rng.normal(size=(count, *SHAPE)).astype(dtype))


def ids(count, seed=0):
    return array.array("i", random.Random(seed).choices(range(2**31), k=count))


def make_save(first, count, numbers, *, tokens=None, space=SPACE, last=PAGE_SIZE):
    """A segment of `count` whole pages behind `first` others; `last`: tokens of a single one."""
    lengths = [PAGE_SIZE] * count if count > 1 else [last]
    tokens = ids(64) if tokens is None else tokens
    text = tokens[: first * PAGE_SIZE + sum(lengths)].tobytes()
    entries = [(0, index, 0, number) for index, number in enumerate(numbers)]
    return Save(HOST, space, text, first, lengths, entries)


def write(folder, first=0, count=3, seed=0, **fields):
    """Has one segment written; returns its path and pages."""
    before = set(folder.glob("*.kv")) if folder.exists() else set()
    disk, pages = opened(folder), make_pages(count, seed)
    disk.save(make_save(first, count, range(1, count + 1), **fields), pages)
    disk.close()
    [path] = set(folder.glob("*.kv")) - before
    return path, pages


def cache_of(room=100):
    pools = [PagePool(10), PagePool(10), FilePool(room + 1, 1)]
    return PrefixCache([PageGroup()], PAGE_SIZE, pools)


def restored(folder, room=100):
    """Returns the engine's part of a start: the disk, and the cache with what it found."""
    disk, cache = opened(folder), cache_of(room)
    disk.restore(cache, room)
    cache.check()
    return disk, cache


def whole_pages(cache, tokens, space=SPACE):
    """Returns how many whole pages of a sequence a cache has."""
    keys = [tokens[i : i + PAGE_SIZE].tobytes() for i in range(0, len(tokens), PAGE_SIZE)]
    return len(cache.match(space, keys, b"", len(tokens)).pages[0])


def same(read, pages):
    """Asserts that pages are equal, bit for bit."""
    for one, other in zip(read, pages, strict=True):
        assert (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())


# What is written is read


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_pages_and_what_they_are_of_come_back_bit_for_bit(tmp_path, dtype):
    disk, pages = opened(tmp_path, dtype=dtype), make_pages(3, dtype=dtype)
    pages[1].reshape(-1)[:3] = np.nan, np.inf, -0.0
    save = make_save(2, 3, [7, 8, 9])
    disk.save(save, [jnp.asarray(pages[0]), *pages[1:]])
    disk.close()
    later = opened(tmp_path, dtype=dtype)
    [segment], _ = later.scan("dropped")
    assert segment.run == (SPACE, save.tokens, 2, [4, 4, 4], [(0, 0), (0, 1), (0, 2)])
    same(later.read(segment), pages)
    later.close()


@pytest.mark.parametrize("space", [(None, (0, 3)), ("", ()), ("\ud800 \0 é", (1,)), None])
def test_a_space_comes_back_as_it_was(tmp_path, space):
    write(tmp_path, space=space)
    [segment], _ = opened(tmp_path).scan("dropped")
    assert segment.space == space and hash(segment.space) == hash(space)


def test_a_load_right_behind_its_save_gives_the_pages(tmp_path):
    """By an order of moves: who loads knows neither the place nor the checksums yet."""
    disk, pages = opened(tmp_path), make_pages(40)
    for number in range(1, 41):
        disk.save(make_save(0, 1, [number]), [pages[number - 1]])
        disk.load(Load(number, [number], [100 + number]))
        disk.delete([number])
    for number in range(1, 41):
        kind, ticket, slots = disk.events.get(timeout=10)
        assert (kind, ticket, list(slots)) == ("loaded", number, [100 + number])
        same(slots.values(), [pages[number - 1]])
    disk.close()
    assert not list(tmp_path.iterdir())


def test_some_pages_of_a_segment_are_read_into_their_slots(tmp_path):
    _, pages = write(tmp_path)
    disk, cache = restored(tmp_path)
    numbers = sorted(cache.kept.pools[2].kept(0))
    disk.load(Load(1, [numbers[2], numbers[0]], [5, 6]))
    _, _, slots = disk.events.get(timeout=10)
    same([slots[6], slots[5]], [pages[0], pages[2]])


# What is damaged


def rewritten(path, change):
    """Changes the head of a file, and makes its sizes and digest right again."""
    data = path.read_bytes()
    size = int.from_bytes(data[32:40], "little")
    tokens = int.from_bytes(data[40:48], "little")
    end = START + size + tokens
    text = change(json.loads(data[START : START + size]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    body = len(text).to_bytes(8, "little") + data[40:48] + text + data[START + size : end]
    path.write_bytes(hashlib.sha256(body).digest() + body + data[end:])


def with_values(**values):
    return lambda head: head | values


def lacks(key):
    return lambda head: {name: value for name, value in head.items() if name != key}


# By name: the new head, and a part of the reason.
HEADS = {
    "a list": (lambda head: [head], "cannot be read"),
    "a number": (lambda head: 5, "cannot be read"),
    "no JSON": (lambda head: b"\xff{", "cannot be read"),
    "nothing": (lambda head: b"", "cannot be read"),
    "nested": (lambda head: b'{"space": ' + b"[" * 100_000, "cannot be read"),
    "a nested space": (with_values(space=json.loads("[" * 900 + "]" * 900)), "cannot be read"),
    "a dict as space": (with_values(space={"a": 1}), "cannot be read"),
    "a huge number": (lambda head: b'{"first": ' + b"9" * 9999 + b"}", "cannot be read"),
    **{
        f"lacks {key}": (lacks(key), "cannot be read")
        for key in ("fingerprint", "space", "first", "lengths", "entries", "checksums")
    },
    "of another model": (with_values(fingerprint=MODEL[:16] + OTHER[16:]), "another model"),
    "fingerprint None": (with_values(fingerprint=None), "another model"),
    "first is a text": (with_values(first="0"), "first page"),
    "first is true": (with_values(first=True), "first page"),
    "first is a float": (with_values(first=0.0), "first page"),
    "first is negative": (with_values(first=-1), "first page"),
    "first is huge": (with_values(first=10**30), "first page"),
    "first is one more": (with_values(first=1), "tokens are not"),
    "no lengths": (with_values(lengths=[]), "impossible lengths"),
    "lengths is a number": (with_values(lengths=3), "impossible lengths"),
    "lengths has a text": (with_values(lengths=[4, 4, "4"]), "impossible lengths"),
    "lengths has 0": (with_values(lengths=[4, 4, 0]), "impossible lengths"),
    "a page is too long": (with_values(lengths=[4, 3, 5]), "impossible lengths"),
    "a short page inside": (with_values(lengths=[4, 3, 4]), "short page"),
    "too many pages": (with_values(lengths=[4] * 4), "tokens are not"),
    "entries is a dict": (with_values(entries={}), "no pairs"),
    "an entry of one": (with_values(entries=[[0, 0], [0, 1], [2]]), "no pairs"),
    "an entry is a text": (with_values(entries=[[0, 0], [0, 1], "02"]), "no pairs"),
    "a negative index": (with_values(entries=[[0, 0], [0, 1], [0, -1]]), "no pairs"),
    "a negative group": (with_values(entries=[[0, 0], [0, 1], [-1, 2]]), "no pairs"),
    "a huge group": (with_values(entries=[[0, 0], [0, 1], [10**20, 2]]), "no pairs"),
    "an index outside": (with_values(entries=[[0, 0], [0, 1], [0, 3]]), "outside its run"),
    "a page twice": (with_values(entries=[[0, 0], [0, 1], [0, 1]]), "twice"),
    "two checksums": (with_values(checksums=[1, 2]), "checksum"),
    "no checksums": (with_values(checksums=None), "checksum"),
    "a huge checksum": (with_values(checksums=[1, 2, 1 << 32]), "checksum"),
    "fewer pages": (with_values(entries=[[0, 0]], checksums=[0]), "cut off, or goes on"),
}


def cut(size):
    return lambda data: data[: size if size >= 0 else len(data) + size]


def flipped(place):
    def flip(data):
        data = bytearray(data)
        data[place] ^= 0x10
        return bytes(data)

    return flip


HUGE = (1 << 63).to_bytes(8, "little")
# By name: the new bytes, and a part of the reason.
BYTES = {
    "empty": (cut(0), "no head"),
    "a byte": (cut(1), "no head"),
    "cut in the digest": (cut(31), "no head"),
    "cut in the sizes": (cut(START - 1), "no head"),
    "cut in the head": (cut(START + 20), "no head"),
    "cut before the pages": (cut(-3 * 192), "cut off"),
    "cut in the tokens": (cut(-3 * 192 - 1), "no head"),
    "cut in a page": (cut(-200), "cut off"),
    "cut by a byte": (cut(-1), "cut off"),
    "a byte too many": (lambda data: data + b"x", "cut off, or goes on"),
    "another digest": (flipped(3), "digest"),
    "a bit of the head": (flipped(START + 30), "digest"),  # in the fingerprint
    "a bit of the tokens": (flipped(-3 * 192 - 5), "digest"),
    "a huge head": (lambda data: data[:32] + HUGE + data[40:], "no head"),
    "huge tokens": (lambda data: data[:40] + HUGE + data[48:], "no head"),
    "a head of 60 MB": (
        lambda data: data[:32] + (60_000_000).to_bytes(8, "little") + data[40:],
        "no head",
    ),
    "zeros": (lambda data: bytes(len(data)), "digest"),
    "text": (lambda data: b"no segment at all, but a text that is long enough. " * 30, "no head"),
}


def dropped_at_once(folder, path, reason, caplog):
    """Asserts that a start drops one file, says so in one line, and takes nothing."""
    disk, cache = opened(folder), cache_of()
    caplog.clear()
    with bounded(seconds=1, megabytes=10):
        disk.restore(cache, 100)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1, caplog.text
    line = warnings[0].getMessage()
    assert "1 files of" in line and reason in line and path.name in line
    assert not path.exists() and not cache.stats()["nodes"]
    disk.close()


@pytest.mark.parametrize("case", HEADS)
def test_a_head_that_says_something_impossible_drops_its_file(tmp_path, caplog, case):
    change, reason = HEADS[case]
    path, _ = write(tmp_path)
    rewritten(path, change)
    dropped_at_once(tmp_path, path, reason, caplog)


@pytest.mark.parametrize("case", BYTES)
def test_a_damaged_file_is_dropped_at_a_start(tmp_path, caplog, case):
    change, reason = BYTES[case]
    path, _ = write(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    dropped_at_once(tmp_path, path, reason, caplog)


def test_a_huge_file_of_holes_is_dropped_at_once(tmp_path, caplog):
    path, _ = write(tmp_path)
    os.truncate(path, 1 << 40)
    dropped_at_once(tmp_path, path, "cut off, or goes on", caplog)


def test_the_rewriting_of_heads_alone_does_no_damage(tmp_path, caplog):
    path, pages = write(tmp_path)
    rewritten(path, lambda head: head)
    disk = opened(tmp_path)
    [segment], bad = disk.scan("dropped")
    assert not bad
    same(disk.read(segment), pages)
    assert not caplog.text


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("what", ["a bit", "swapped", "cut", "gone"])
def test_a_page_that_is_damaged_after_the_start_is_not_given(tmp_path, caplog, page, what):
    path, _ = write(tmp_path)
    disk, cache = restored(tmp_path)
    data = path.read_bytes()
    at = len(data) - 192 * (3 - page)
    other = len(data) - 192 * (3 - (page + 1) % 3)
    if what == "a bit":
        path.write_bytes(flipped(at + 100)(data))
    elif what == "swapped":
        path.write_bytes(data[:at] + data[other : other + 192] + data[at + 192 :])
    elif what == "cut":
        os.truncate(path, at + 191)
    else:
        path.unlink()
    caplog.clear()
    numbers = sorted(cache.kept.pools[2].kept(0))
    disk.load(Load(4, numbers, [1, 2, 3]))
    assert disk.events.get(timeout=10) == ("loaded", 4, None)
    assert caplog.text.count("WARNING") == (what != "gone")  # another engine may delete files
    assert what == "gone" or f"{path.name} is damaged; it is dropped" in caplog.text
    disk.close()


def test_one_line_counts_all_that_is_dropped_and_the_rest_is_kept(tmp_path, caplog):
    _, pages = write(tmp_path, tokens=ids(64, 1))
    for seed in range(2, 6):
        path, _ = write(tmp_path, tokens=ids(64, seed))
        os.truncate(path, 60)
    disk, cache = restored(tmp_path)
    assert caplog.text.count("WARNING") == 1 and "4 files of" in caplog.text
    assert whole_pages(cache, ids(12, 1)) == 3 and len(list(tmp_path.iterdir())) == 1
    disk.close()


# What is not ours


def test_files_of_another_model_are_neither_read_nor_deleted(tmp_path, caplog):
    other = opened(tmp_path, OTHER)
    other.save(make_save(0, 2, [1, 2]), make_pages(2))
    other.close()
    [path] = tmp_path.iterdir()
    damaged = path.with_name(f"{OTHER[:16]}-0.kv")
    damaged.write_bytes(b"damaged")
    disk, cache = restored(tmp_path)
    assert not cache.stats()["nodes"] and not caplog.records
    assert sorted(tmp_path.iterdir()) == sorted([path, damaged])
    [segment], bad = opened(tmp_path, OTHER).scan("dropped")
    assert segment.path == path and bad == [damaged]
    opened(tmp_path, OTHER).restore(cache_of(), 100)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_neither_followed_nor_deleted(tmp_path, caplog):
    """A link to a whole file elsewhere, one to nothing, a pipe that nobody writes, and a folder."""
    outside, pages = write(tmp_path / "outside")
    folder = tmp_path / "cache"
    folder.mkdir()
    names = [f"{MODEL[:16]}-{name}.kv" for name in ("link", "nothing", "pipe", "folder")]
    link, nothing, pipe, inner = (folder / name for name in names)
    link.symlink_to(outside)
    nothing.symlink_to(folder / "absent")
    os.mkfifo(pipe)
    inner.mkdir()
    (folder / f"{MODEL[:16]}-x.kv.part").symlink_to(outside)
    (folder / "notes.txt").write_text("mine")
    before = sorted(folder.iterdir())
    disk, cache = restored(folder)
    assert not cache.stats()["nodes"] and not caplog.records
    assert sorted(folder.iterdir()) == before and outside.exists()


def test_a_file_that_became_a_link_is_not_followed(tmp_path, caplog):
    path, _ = write(tmp_path / "cache")
    disk, cache = restored(tmp_path / "cache")
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    disk.load(Load(1, sorted(cache.kept.pools[2].kept(0)), [1, 2, 3]))
    assert disk.events.get(timeout=10) == ("loaded", 1, None)
    assert caplog.text.count("WARNING") == 1


WRITER = """
import hashlib, pathlib, sys, time
import numpy as np
from engine.segment_file import PageKind, Segment, write_segment

def wait(*_):
    print("writing", flush=True)
    time.sleep(60)

hashlib.sha256 = wait  # the file is open, and nothing is in it yet
segment = Segment(pathlib.Path(sys.argv[1]), None, b"1234" * 4, 0, [4], [(0, 0)], [], 0)
page = np.ones((2, 1, 4, 6), np.float32)
write_segment(segment, [page], PageKind("5" * 64, page.shape, page.dtype))
"""


def test_an_unfinished_file_goes_when_who_wrote_it_is_gone(tmp_path, caplog):
    path = tmp_path / f"{MODEL[:16]}-1.kv"
    command = [sys.executable, "-c", WRITER, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert writer.stdout.readline() == "writing\n"
    [part] = tmp_path.iterdir()
    assert part.name == f"{path.name}.part"
    restored(tmp_path)
    assert part.exists() and not caplog.records
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    restored(tmp_path)
    assert not part.exists()
    assert caplog.text.count("WARNING") == 1 and "its write was cut off" in caplog.text


# What goes wrong


def test_a_full_disk_costs_the_pages_and_not_the_engine(tmp_path, caplog):
    """A limit on the size of files stands in for the disk: the write fails just so."""
    disk, pages = opened(tmp_path), make_pages(5)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, unlimited[1]))
    try:
        disk.save(make_save(0, 4, [1, 2, 3, 4]), pages[:4])
        disk.load(Load(1, [1, 2, 3, 4], [1, 2, 3, 4]))
        assert disk.events.get(timeout=10) == ("lost", [1, 2, 3, 4])
        assert disk.events.get(timeout=10) == ("loaded", 1, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not list(tmp_path.iterdir())
    assert caplog.text.count("WARNING") == 1 and "is not kept: " in caplog.text
    assert "File too large" in caplog.text
    disk.delete([1, 2, 3, 4])
    disk.save(make_save(0, 1, [5]), pages[4:])
    disk.load(Load(2, [5], [9]))
    same(disk.events.get(timeout=10)[2].values(), pages[4:])
    disk.close()


class SlowPage:
    """A page that is written when `may` is set, as on a slow disk."""

    def __init__(self, page, may):
        self.page, self.may = page, may

    def __array__(self, dtype=None, copy=None):
        assert self.may.wait(10)
        return self.page


def test_a_slow_disk_costs_pages_and_not_the_hosts_memory(tmp_path):
    disk, may, pages = opened(tmp_path), threading.Event(), make_pages(6)
    disk._most_queued = 3
    disk.save(make_save(0, 2, [1, 2]), [SlowPage(page, may) for page in pages[:2]])
    disk.save(make_save(2, 2, [3, 4]), pages[2:4])
    assert disk.events.get(timeout=10) == ("lost", [3, 4])
    waiting = threading.Thread(
        target=disk.save, args=(make_save(2, 2, [5, 6]), pages[4:]), kwargs={"waits": True}
    )
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and disk._queued == 2
    may.set()
    waiting.join(10)
    disk.load(Load(1, [5, 6], [1, 2]))
    same(disk.events.get(timeout=10)[2].values(), pages[4:])
    disk.close()
    assert disk._queued == 0 and len(list(tmp_path.iterdir())) == 2


class LostPage:
    """A page whose array went with its device."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Array has been deleted")


def test_a_page_that_the_device_lost_costs_its_segment_alone(tmp_path, caplog):
    disk, pages = opened(tmp_path), make_pages(1)
    disk.save(make_save(0, 2, [1, 2]), [pages[0], LostPage()])
    disk.save(make_save(0, 1, [3]), pages)
    disk.close()
    assert disk.events.get_nowait() == ("lost", [1, 2]) and disk.events.empty()
    assert "Array has been deleted" in caplog.text and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_vanished_is_a_miss_and_no_error(tmp_path):
    write(tmp_path / "cache")
    disk, cache = restored(tmp_path / "cache")
    numbers = sorted(cache.kept.pools[2].kept(0))
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    (tmp_path / "cache").rmdir()
    disk.load(Load(1, numbers, [1, 2, 3]))
    disk.save(make_save(0, 1, [50]), make_pages(1))
    disk.delete(numbers)
    disk.close()
    assert [disk.events.get_nowait() for _ in range(2)] == [("loaded", 1, None), ("lost", [50])]


def test_what_another_engine_deletes_is_a_miss_and_no_error(tmp_path, caplog):
    _, pages = write(tmp_path)
    (one, its), (other, cache) = restored(tmp_path), restored(tmp_path)
    numbers = sorted(cache.kept.pools[2].kept(0))
    other.load(Load(1, numbers, [1, 2, 3]))
    same(other.events.get(timeout=10)[2].values(), pages)
    one.delete(sorted(its.kept.pools[2].kept(0)))
    one.close()
    other.load(Load(2, numbers, [1, 2, 3]))
    assert other.events.get(timeout=10) == ("loaded", 2, None)
    other.delete(numbers)  # gone already
    other.save(make_save(0, 1, [9]), make_pages(1))
    other.close()
    assert len(list(tmp_path.iterdir())) == 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# What a start takes


def test_segments_are_added_in_any_order_of_their_files(tmp_path):
    """A chain of four, each with the next page, and a short one; names are random."""
    tokens = ids(19)
    for first in random.Random(1).sample(range(5), 5):
        write(tmp_path, first, 1, seed=first, tokens=tokens, last=3 if first == 4 else 4)
    disk, cache = restored(tmp_path)
    assert whole_pages(cache, tokens[:16]) == 4
    keys = [tokens[i : i + 4].tobytes() for i in range(0, 16, 4)]
    assert cache.match(SPACE, keys, tokens[16:].tobytes(), 19).cells == 19
    assert whole_pages(cache, tokens[:16], ("another", (0,))) == 0
    numbers = [number for node in cache.kept.nodes() for run in node.nearest for number in run]
    disk.load(Load(1, numbers, list(range(1, 6))))
    slots = disk.events.get(timeout=10)[2]
    path = [node.start for node in cache.kept.nodes() for run in node.nearest for _ in run]
    same([slots[i] for i in range(1, 6)], [make_pages(1, seed)[0] for seed in path])


def test_what_has_lost_what_is_before_it_is_deleted_and_counted(tmp_path, caplog):
    caplog.set_level("INFO", "headrace")
    tokens = ids(20)
    write(tmp_path, 0, 1, tokens=tokens)
    gone, _ = write(tmp_path, 1, 1, tokens=tokens)
    write(tmp_path, 2, 1, tokens=tokens)
    write(tmp_path, 3, 2, tokens=tokens)
    gone.unlink()
    disk, cache = restored(tmp_path)
    assert whole_pages(cache, tokens) == 1 and len(list(tmp_path.iterdir())) == 1
    assert "1 segments kept, 2 dropped" in caplog.text


def set_times(paths):
    for second, path in enumerate(paths, 1_000_000_000):
        os.utime(path, (second, second))


def test_the_oldest_go_where_there_is_no_room(tmp_path, caplog):
    caplog.set_level("INFO", "headrace")
    paths = [write(tmp_path, 0, 2, tokens=ids(8, seed))[0] for seed in range(6)]
    order = [3, 0, 5, 1, 4, 2]  # from the oldest on
    set_times([paths[seed] for seed in order])
    disk, cache = restored(tmp_path, room=7)
    assert [whole_pages(cache, ids(8, seed)) for seed in order] == [0, 0, 0, 2, 2, 2]
    assert sorted(tmp_path.iterdir()) == sorted(paths[seed] for seed in order[3:])
    assert "3 segments kept, 3 dropped" in caplog.text


def test_files_of_other_models_keep_the_room_that_is_left(tmp_path, caplog):
    """The oldest of them go; what only looks like one does not, and nothing of the model's own."""
    mine, _ = write(tmp_path)
    others = []
    for number in range(4):
        disk = opened(tmp_path, OTHER)
        disk.save(make_save(0, 3, [1, 2, 3], tokens=ids(64, number)), make_pages(3))
        disk.close()
        [path] = set(tmp_path.glob("*.kv")) - {mine, *others}
        others.append(path)
    set_times(others)
    strange = [tmp_path / name for name in ("notes.kv", f"{'7' * 16}-{'g' * 32}.kv")]
    for path in strange:
        path.write_bytes(bytes(10_000))
    page_bytes = make_pages(1)[0].nbytes
    size = others[0].stat().st_size
    room = 3 + -(-2 * size // page_bytes)
    with caplog.at_level("INFO"):
        restored(tmp_path, room)
    assert {mine, *others[2:], *strange} == set(tmp_path.glob("*.kv"))
    assert "2 files of other models dropped" in caplog.text
    restored(tmp_path, 3)
    assert {mine, *strange} == set(tmp_path.glob("*.kv"))


def test_what_is_before_a_segment_is_as_new_as_it(tmp_path):
    """Of two chats that went on, the older one goes whole; not the beginnings of both."""
    chats = [ids(20, 1), ids(20, 2)]
    old = [write(tmp_path, 0, 3, tokens=tokens)[0] for tokens in chats]
    new = [write(tmp_path, 3, 2, tokens=tokens)[0] for tokens in chats]
    set_times([*old, *new])
    _, cache = restored(tmp_path, room=6)
    assert [whole_pages(cache, tokens) for tokens in chats] == [0, 5]
    assert sorted(tmp_path.iterdir()) == sorted([old[1], new[1]])


def test_a_load_makes_a_file_a_new_one(tmp_path):
    paths = [write(tmp_path, 0, 2, tokens=ids(8, seed))[0] for seed in range(3)]
    set_times(paths)
    disk, cache = restored(tmp_path)
    first = next(n for n in cache.kept.nodes() if n.keys and n.keys[0] == ids(4, 0).tobytes())
    disk.load(Load(1, list(first.nearest[0]), [1, 2]))
    disk.events.get(timeout=10)
    disk.close()
    _, cache = restored(tmp_path, room=2)
    assert [whole_pages(cache, ids(8, seed)) for seed in range(3)] == [2, 0, 0]


def test_a_run_that_lacks_a_page_is_not_added(tmp_path, caplog):
    caplog.set_level("INFO", "headrace")
    path, _ = write(tmp_path)
    data = path.read_bytes()
    kept = [0, 2]
    path.write_bytes(data[: -3 * 192] + data[-3 * 192 : -2 * 192] + data[-192:])
    rewritten(
        path,
        lambda head: (
            head
            | {"entries": [[0, index] for index in kept]}
            | {"checksums": [head["checksums"][index] for index in kept]}
        ),
    )
    _, cache = restored(tmp_path)
    assert whole_pages(cache, ids(12)) == 0 and not list(tmp_path.iterdir())
    assert "0 segments kept, 1 dropped" in caplog.text


def test_a_second_restore_forgets_what_was_asked_before(tmp_path):
    """As after a failed step: the tree is made anew, with what is on disk by then."""
    disk, cache = restored(tmp_path)
    disk.save(make_save(0, 2, [1, 2]), make_pages(2))
    disk.load(Load(1, [1, 2], [1, 2]))
    cache = cache_of()
    disk.restore(cache, 100)
    assert disk.events.empty() and whole_pages(cache, ids(8)) == 2
    disk.load(Load(2, sorted(cache.kept.pools[2].kept(0)), [1, 2]))
    same(disk.events.get(timeout=10)[2].values(), make_pages(2))

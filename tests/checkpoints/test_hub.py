# SPDX-License-Identifier: Apache-2.0
"""A hub name gives the model's folder or file, or one line that says what to do instead."""

import subprocess
import sys

import pytest

from checkpoints import hub, store
from tests.checkpoints.hub_server import serve

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "model-00001-of-00002.safetensors": b"a" * 1000,
    "model-00002-of-00002.safetensors": b"b" * 1000,
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "chat_template.jinja": b"{{ messages }}",
}
UNREAD = {
    "pytorch_model.bin": b"pickle",
    "weights.pt": b"pickle",
    "modeling.py": b"raise SystemExit('code was run')",
    "README.md": b"text",
    "onnx/config.json": b"{}",
    "original/consolidated.safetensors": b"c",
    "consolidated.safetensors": b"c",
    "small-Q4_0.gguf": b"GGUF",
}


@pytest.fixture(scope="module")
def server():
    with serve("org/name", FILES | UNREAD, ("main", "refs/pr/1")) as server:
        yield server


@pytest.fixture
def fetch(server, tmp_path):
    """Returns `fetch(name)` from the server into a cache of the test's own."""

    def fetch(name, endpoint=server.endpoint):
        return hub.fetch(hub.parse_name(name), endpoint=endpoint, cache_folder=tmp_path / "hub")

    server.sent.clear()
    return fetch


@pytest.mark.parametrize(
    "text, expected",
    [
        ("org/name", ("org/name", None, None)),
        ("Org-1/na.me_2.5", ("Org-1/na.me_2.5", None, None)),
        ("org/name@v1.0", ("org/name", "v1.0", None)),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1", None)),
        ("org/name:m-Q4_K_M.gguf", ("org/name", None, "m-Q4_K_M.gguf")),
        ("org/name@v1:sub/m.gguf", ("org/name", "v1", "sub/m.gguf")),
        *[
            (text, None)
            for text in (
                "name", "/org/name", "./org/name", "../name", "org/name/", "org/sub/name", "org/..",
                "org/name:m.safetensors", "org/name:../m.gguf", "org/name:/m.gguf", "org/na me",
                "~/name", "https://host/name", "org/name@", "org\\name", "", "org/name\n",
            )
        ],
    ],
)  # fmt: skip
def test_only_the_exact_form_is_a_hub_name(text, expected):
    assert hub.parse_name(text) == expected
    if expected is not None:
        assert str(hub.parse_name(text)) == text


def test_a_folder_has_what_is_read_and_nothing_else(server, fetch):
    folder = fetch("org/name")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert sorted(server.sent) == sorted(FILES)
    assert fetch("org/name") == fetch("org/name@refs/pr/1") == folder
    assert len(server.sent) == len(FILES), "what the cache has is not fetched again"


def test_the_config_is_fetched_alone(server, tmp_path):
    server.sent.clear()
    where = dict(endpoint=server.endpoint, cache_folder=tmp_path / "hub")
    folder = hub.fetch(hub.parse_name("org/name"), config_only=True, **where)
    assert [path.name for path in folder.iterdir()] == server.sent == ["config.json"]
    assert hub.fetch(hub.parse_name("org/name"), **where) == folder, "the rest comes to it"
    assert {path.name for path in folder.iterdir()} == set(FILES)


def test_one_file_is_fetched_alone(server, fetch):
    path = fetch("org/name:small-Q4_0.gguf")
    assert path.read_bytes() == b"GGUF" and server.sent == ["small-Q4_0.gguf"]


@pytest.mark.parametrize(
    "name, kind, message",
    [
        ("org/none", FileNotFoundError, "the Hugging Face Hub has no such model .*local folder"),
        ("org/none:m.gguf", FileNotFoundError, "the Hugging Face Hub has no such model"),
        ("org/name@v9", FileNotFoundError, "the Hugging Face Hub has no such revision"),
        ("org/name:m.gguf", FileNotFoundError, "org/name of the Hugging Face Hub has no such file"),
        ("org/gated", PermissionError, "only to those who accepted its terms"),
        ("org--x/name", OSError, "cannot be fetched .*; give a local folder"),
    ],
)
def test_what_is_not_there_is_one_line(fetch, name, kind, message):
    with pytest.raises(kind, match=message) as caught:
        fetch(name)
    assert str(caught.value).startswith(f"{name}: ") and "\n" not in str(caught.value)


def test_without_safetensors_the_way_out_is_named(tmp_path):
    with serve("org/name", {"small.gguf": b"GGUF", "config.json": b"{}"}) as server:
        name = hub.parse_name("org/name")
        with pytest.raises(FileNotFoundError, match=r"no safetensors .*as org/name:FILE\.gguf"):
            hub.fetch(name, endpoint=server.endpoint, cache_folder=tmp_path)


def test_unreachable_is_one_line_unless_the_cache_has_it(fetch):
    gone = "http://127.0.0.1:9"
    message = "org/name: no such file or folder, and it cannot be fetched .*; give a local folder"
    with pytest.raises(OSError, match=message) as caught:
        fetch("org/name", gone)
    assert "\n" not in str(caught.value)
    folder = fetch("org/name")
    assert fetch("org/name", gone) == folder


def test_paths_and_named_models_come_before_the_hub(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda name, **_: asked.append(str(name)) or tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert store.resolve("org/name").is_dir() and asked == []
    monkeypatch.setattr(store, "NAMED", {"org/named": None})
    monkeypatch.setattr(store, "fetch", lambda name: tmp_path / name)
    assert store.resolve("org/named") == tmp_path / "org/named" and asked == []
    with pytest.raises(FileNotFoundError, match="org is a folder here, so this is taken for a p"):
        store.resolve("org/other")
    assert store.resolve("owner/other@v1") == tmp_path and asked == ["owner/other@v1"]
    with pytest.raises(FileNotFoundError, match="known names: org/named; a model of the Hugging"):
        store.resolve("other")


def test_the_hubs_package_is_imported_only_when_it_is_asked():
    code = "import sys; from checkpoints import store; assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

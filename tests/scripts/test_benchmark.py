# SPDX-License-Identifier: Apache-2.0
"""Every suite from its flags to its report, on a tiny model and with made-up peers."""

import json
import stat
import sys

import pytest

from checkpoints.gguf_blocks import BLOCK_TYPES
from pallas_kernels.backends import Backend
from pallas_kernels.quantized_matmul import cases as quantized
from scripts import benchmark
from scripts.benchmarks import (
    kernel_peers,
    kernel_timing,
    kernels,
    prefix,
    prefix_engines,
    prefix_host,
    prefix_sharing,
    prefix_tiers,
    sampling,
    scheduler,
)
from scripts.benchmarks.peer import ROOT
from scripts.benchmarks.resume_once import next_turn
from scripts.benchmarks.settings import Settings
from scripts.command_line import UsageError
from tests.fixtures import byte_tokenizer, write_tiny

PNG = b"\x89PNG"
# Under any environment's Python: answers as a peer does, and notes the sizes of what it is given.
FAKE_PEER = """#!{python}
import sys, time
sys.path.insert(0, {root!r})
from scripts.benchmarks.peer_server import answer_batches

def run_steps(prompts, steps):
    with open({notes!r}, "a") as notes:
        print(sys.argv[2], len(prompts), max(map(len, prompts)), steps, file=notes)
    yield
    for _ in range(steps):
        time.sleep(0.001)
        yield

answer_batches({{"engine": "fake"}}, run_steps)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns the flags of a tiny model: one set of programs serves all suites."""
    folder = write_tiny(
        tmp_path_factory.mktemp("model"), tokenizer=byte_tokenizer(), num_hidden_layers=1
    )
    return [
        f"--model={folder}",
        "--max_num_seqs=2",
        "--max_num_batched_tokens=8",
        "--num_pages=32",
        "--repeats=1",
        "--most_void=0",  # the tests' machine may be busy
    ]


@pytest.fixture
def command(monkeypatch, capfd):
    """Returns a function that runs the command and returns (exit code, stdout, stderr)."""
    monkeypatch.setattr("scripts.benchmarks.machine.BUFFER_BYTES", 4 * 10**6)

    def run(*arguments):
        # Flags keep their values between calls, so each call gets its own.
        monkeypatch.setattr(benchmark, "FLAGS", benchmark.define_flags(list(benchmark.SUITES)))
        with pytest.raises(SystemExit) as end:
            benchmark.run(["scripts/benchmark.py", *arguments])
        captured = capfd.readouterr()
        return end.value.code, captured.out, captured.err

    return run


@pytest.fixture
def measured(command, model, tmp_path):
    """Returns a function that runs a suite and returns (figures, stdout, names of the charts)."""

    def run(suite, *arguments):
        output, charts = tmp_path / "figures.json", tmp_path / "charts"
        files = [f"--output={output}", f"--charts={charts}"]
        code, out, err = command(f"--suite={suite}", *model, *files, *arguments)
        assert code == 0, err
        assert all(path.read_bytes().startswith(PNG) for path in charts.iterdir())
        figures = json.loads(output.read_text(), parse_constant=pytest.fail)
        assert figures["suite"] == suite and figures["machine"]["platform"] == "cpu"
        return figures, out, {path.stem for path in charts.iterdir()}

    return run


@pytest.fixture
def peer(tmp_path):
    """Returns (flags of two made-up peers, a function that returns the notes they made)."""
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(FAKE_PEER.format(python=sys.executable, root=str(ROOT), notes=str(notes)))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    flags = [f"--peer_python={python}", f"--peer_model={tmp_path}", f"--peer_gguf={python}"]

    def read():
        rows = [line.split() for line in notes.read_text().splitlines()]
        return [(module, *map(int, numbers)) for module, *numbers in rows]

    return flags, read


def test_decode(measured):
    figures, out, charts = measured("decode", "--requests=1,2")
    assert [row["requests"] for row in figures["decode"]] == [1, 2]
    row = figures["decode"][1]
    assert row["engines"]["headrace"]["output_tokens"] == 128
    assert row["share_of_limit"] == pytest.approx(
        row["engines"]["headrace"]["decode_tokens_per_s"] / row["limit_tokens_per_s"]
    )
    assert row["ratios"] == {"decode_tokens_per_s": {}, "output_tokens_per_s": {}}
    assert "of limit" in out and "peer" not in out
    assert charts == {"decode_decode", "decode_output"}


def test_the_pools_sizes_are_compared(command, model, monkeypatch):
    sizes, load = [], Settings.load

    def load_one(settings, **options):
        sizes.append(options)
        return load(settings, num_pages=32)  # programs that are there

    monkeypatch.setattr(Settings, "load", load_one)
    flags = [flag for flag in model if "num_pages" not in flag]
    code, out, err = command("--num_pages_compare", "--requests=2", *flags)
    assert code == 0, err
    assert [(s["page_size"], s["num_pages"]) for s in sizes] == [(16, 17), (16, 8192 // 16 + 1)]
    assert "8192 ms" in out


def test_prefill_beside_peers(measured, peer):
    flags, notes = peer
    figures, out, charts = measured("prefill", "--shapes=2x5,1x20", *flags)
    assert [row["shape"] for row in figures["prefill"]] == ["2x5", "1x20"]
    assert figures["prefill"][0]["engines"]["headrace"]["prompt_tokens"] == 10
    assert set(figures["prefill"][1]["ratios"]) == {"transformers", "llama.cpp"}
    assert figures["peers"]["llama.cpp"] == {"engine": "fake"}
    assert charts == {"prefill"} and "prompt tok/s" in out
    # Each peer was given each shape twice: once to warm up.
    modules = ["scripts.peer_transformers", "scripts.peer_llama_cpp"]
    assert sorted(notes()) == sorted(
        (module, *shape, 1) for module in modules for shape in [(2, 5), (1, 20)] * 2
    )


def test_peers(measured, peer):
    flags, notes = peer
    figures, out, charts = measured("peers", "--requests=2", *flags)
    [row] = figures["decode"]
    assert list(row["engines"]) == ["headrace", "transformers", "llama.cpp"]
    assert row["engines"]["transformers"]["output_tokens"] == 128
    [one] = row["rounds"]
    for figure, ratios in row["ratios"].items():
        for name in ("transformers", "llama.cpp"):
            assert ratios[name] == pytest.approx(one["headrace"][figure] / one[name][figure])
    assert {(count, length, steps) for _, count, length, steps in notes()} == {(2, 64, 64)}
    assert "decode ratio" in out and charts == {"peers_decode", "peers_output"}


@pytest.mark.parametrize("rate", [None, 200.0])
def test_serving(measured, peer, tmp_path, rate):
    flags, notes = peer
    lengths = [(5, 6), (3, 2), (20, 1), (4, 4), (9, 3)]
    source = tmp_path / "lengths.jsonl"
    rows = [{"prompt_len": prompt, "output_len": output} for prompt, output in lengths]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"--lengths={source}", "--num_requests=4", "--repeats=2"]
    arguments += [] if rate is None else [f"--request_rate={rate}"]
    figures, out, charts = measured("serving", *arguments, *flags)
    engines = figures["serving"]
    assert list(figures["rounds"][0]) == ["continuous", "static", "transformers", "llama.cpp"]
    for run in engines.values():
        assert (run["requests"], run["prompt_tokens"], run["output_tokens"]) == (4, 32, 13)
        assert 0 < run["ttft_s"]["p50"] <= run["e2e_s"]["p50"] <= run["total_s"]
    rates = {name: run["requests_per_s"] for name, run in engines.items()}
    assert figures["ratios"]["static"] == pytest.approx(rates["continuous"] / rates["static"])
    assert figures["request_rate"] == rate
    if rate is None:  # warm-up, then static batches of two in order of arrival, in either round
        mine = [rest for module, *rest in notes() if module == "scripts.peer_transformers"]
        assert mine == [[1, 5, 1], [2, 5, 6], [2, 20, 4], [2, 5, 6], [2, 20, 4]]
    assert charts == {f"serving_{name}" for name in ("rate", "ttft", "tpot", "itl", "e2e")}
    assert "requests/s" in out and "p99 ms" in out


def test_serving_with_one_way_of_batching(measured):
    figures, _, _ = measured("serving", "--batching=static", "--num_requests=1")
    assert list(figures["serving"]) == ["static"] and figures["ratios"] == {}


def test_sampling(measured, monkeypatch):
    monkeypatch.setattr(sampling, "NEW_TOKENS", 6)
    fields = {name: sampling.FIELDS[name] for name in ("greedy", "top_p 0.9", "penalties")}
    monkeypatch.setattr(sampling, "FIELDS", fields)
    figures, out, charts = measured("sampling", "--requests=1,2")
    for row in figures["sampling"]:
        assert row["fields"].keys() == {*fields, "mixed"}
        assert row["ratios"]["greedy"] == 1.0
        assert row["fields"]["mixed"]["output_tokens"] == 6 * row["requests"]
    assert "top_p 0.9" in out and "cost" in out and charts == {"sampling"}
    figures, _, _ = measured("sampling", "--requests=2", "--fields=mixed")
    assert figures["sampling"][0]["fields"].keys() == {"greedy", "mixed"}


@pytest.fixture
def few_calls(monkeypatch):
    """Has kernels be timed in few calls, and the device's rates at little."""
    monkeypatch.setattr(kernel_timing, "LEAST_S", 0.001)
    for name, value in {"COPY_BYTES": 4096, "SIDE": 64}.items():
        monkeypatch.setattr(kernels, name, value)
        monkeypatch.setattr(kernels, f"SMALL_{name}", value)


def test_kernels_without_a_chip(measured, few_calls):
    figures, out, charts = measured("kernels", "--fields=kv_write,quantized_matmul")
    assert figures["model"] is None and figures["backend"] == "xla" and not figures["goals"]
    assert [row["operation"] for row in figures["kernels"]] == ["kv_write", "quantized_matmul"]
    for row in figures["kernels"]:
        assert row["shape"].endswith(", made small") and row["engines"].keys() == {"xla"}
        seconds = row["engines"]["xla"]["seconds"]
        assert row["share_of_limit"] == pytest.approx(row["limit_s"] / seconds)
        assert row["limit_s"] >= row["work"]["bytes"] / figures["rates"]["copy"] > 0
    assert "kernels on cpu" in out and "XLA's code alone, at the first shape of each" in out
    assert "GB/s (read and written)" in out and "Goals" not in out and charts == {"kernels"}


def test_kernels_beside_peers(measured, few_calls, monkeypatch):
    name = kernels.GOALS[1].shape
    shapes = {name: quantized.real(8, 256, 256, "int8", None)}
    shapes["by 12"] = quantized.real(8, 60, 128, "int8", 12)
    monkeypatch.setattr(quantized, "SHAPES", shapes)
    monkeypatch.setattr(kernels, "choose", lambda *_: Backend("tpu", "v5e", True))
    right = kernel_peers.plain_matmul(shapes[name])

    def declines(shape):
        raise kernel_peers.Declines("it has no time")

    def refused(x_TD, matrix_FD):
        raise NotImplementedError("no such thing\nand more")

    peers = {
        "plain": kernel_peers.plain_matmul,
        "idle": declines,
        "refused": lambda shape: right._replace(call=refused),
        "wrong": lambda shape: right._replace(call=lambda *arrays: 2 * right.call(*arrays)),
    }
    monkeypatch.setitem(kernel_peers.PEERS["tpu"], "quantized_matmul", peers)
    figures, out, _ = measured("kernels", "--fields=quantized_matmul")
    row, declined = figures["kernels"]
    assert row["engines"].keys() == {"kernel", "xla", "plain"}
    assert row["reasons"] == {
        "idle": "it has no time",
        "refused": "NotImplementedError: no such thing",
        "wrong": "its result differs by 1 of the largest number",
    }
    seconds = row["engines"]["kernel"]["seconds"]
    assert row["shares"]["copy"] == pytest.approx(
        row["work"]["bytes"] / figures["rates"]["copy"] / seconds
    )
    assert declined["engines"].keys() == {"xla", "plain"} and declined["share_of_limit"] is None
    assert "Declined: quantized_matmul: groups of 12" in declined["reasons"]["kernel"]
    [goal] = figures["goals"]
    assert (goal["shape"], goal["share"]) == (name, row["shares"]["copy"])
    heads, *lines = out[out.index("shape") :].splitlines()[:3]
    assert heads.split()[:2] == ["shape", "kernel"] and "plain us" in heads
    assert lines[0].split()[-3:] == ["-", "-", "-"]
    assert "Goals" in out and ">= 75%" in out and ("reached" in out) != ("missed" in out)


def test_scheduler(measured, monkeypatch):
    monkeypatch.setattr(scheduler, "ROWS", (1, 32, 256))
    monkeypatch.setattr(scheduler, "STEPS", 8)
    figures, out, charts = measured("scheduler")
    kinds = [(row["rows"], row["kind"]) for row in figures["scheduler"]]
    assert kinds == [(rows, kind) for kind in ("whole", "streamed") for rows in (1, 32, 256)]
    assert figures["row_s"].keys() == {"whole", "streamed"}
    for row in figures["scheduler"]:
        assert 0 < row["host_s"] < row["step_s"]
        assert row["host_over_call"] > 0
        assert row["token_s"] == pytest.approx(row["host_s"] / row["rows"])
    assert "more a row" in out and charts == {"scheduler"}


def test_steps(measured):
    figures, out, charts = measured("steps", "--requests=1", "--decode_steps=4")
    [row] = figures["steps"]
    assert figures["decode_steps"] == 4 and row["engines"].keys() == {"one", "several"}
    [one] = row["rounds"]
    rates = {name: one[name]["decode_tokens_per_s"] for name in one}
    assert row["ratio"] == pytest.approx(rates["several"] / rates["one"])
    assert "4 steps" in out and charts == {"steps"}


def test_scoring(measured):
    figures, out, charts = measured("scoring", "--num_requests=5")
    assert (figures["choices"], figures["tokens"]) == (5, 28)
    rates = {name: rate["choices_per_s"] for name, rate in figures["scoring"].items()}
    assert figures["ratio"] == pytest.approx(rates["together"] / rates["one by one"])
    assert "one by one, a second" in out and charts == {"scoring"}


@pytest.fixture
def prefix_parts(command, model, monkeypatch, tmp_path):
    """Returns a function that measures parts of the suite prefix, and returns (figures, stdout)."""
    monkeypatch.setattr(prefix_tiers, "resume_once", next_turn)  # in this process
    monkeypatch.setattr(prefix_host, "PAGES", 500)

    def run(parts, *arguments):
        output, charts = tmp_path / "figures.json", tmp_path / "charts"
        files = [f"--output={output}", f"--charts={charts}"]
        flags = [flag for flag in model if "num_pages" not in flag]
        given = ["--suite=prefix", f"--fields={','.join(parts)}", *flags, *arguments]
        code, out, err = command(*given, *files)
        assert code == 0, err
        assert [path.name for path in charts.iterdir()] == ["prefix.png"]
        figures = json.loads(output.read_text(), parse_constant=pytest.fail)["prefix"]
        assert set(figures) == set(parts)
        for part in figures.values():
            [one] = part["rounds"]
            for goal in part["goals"]:
                first, second = (one[name][goal["figure"]] for name in goal["over"])
                assert goal["ratio"] == pytest.approx(first / second) and goal["ratio"] > 0
        return figures, out

    return run


def test_prefix(prefix_parts, monkeypatch):
    load = prefix_engines.load_with_pages

    def load_one(settings, pages, *arguments, **options):
        return load(settings, 31, *arguments, **options)  # programs that are there

    for part in (prefix_sharing, prefix_tiers):
        monkeypatch.setattr(part, "load_with_pages", load_one)
    parts = [name for name in prefix.PARTS if name != "preempted"]
    figures, out = prefix_parts(parts, "--prefix_tokens=40", "--num_requests=6")
    # Of the chat, all that was stored was there.
    assert figures["resumed"]["facts"] == {"stored before": 55, "recomputed of them": 0}
    assert figures["resumed"]["runs"]["without"]["cached_tokens"] == 0
    facts = figures["scoring"]["facts"]
    assert (facts["choices"], facts["tokens of the examples"]) == (6, 40)
    assert out.count(">= 8.0") == 2 and "recomputed of them" in out


@pytest.mark.slow  # it compiles for a pool of its own
def test_prefix_after_a_preemption(prefix_parts):
    figures, _ = prefix_parts(["preempted"], "--prefix_tokens=24")
    runs = figures["preempted"]["runs"]
    assert runs["with"]["from_host_tokens"] >= 16 and runs["without"]["from_host_tokens"] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--fields=mixed"], "--fields=mixed is unknown; the parts are shared"),
        (["--num_pages=9"], "chooses the pools itself; leave out --num_pages"),
        (["--fields=preempted", "--max_num_seqs=1"], "needs two rows"),
        (["--fields=shared", "--prefix_tokens=99"], "--prefix_tokens=99 makes requests of 135"),
    ],
)
def test_prefix_that_cannot_be_measured_is_named(command, model, arguments, message):
    flags = [flag for flag in model if "num_pages" not in flag]
    code, _, err = command("--suite=prefix", *flags, *arguments)
    assert code == 2 and message in err.splitlines()[-1]


def test_a_second_process_that_cannot_start_is_named():
    asked = {"model": "none", "options": {}, "prompt": [1]}
    with pytest.raises(UsageError, match="the second process did not start"):
        prefix_tiers.resume_once(asked)


def test_startup(measured):
    # A cold start compiles: with one row there is little to.
    figures, out, charts = measured("startup", "--max_num_seqs=1", "--max_num_batched_tokens=1")
    cold, warm = figures["starts"]["cold"], figures["starts"]["warm"]
    assert figures["programs"] == len(cold["programs"]) == len(warm["programs"]) > 6
    assert (cold["compiled"], cold["loaded"]) == (figures["programs"], 0)
    assert (warm["compiled"], warm["loaded"]) == (0, figures["programs"])
    for start in (cold, warm):
        assert 0 < start["ready_s"] < start["first_token_s"] <= start["all_programs_s"]
        assert sum(start["phases"].values()) == pytest.approx(start["first_token_s"], rel=0.05)
        assert all(seconds > 0 for seconds in start["programs"].values())
    assert figures["dominant"]["cold"]["phase"] in cold["phases"]
    assert "body decode1x1" in out and "import jax" in out
    assert charts == {"startup_phases", "startup_programs"}


def test_loading(measured):
    figures, out, charts = measured("loading", "--repeats=1")
    rates = {name: rate["bytes_per_s"] for name, rate in figures["loading"].items()}
    assert figures["ratio"] == pytest.approx(rates["load"] / rates["page cache"])
    assert figures["types"].keys() == {name for name, t in BLOCK_TYPES.items() if t.decode}
    for rates in figures["types"].values():
        sides = rates["Headrace"]["bytes_per_s"], rates["gguf"]["bytes_per_s"]
        assert rates["ratio"] == pytest.approx(sides[0] / sides[1])
    assert "page cache GB/s" in out and charts == {"loading"}


PEER = ["--peer_python=p", "--peer_model=m"]
WRONG = {
    "requests": (["--requests=1,x"], "--requests must be numbers from 1"),
    "no request": (["--requests=0"], "--requests must be numbers from 1"),
    "shapes": (["--shapes=1x2x3"], "--shapes must be numbers from 1"),
    "peer alone": (["--peer_python=p"], "--peer_python goes together with --peer_model"),
    "model alone": (["--peer_gguf=p"], "--peer_python goes together with --peer_model"),
    "no peer": (["--suite=peers"], "--suite=peers needs --peer_python"),
    "peer in decode": (PEER, "--peer_python is for --suite=peers, prefill or serving"),
    "peer in startup": (["--suite=startup", *PEER], "--peer_python is for --suite=peers"),
    "pools in serving": (["--suite=serving", "--num_pages_compare"], "of --suite=decode"),
    "fields": (["--suite=sampling", "--fields=x"], "--fields=x is unknown; the fields are greedy"),
    "one step": (["--suite=steps", "--decode_steps=1"], "compares with --decode_steps=1"),
    "pools chosen": (["--num_pages_compare", "--num_pages=9"], "leave out --num_pages"),
    "suite": (["--suite=none"], "--suite=none"),
    "repeats": (["--repeats=0"], "--repeats=0"),
    "rate": (["--request_rate=0"], "--request_rate=0.0 must be above 0"),
    "rate nan": (["--request_rate=nan"], "--request_rate=nan must be above 0"),
    "batching": (["--batching=dynamic"], "batching='dynamic' is not known"),
    "charts": (["--charts=README.md"], "--charts=README.md cannot be a folder"),
    "output": (["--output=no/x"], "name a file in a folder that exists"),
    "kernels": (["--suite=kernels", "--fields=matmul"], "--fields=matmul is unknown; name some of"),
    "model": (["--suite=startup", "--model=none"], "none: no such file or folder"),
}


@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG)
def test_a_wrong_use_gives_one_clear_line(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in err.replace("flag ", "")
    assert err.count("\n") == 1


def test_what_the_model_has_no_room_for_is_named(command, model, tmp_path):
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"prompt_len": 100, "output_len": 50}\n')
    long = [f"--lengths={lengths}", "--num_requests=1"]
    for arguments, message in [
        (["--suite=prefill", "--shapes=1x128"], "--shapes=1x128 and a token do not fit"),
        (["--suite=serving", *long], "a request has 150 tokens and max_model_len is 128"),
        (["--suite=serving", long[0]], "--num_requests=200 is over the 1 of"),
        (["--suite=serving", "--lengths=none"], "--lengths=none cannot be read"),
        (["--suite=serving", "--num_requests=1", "--text=none"], "--text=none cannot be read"),
    ]:
        code, _, err = command(*model, *arguments)
        assert code == 2
        last = err.splitlines()[-1]
        assert last.startswith("benchmark: ") and message in last

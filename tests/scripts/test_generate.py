# SPDX-License-Identifier: Apache-2.0
"""The command's inputs, outputs and refusals, with a stand-in for the model."""

import io
import json
import math
import resource
import types

import numpy as np
import pytest

from engine.api import Score
from engine.params import SamplingParams
from engine.request import CompletionOutput, Logprob, Request, RequestMetrics, RequestOutput
from engine.results import Delta
from scripts import generate

MODELS = []


class EchoEngine:
    """Says each prompt's characters back, one a step, the later requests first."""

    def __init__(self):
        self.left = {}
        self.said = {}
        self.steps = 0
        self.interrupted_at = None

    def add_request(self, request, prompt, *, streams):
        self.said[request.id], self.left[request.id] = [], (request, list(str(prompt)))
        return request.id

    def step(self):
        deltas = []
        for request_id in sorted(self.left, reverse=True):
            request, left = self.left[request_id]
            text = left.pop(0) if left else ""
            self.said[request_id].append(text)
            output = None
            if not left:
                del self.left[request_id]
                output = result(request, "".join(self.said[request_id]))
            deltas.append(Delta(request_id, request.sample, text, [1], None, "stop", output))
        self.steps += 1
        if self.steps == self.interrupted_at:
            self.left.clear()
            raise KeyboardInterrupt
        return deltas

    def stats(self):
        return {"programs_compiled": 3, "programs_loaded": 4}


class EchoLLM:
    """Stands in for LLM; a prompt of more than 20 characters is too long for it."""

    default_params = SamplingParams(top_k=9)

    def __init__(self, model, **options):
        if model == "unknown":
            raise ValueError("unknown: no such file or folder, and no model of that name")
        self.options = options
        self.engine = EchoEngine()
        self.requests = []
        MODELS.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.is_closed = True

    def prepare(self, prompt, params):
        if len(prompt) > 20:
            raise ValueError(f"the prompt has {len(prompt)} tokens and max_model_len is 20")
        made = [
            Request(
                id=len(self.requests) + sample,
                prompt_token_ids=[7],
                params=params,
                limit=20,
                seed=0,
                sample=sample,
            )
            for sample in range(params.n)
        ]
        self.requests += made
        return made, prompt

    def prepare_chat(self, conversation, params, template):
        said = " ".join(message["content"] for message in conversation)
        return self.prepare(said + "".join(map(str, template.values())), params)

    def score(self, pairs, progress):
        return [Score([1, 2], [-0.5, -1.5], -2.0, True) for _ in pairs]

    def embed(self, prompts, pooling, normalize, progress):
        return np.array([[len(prompt), pooling == "last", normalize] for prompt in prompts])


def result(request, text):
    wanted = request.params.logprobs is not None
    position = {5: Logprob(-math.inf, 2, "\u00e9"), 6: Logprob(-0.5, 1, " a")}
    return RequestOutput(
        request_id=request.id,
        prompt=None,
        prompt_token_ids=[7],
        prompt_logprobs=None if request.params.prompt_logprobs is None else [None, position],
        outputs=[
            CompletionOutput(request.sample, text, [5], [position] if wanted else None, "stop", 2)
        ],
        metrics=RequestMetrics(0.0, 0.25, None, [], 0.5, 0, 0),
        finished=True,
        seed=0,
    )


@pytest.fixture
def command(monkeypatch, capsys):
    """Returns a function that runs the command and returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(generate, "LLM", EchoLLM)
    MODELS.clear()

    def run(*arguments, stdin=""):
        # Flags keep their values between calls, so each call gets its own.
        monkeypatch.setattr(generate, "FLAGS", generate.define_flags())
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(
            "sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False)
        )
        with pytest.raises(SystemExit) as end:
            generate.run(["scripts/generate.py", *arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run


def test_one_prompt_streams_its_text_alone(command):
    code, out, err = command("--prompt=abc", "--temperature=0", "--page_size=32")
    assert (code, out) == (0, "abc\n")
    assert MODELS[0].options == {"page_size": 32}
    params = MODELS[0].requests[0].params
    assert (params.temperature, params.max_tokens) == (0, 128)
    assert "1 requests, 0 failed; 1 prompt and 1 output tokens" in err
    assert "TTFT p50 250.0 ms, p95 250.0 ms; TPOT p50 -, p95 -" in err
    assert "3 programs compiled, 4 loaded" in err


def test_several_prompts_stream_in_input_order(command):
    code, out, _ = command("--prompt=abc", "--prompt=a", "--prompt=é漢")
    assert (code, out) == (0, "[0] abcabc\n[1] aa\n[2] é漢é漢\n")


def test_rows_win_over_flags_and_results_keep_their_order(command, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"prompt": "a\\u2028b", "logprobs": 1, "prompt_logprobs": 0}\n'
        "\n"
        '{"prompt": [1, 2], "max_tokens": null, "temperature": 0.5}\r\n'
    )
    target.write_text("old")
    code, out, _ = command(
        f"--input={source}", f"--output={target}", "--max_tokens=3", "--seed=9", "--noprogress"
    )
    assert (code, out) == (0, "")
    first, second = (json.loads(line) for line in target.read_text().splitlines())
    position = {
        "5": {"logprob": None, "rank": 2, "decoded_token": "é"},
        "6": {"logprob": -0.5, "rank": 1, "decoded_token": " a"},
    }
    assert first.pop("metrics")["ttft_s"] == 0.25
    assert first == {
        "index": 0,
        "prompt": "a\u2028b",
        "text": "a\u2028b",
        "token_ids": [5],
        "finish_reason": "stop",
        "stop_reason": 2,
        "seed": 0,
        "logprobs": [position],
        "prompt_logprobs": [None, position],
    }
    assert (second["index"], second["prompt"]) == (1, [1, 2])
    assert "logprobs" not in second
    params = [request.params for request in MODELS[0].requests]
    assert [(p.max_tokens, p.temperature, p.seed) for p in params] == [(3, 1.0, 9), (None, 0.5, 9)]
    assert list(tmp_path.iterdir()) in ([source, target], [target, source])


def test_text_files_have_a_prompt_a_line(command, tmp_path):
    source = tmp_path / "in.txt"
    source.write_text('{"not": "json here"}\n\n last')
    code, out, _ = command(f"--input={source}")
    assert code == 0
    assert [line.split("]")[0] for line in out.splitlines()] == ["[0", "[1", "[2"]
    assert command("--input=-", stdin="plain\n")[1] == "plain\n"
    assert command("--input=-", stdin='{"prompt": "p"}\n')[1] == "p\n"


def test_the_report_is_json(command, tmp_path):
    report = tmp_path / "report.json"
    assert command("--prompt=abc", f"--report={report}", "--model=m")[0] == 0
    read = json.loads(report.read_text(), parse_constant=pytest.fail)
    assert read["model"] == "m"
    assert read["summary"]["requests"] == 1
    assert read["engine"]["programs_loaded"] == 4


def test_an_empty_input_gives_an_empty_output(command, tmp_path):
    target = tmp_path / "out.jsonl"
    assert command("--input=-", f"--output={target}", stdin="")[0] == 0
    assert target.read_text() == ""
    assert not MODELS


WRONG = {
    "no prompt": (["--model=m"], "", "give either --prompt=TEXT"),
    "both": (["--prompt=a", "--input=-"], "", "give either --prompt=TEXT"),
    "unknown flag": (["--promt=a"], "", "Unknown command line flag 'promt'. Did you mean: prompt"),
    "flag's type": (["--prompt=a", "--max_tokens=x"], "", "flag --max_tokens=x"),
    "argument": (["a"], "", "'a' is not a flag; every argument is --name=value"),
    "sampling flag": (["--prompt=a", "--top_p=0"], "", "top_p=0.0 must be above 0, at most 1"),
    "engine flag": (["--prompt=a", "--page_size=48"], "", "must be a power of two; try 32 or 64"),
    "missing file": (["--input=none.jsonl"], "", "none.jsonl cannot be read (No such file"),
    "kind of file": (["--input=a.csv"], "", "--input=a.csv must end in .jsonl or .txt"),
    "not UTF-8": (["--input=-"], b"a\xff", "--input=- is not UTF-8 at byte 1"),
    "broken line": (
        ["--input=-"],
        '{"prompt": "a"}\n{"prompt": \n',
        "standard input line 2 is not valid JSON (Expecting value, column",
    ),
    "NaN": (["--input=-"], '{"prompt": "a", "top_p": NaN}', "NaN is not a number of JSON"),
    "no object": (["--input=-"], '{"prompt": "a"}\n[1]', 'line 2 must be an object with "prompt"'),
    "no text": (["--input=-"], '{"prompt": [1, true]}', "must be text or a list of ids"),
    "surrogate": (["--input=-"], '{"prompt": "a\\ud800"}', "surrogate pair at character 1"),
    "field": (["--input=-"], '{"prompt": "a", "topp": 1}', "line 1: 'topp' is not a sampling"),
    "value": (["--input=-"], '{"prompt": "a", "max_tokens": 1.5}', "line 1: max_tokens=1.5"),
    "output": (["--prompt=a", "--output=no/x"], "", "name a file in a folder that exists"),
    "output folder": (["--prompt=a", "--output=."], "", "--output=. is not a regular file"),
    "model": (["--prompt=a", "--model=unknown"], "", "unknown: no such file or folder"),
    "too long": (["--prompt=ok", "--prompt=" + "a" * 21], "", "prompt 1: the prompt has 21 tokens"),
}


@pytest.mark.parametrize("arguments, stdin, message", WRONG.values(), ids=WRONG)
def test_a_wrong_use_gives_one_clear_line(command, arguments, stdin, message):
    code, out, err = command(*arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("generate: ")
    assert err.count("\n") == 1


def test_a_failed_run_leaves_the_old_output(command, tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    assert command("--prompt=" + "a" * 21, f"--output={target}")[0] == 2
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_leaves_the_old_output(command, tmp_path):
    """A limit on the size of files stands in for the disk: the write fails just so."""
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))
    try:
        code, out, err = command("--prompt=abc", f"--output={target}", "--noprogress")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert (code, out) == (2, "")
    assert "could not be written whole (File too large), so nothing was kept" in err
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_help_lists_the_flags(command):
    code, out, _ = command("--help")
    assert code == 0
    assert "--[no]ignore_eos" in out and "--max_num_batched_tokens" in out


def test_every_sampling_field_is_a_flag(command):
    command(
        "--prompt=a",
        "--temperature=0.5",
        "--min_p=0.1",
        "--stop=x",
        "--stop=yz",
        "--stop_token_ids=5",
        "--stop_token_ids=6",
        "--allowed_token_ids=7",
        "--logit_bias=42:-100",
        "--logit_bias=43:1.5",
        "--bad_words=mill",
        "--repetition_penalty=1.2",
        "--n=2",
        "--logprobs_mode=processed",
        "--noskip_special_tokens",
        "--truncate_prompt_tokens=5",
    )
    params = MODELS[0].requests[0].params
    assert params == SamplingParams(
        temperature=0.5,
        top_k=9,
        min_p=0.1,
        max_tokens=128,
        stop=["x", "yz"],
        stop_token_ids=[5, 6],
        allowed_token_ids=[7],
        logit_bias={42: -100, 43: 1.5},
        bad_words=["mill"],
        repetition_penalty=1.2,
        n=2,
        logprobs_mode="processed",
        skip_special_tokens=False,
        truncate_prompt_tokens=5,
    )


def test_several_outputs_of_a_prompt(command, tmp_path):
    code, out, _ = command("--prompt=ab", "--prompt=c", "--n=2")
    assert (code, out) == (0, "[0.0] abab\n[0.1] abab\n[1.0] cc\n[1.1] cc\n")
    target = tmp_path / "o.jsonl"
    command("--prompt=ab", "--n=2", f"--output={target}", "--noprogress")
    row = json.loads(target.read_text())
    assert [one["text"] for one in row["outputs"]] == ["ab", "ab"] and "text" not in row


def test_chats_from_flags_and_lines(command, tmp_path):
    code, out, _ = command("--chat", "--prompt=hey")
    assert (code, out) == (0, "hey\n")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": said, "tools": [5], "chat_template_kwargs": {"x": 6}}, {"prompt": "c"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for mode in (["--chat"], []):
        code, _, _ = command(*mode, f"--input={source}", f"--output={target}", "--noprogress")
        first, second = map(json.loads, target.read_text().splitlines())
        assert code == 0 and first["messages"] == said and first["text"] == "a b[5]6"
        assert second["text"] == "c" and ("messages" in second) == bool(mode)


def test_scores_are_written_a_line_a_pair(command, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"context": "a", "continuation": [5]}\n')
    code, out, _ = command("--score", f"--input={source}")
    want = {
        "index": 0,
        "token_ids": [1, 2],
        "token_logprobs": [-0.5, -1.5],
        "sum_logprob": -2.0,
        "is_greedy": True,
    }
    assert code == 0 and json.loads(out) == want
    code, out, _ = command("--score", f"--input={source}", f"--output={target}")
    assert (code, out) == (0, "") and json.loads(target.read_text()) == want


def test_vectors_are_written_a_line_a_prompt(command, tmp_path):
    code, out, _ = command("--embed", "--prompt=abc", "--prompt=b")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert rows == [{"index": 0, "embedding": [3, 0, 0]}, {"index": 1, "embedding": [1, 0, 0]}]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": [5, 6]}\n')
    arguments = ["--embed", "--pooling=last", "--normalize", f"--input={source}"]
    code, out, _ = command(*arguments, f"--output={target}")
    assert (code, out) == (0, "")
    assert json.loads(target.read_text()) == {"index": 0, "embedding": [2, 1, 1]}


def test_interrupted_it_writes_what_is_finished_and_says_so(command, tmp_path, monkeypatch):
    target = tmp_path / "o.jsonl"
    made = EchoLLM.__init__

    def interrupted(self, *arguments, **options):
        made(self, *arguments, **options)
        self.engine.interrupted_at = 2

    monkeypatch.setattr(EchoLLM, "__init__", interrupted)
    code, _, err = command("--prompt=a", "--prompt=bcd", f"--output={target}", "--noprogress")
    assert code == 130 and err.endswith("generate: interrupted; 1 of 2 requests were finished\n")
    [row] = map(json.loads, target.read_text().splitlines())
    assert (row["index"], row["text"]) == (0, "a")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt=a", "--logit_bias=5"], "--logit_bias=5 must be ID:NUMBER"),
        (["--prompt=a", "--stop="], "stop[0]='' must be a text that is not empty"),
        (["--prompt=a", "--min_p=2"], "min_p=2.0 must be from 0 to 1"),
        (["--prompt=a", "--score"], "--score takes --input=F.jsonl"),
        (["--prompt=a", "--score", "--chat"], "--chat and --score do not go together"),
        (["--prompt=a", "--embed", "--chat"], "--chat and --embed do not go together"),
        (["--prompt=a", "--embed", "--top_k=3"], "--top_k plays no part with --embed"),
        (["--prompt=a", "--embed", "--report=r"], "--report is of generated text"),
        (["--prompt=a", "--embed", "--pooling=max"], "should be one of <mean|last>"),
        (["--prompt=a", "--n=0"], "n=0 must be from 1"),
    ],
)
def test_wrong_modes_and_fields_are_refused(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "mode, line, message",
    [
        ("--chat", '{"messages": []}', "line 1 has no messages"),
        ("--chat", '{"messages": [{"content": "a"}]}', 'it must be an object with a "role"'),
        ("--chat", '{"prompt": [5]}', "the prompt of a chat must be text"),
        ("--chat", '{"messages": [{"role": "a"}], "prompt": "b"}', "line 1 must be an object"),
        ("--score", '{"context": "a"}', '{"context": "...", "continuation": "..."}'),
        ("--score", '{"prompt": "a"}', "line 1 must be an object with"),
        ("--score", '{"context": "a", "continuation": "b", "seed": 1}', "'seed' plays no part"),
        ("--embed", '{"prompt": "a", "top_k": 1}', "'top_k' plays no part with --embed"),
        ("--embed", '{"messages": [{"role": "a"}]}', 'with "prompt": text or a list'),
        ("--noscore", '{"context": "a", "continuation": "b"}', 'with "prompt": text or a list'),
    ],
)
def test_wrong_lines_are_refused(command, tmp_path, mode, line, message):
    source = tmp_path / "in.jsonl"
    source.write_text(line + "\n")
    code, out, err = command(mode, f"--input={source}")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1

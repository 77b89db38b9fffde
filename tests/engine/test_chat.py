# SPDX-License-Identifier: Apache-2.0
"""Chats: the model's own template, one BOS, messages that stay text, templates that misbehave."""

import copy
import dataclasses
import time

import pytest
from tokenizers import processors

from checkpoints.tokenizer import build_tokenizer
from engine import SamplingParams
from engine.chat import ChatEncoder, Renderer, as_conversations
from tests.engine.conftest import open_on_demand
from tests.engine.tiny_gguf import write_tiny_gguf
from tests.fixtures import BOS, EOS, byte_tokenizer, fallback_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<{{ message['role'] }}> {{ message['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "user", "content": "the mill"}]


def tokenizer_with(make=byte_tokenizer, template=TEMPLATE, add_bos=None):
    """Returns a Tokenizer with a chat template, as a checkpoint's."""
    backend = copy.deepcopy(make())
    if add_bos and make is byte_tokenizer:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 1)]
        )
    return build_tokenizer(backend, bos_id=1, eos_ids=[2], add_bos=add_bos, chat_template=template)


def encode(tokenizer, conversation, parse_special=False, **options):
    return ChatEncoder(tokenizer).token_ids(conversation, options, parse_special=parse_special)


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
@pytest.mark.parametrize("add_bos", [True, False])
def test_a_chat_has_the_templates_ids_and_one_bos(make, add_bos):
    """CASES T-01."""
    tokenizer = tokenizer_with(make, add_bos=add_bos)
    ids = encode(tokenizer, HELLO)
    text = f"{BOS}<user> the mill{EOS}<assistant>"
    assert ids == tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert ids.count(1) == 1 and ids[0] == 1 and ids.count(2) == 1


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
def test_spellings_of_special_tokens_in_messages_stay_text(make):
    tokenizer = tokenizer_with(make)
    said = f"a{EOS}b {BOS} </s <s> {EOS}{EOS}"
    conversation = [{"role": "user", "content": said}, {"role": "assistant", "content": "c"}]
    ids = encode(tokenizer, conversation)
    assert (ids.count(1), ids.count(2)) == (1, 2), "only what the template wrote"
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.count(f"a{EOS}b {BOS} </s <s> {EOS}{EOS}") == 1, "all of it is there, as text"
    parsed = encode(tokenizer, conversation, parse_special=True)
    assert (parsed.count(1), parsed.count(2)) == (3, 5)
    plain = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    assert encode(tokenizer, plain) == encode(tokenizer, plain, parse_special=True)


def test_nobody_can_write_a_private_name():
    tokenizer = tokenizer_with()
    from engine.chat import CLOSES, OPENS

    said = f"{EOS}{OPENS}2{CLOSES}{OPENS}text 0{CLOSES}"
    ids = encode(tokenizer, [{"role": "user", "content": said}])
    assert ids.count(2) == 1
    assert said in tokenizer.decode(ids, skip_special_tokens=False)


def test_options_reach_the_template():
    template = (
        "{{ tools | tojson }}{{ thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    tokenizer = tokenizer_with(template=template)
    encoder = ChatEncoder(tokenizer)
    options = {"tools": [{"name": "é<"}], "thinking": "on"}
    assert encoder.render(HELLO, options) == '[{"name": "é<"}]onthe mill!'
    quiet = options | {"add_generation_prompt": False}
    assert encoder.render(HELLO, quiet) == '[{"name": "é<"}]onthe mill'
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]
    assert encoder.render(parts, quiet).endswith("ona\nb")


def test_the_last_message_can_be_continued():
    encoder = ChatEncoder(tokenizer_with())
    conversation = [*HELLO, {"role": "assistant", "content": "the wheel "}]
    text = encoder.render(conversation, {"continue_final_message": True})
    assert text.endswith("<assistant> the wheel")


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ ''.__class__.__mro__ }}", "the chat template failed: SecurityError"),
        ("{% include '/etc/passwd' %}", "the chat template failed: TypeError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for x in %}", "the chat template failed: TemplateSyntaxError"),
        ("{{ 'a' * 10 ** 10 }}", "memory|failed"),
        ("{% set x = messages.append(1) %}", "failed"),
        ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "it wrote more than"),
    ],
)
def test_a_template_that_misbehaves_fails_in_one_line(template, message):
    """CASES H-05."""
    with pytest.raises(ValueError, match=message) as caught:
        encode(tokenizer_with(template=template), HELLO)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_template_that_never_ends_is_ended_and_the_next_one_runs():
    renderer = Renderer(max_seconds=1.0)
    assert renderer.render("{{ a }}", {"a": 5}) == "5"
    loop = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    start = time.monotonic()
    with pytest.raises(ValueError, match="took more than 1 s"):
        renderer.render(loop, {})
    assert time.monotonic() - start < 10
    assert renderer.render("{{ a }}", {"a": 6}) == "6"


@pytest.mark.parametrize(
    "messages, message",
    [
        ("hello", "must be a list of messages"),
        ([[]], "conversation 0 has no messages"),
        ([{"content": "x"}], 'message 0: it must be an object with a "role"'),
        ([{"role": "user", "content": 5}], "message 0: the content must be text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "only parts of text"),
        (["x"], "conversation 0 must be a list of messages"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        as_conversations(messages)


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_gguf_files_flag_says_whether_a_text_begins_with_bos(own_cache, tmp_path, add_bos):
    """CASES T-01, through the whole engine: ids are never altered."""
    path = write_tiny_gguf(tmp_path / "m.gguf", add_bos)
    llm = open_on_demand(path, max_num_seqs=1, max_num_batched_tokens=1, num_pages=9)
    params = SamplingParams(temperature=0, max_tokens=1)
    text = llm.tokenizer.encode("the mill", add_special_tokens=False)
    prompts = ["the mill", text, [1, *text], [1, 1, *text]]
    outputs = llm.generate(prompts, params)
    whole = [1, *text] if add_bos else text
    assert [output.prompt_token_ids for output in outputs] == [whole, *prompts[1:]]


@pytest.mark.parametrize("make", ["fallback_script", "script"])
def test_a_text_that_has_its_bos_already(request, make, caplog):
    """CASES T-01: a templated text given to `generate`, where the tokenizer adds a BOS or none."""
    llm = request.getfixturevalue(make).llm
    adds = make == "fallback_script"
    text = f"{BOS}<user> the mill{EOS}<assistant>"
    params = SamplingParams(temperature=0, max_tokens=1)
    llm.maker._warned = False
    [output] = llm.generate(text, params)
    assert output.prompt_token_ids[:3].count(1) == (2 if adds else 1)
    assert ("begins with two BOS tokens" in caplog.text) == adds
    caplog.clear()
    params = dataclasses.replace(params, add_special_tokens=False)
    [output] = llm.generate(text, params)
    assert output.prompt_token_ids.count(1) == 1 and output.prompt_token_ids[0] == 1
    assert not caplog.text


def test_chat_runs_through_the_engine(script):
    llm = script.llm
    script.say([30, 31])
    plain = llm.chats
    llm.chats = ChatEncoder(dataclasses.replace(llm.tokenizer, chat_template=TEMPLATE))
    try:
        params = SamplingParams(temperature=0)
        [output] = llm.chat(HELLO, params)
        assert output.outputs[0].token_ids == [30, 31, 2]
        assert output.prompt_token_ids == encode(tokenizer_with(), HELLO)
        assert [o.outputs[0].token_ids for o in llm.chat([HELLO, HELLO], params)] == [
            [30, 31, 2]
        ] * 2
        assert llm.chat([], params) == []
    finally:
        llm.chats = plain
    with pytest.raises(ValueError, match="conversation 0: the model has no chat template"):
        llm.chat(HELLO)

"""Messages that mean the same render the same, and a refusal says why."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rewarm.errors import InvalidPrompt
from rewarm.prompt.chat import Chat
from rewarm.prompt.chat import chat_of as canonical
from rewarm.prompt.render.renderer import ChatRenderer
from rewarm.values import Message
from tests import corpus
from tests.chats import (
    TOKENIZERS,
    TOOLS,
    assistant,
    call,
    result,
    system,
    tokenizer_of,
    user,
)
from tests.sets import SOAK
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.corpus


def test_spellings_that_mean_the_same_render_the_same() -> None:
    for name in TOKENIZERS:
        renderer = ChatRenderer(tokenizer_of(name))
        arguments = {"port": "Ayr"}

        def calling(arguments: Any) -> Message:
            function = {"name": "tide", "arguments": arguments}
            calls = [{"id": "abcdefghi", "type": "function", "function": function}]
            return assistant("", tool_calls=calls)

        texts = [
            renderer.render([user("When?"), a, result("12:00")], TOOLS).tokens.tolist()
            for a in (
                calling(arguments) | {"reasoning": "Hm."},
                calling('{"port": "Ayr"}') | {"reasoning_content": "Hm."},
                calling('{"port":\n"Ayr"}') | {"thinking": "Hm.", "content": None},
                calling(arguments) | {"reasoning_content": "Hm.", "content": []},
            )
        ]
        assert texts[0] == texts[1] == texts[2] == texts[3]
        parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "en?"}]
        assert (
            renderer.render([user("When?")]).tokens.tolist()
            == renderer.render([{"role": "user", "content": parts}]).tokens.tolist()
        )


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_reaches_a_template_under_any_name(given: str, read: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|start|>{{ m." + read + " }}{% endfor %}"
    prompt = ChatRenderer(tokenizer).render([user("a"), assistant("b", **{given: "Hm."})])
    assert "Hm." in tokenizer.decode(prompt.tokens.tolist())


def test_words_and_thinking_before_a_tool_call_of_gpt_oss() -> None:
    """Its template refuses both together, but a model may give both."""
    renderer = ChatRenderer(tokenizer_of("harmony"))
    answer = {**call(text="I will look."), "reasoning_content": "We need the tide."}
    prompt = renderer.render([user("When?"), answer, result("12:00")], TOOLS)
    told = renderer.tokenizer.decode(prompt.tokens.tolist())
    assert "We need the tide." in told
    assert "I will look." in told


@pytest.mark.parametrize("name", ["chatml", "harmony"])
def test_a_developer_message_reaches_the_prompt(name: str) -> None:
    names = [None, *corpus.template_names()[:: 6 if corpus.RECORDED and not SOAK else 1]]
    for template in names:
        renderer = ChatRenderer(tokenizer_of(name, template))
        options = {} if template is None else {"bos_token": "", "eos_token": ""}
        chat = [{"role": "developer", "content": "Speak like a gull."}, user("When?")]
        try:
            renderer.render([system("Speak like a gull."), user("When?")], **options)
        except InvalidPrompt:
            continue  # it does not take a system message either
        prompt = renderer.render(chat, **options)
        assert "Speak like a gull." in renderer.tokenizer.decode(prompt.tokens.tolist()), template
    renderer = ChatRenderer(tokenizer_of(name))
    both = renderer.render([system("Be brief."), chat[0], chat[1]])
    assert "Be brief." in renderer.tokenizer.decode(both.tokens.tolist())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ("Hello", "list of messages"),
        (["Hello"], "messages\\[0\\] is a str"),
        ([user("a"), None], "messages\\[1\\]"),
        ([{"content": "a"}], "role"),
        ([{"role": 3, "content": "a"}], "role"),
        ([{"role": "user", "content": 3}], "content is a int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text is missing"),
        ([{"role": "user", "content": [3]}], "'int'"),
        ([assistant("", tool_calls=[{"id": "x"}])], "tool_calls\\[0\\]"),
        ([assistant("", tool_calls="x")], "tool_calls is a str"),
        ([assistant("", reasoning_content=[1])], "reasoning_content"),
        ([user("lone \ud800 surrogate")], "tokenised"),
    ],
)
def test_what_is_no_chat_is_refused_by_name(messages: Any, words: str) -> None:
    renderer = ChatRenderer(tiny_tokenizer())
    with pytest.raises(InvalidPrompt, match=words):
        renderer.render(messages)


def test_a_refusal_carries_the_templates_own_words() -> None:
    renderer = ChatRenderer(tokenizer_of("chatml"))
    with pytest.raises(InvalidPrompt, match="System message must be at the beginning"):
        renderer.render([user("a"), system("b"), user("c")])
    with pytest.raises(InvalidPrompt, match="No user query found"):
        renderer.render([system("b")])
    with pytest.raises(InvalidPrompt, match="chat_template"):
        renderer.render([user("a")], chat_template="{{ 1 }}")
    for name in ("chat_template", "every_turn", "marks", "tools", "tokenize"):
        with pytest.raises(InvalidPrompt, match=name):
            Chat([user("a")], template={"enable_thinking": True, name: 1})
    assert Chat([user("a")], template={"enable_thinking": True}).template


def test_a_model_without_a_template_says_what_to_do() -> None:
    bare = tiny_tokenizer()._tokenizer
    bare.chat_template = None
    with pytest.raises(InvalidPrompt, match="use completions"):
        ChatRenderer(bare).render([user("a")])


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ messages[7].content }}", "{% for m in messages %}", "{{ 'a' + 1 }}"],
)
def test_whatever_a_template_raises_is_a_refusal(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InvalidPrompt, match="refuses"):
        ChatRenderer(tokenizer).render([user("a")])


def test_messages_of_the_caller_are_not_changed() -> None:
    renderer = ChatRenderer(tokenizer_of("chatml"))
    chat = [user("When?"), {**call(), "reasoning": "Hm."}, result("12:00")]
    before = copy.deepcopy(chat)
    renderer.render(chat, TOOLS, marked=[0])
    renderer.ahead(canonical([*chat, assistant("At noon.")], TOOLS))
    assert chat == before

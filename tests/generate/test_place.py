"""A token position is found in a message, role and field, on all templates and tokenizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rewarm.errors import InvalidPrompt
from rewarm.generate.why.miss import Location, locate
from rewarm.prompt.chat import chat_of
from rewarm.prompt.render.renderer import ChatRenderer
from rewarm.prompt.text import common_tokens
from tests import corpus
from tests.chats import TOOLS, assistant, call, result, system, tokenizer_of, user
from tests.sets import SOAK

pytestmark = pytest.mark.corpus

CHAT = [
    system("You keep the harbour. Answer briefly, and only what you know for sure."),
    user("When is the tide high in Ullapool, and why does it matter?"),
    assistant("Let me look that up for you.", reasoning_content="Tides are in the table."),
    user("Do that, and do not forget the boats, of which there are three."),
    call("Ullapool", text="I look at the table of tides now."),
    result("It is high at ten past two in the afternoon."),
    assistant("Ten past two. The boats come in before that."),
    user("Thank you. And tomorrow, when the moon is full?"),
]

CHANGES: list[tuple[str, Location]] = [
    ("You keep", Location("content", 0, "system")),
    ("what you know for sure", Location("content", 0, "system")),
    ("When is the tide", Location("content", 1, "user")),
    ("why does it matter", Location("content", 1, "user")),
    ("Let me look", Location("content", 2, "assistant")),
    ("three", Location("content", 3, "user")),
    ("ten past two in", Location("content", 5, "tool")),
    ("in before that", Location("content", 6, "assistant")),
    ("the moon is full", Location("content", 7, "user")),
]


def changed(chat: list[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    """Replace these words of the chat by others."""
    other = copy.deepcopy(chat)
    for message in other:
        message["content"] = message["content"].replace(words, "Xylophones abound")
    return other


def names() -> list[str]:
    found = corpus.template_names()
    if corpus.RECORDED:
        return found if SOAK else found[::7]
    return [name for name in found if name not in corpus.NO_TOOLS]


@pytest.mark.parametrize("template", names())
def test_a_change_is_found_in_the_message_it_was_made_in(template: str) -> None:
    tokenizer = tokenizer_of("chatml", template)
    renderer = ChatRenderer(tokenizer)
    try:
        first = renderer.render(CHAT)
    except InvalidPrompt:
        pytest.skip("the template refuses this chat")
    seen = 0
    for words, expected in CHANGES:
        chat = changed(CHAT, words)
        prompt = renderer.render(chat)
        at = common_tokens(first.tokens, prompt.tokens)
        located = prompt.ends.keys()
        if located and (expected.message not in located or at == len(first.tokens)):
            continue  # the template rewrites or leaves out that message
        found = locate(tokenizer, prompt, chat_of(chat), at)
        # The first word of a text may be one token with the end of its header.
        text = CHAT[expected.message or 0]["content"]
        merged = text.startswith(words) and not str(tokenizer.decode([prompt.tokens[at]])).isalpha()
        assert found == expected or (merged and found.field in ("role", "template")), words
        seen += 1
    assert seen >= 4


def test_thinking_calls_and_tools_have_fields_of_their_own() -> None:
    tokenizer = tokenizer_of("chatml")
    renderer = ChatRenderer(tokenizer)
    loop = CHAT[:6]
    loop[4] = {**loop[4], "reasoning_content": "It must be in the table, as always."}
    first = renderer.render(loop, TOOLS)

    def place(chat: list[dict[str, Any]], tools: list[Any]) -> Location:
        prompt = renderer.render(chat, tools)
        at = common_tokens(first.tokens, prompt.tokens)
        return locate(tokenizer, prompt, chat_of(chat, tools), at)

    thinking = copy.deepcopy(loop)
    thinking[4]["reasoning_content"] = "It must be on the wall."
    assert place(thinking, TOOLS) == Location("reasoning_content", 4, "assistant")
    called = copy.deepcopy(loop)
    called[4]["tool_calls"][0]["function"]["arguments"] = '{"port": "Oban"}'
    assert place(called, TOOLS) == Location("tool_calls", 4, "assistant")
    tools = copy.deepcopy(TOOLS)
    tools[0]["function"]["description"] = "When the tide is low."
    assert place(loop, tools) == Location("tools")
    other_role = copy.deepcopy(loop)
    other_role.insert(2, user("And quickly!"))
    found = place(other_role, TOOLS)
    assert (found.message, found.role, found.field) == (2, "user", "role")


def test_where_the_answer_begins_is_no_message() -> None:
    tokenizer = tokenizer_of("chatml")
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.render(CHAT[:2])
    found = locate(tokenizer, prompt, chat_of(CHAT[:2]), len(prompt.tokens) - 1)
    assert found == Location("generation", role="assistant")

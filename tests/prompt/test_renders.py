"""A chat is rendered in few renders, and each text of it is encoded once."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rewarm.prompt.chat import chat_of as canonical
from rewarm.prompt.render.renderer import ChatRenderer
from tests.chats import (
    TOKENIZERS,
    TOOLS,
    assistant,
    call,
    chat_of,
    result,
    tokenizer_of,
    user,
)

pytestmark = pytest.mark.corpus

MOST_RENDERS = 16


class Counting:
    """A tokenizer that counts its renders and the characters that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.renders = 0
        self.messages = 0
        self.characters = 0
        render, encode = tokenizer.apply_chat_template, tokenizer.encode

        def counted_render(chat: list[Any], **options: Any) -> Any:
            self.renders += 1
            self.messages += len(chat)
            return render(chat, **options)

        def counted_encode(text: str, **options: Any) -> Any:
            self.characters += len(text)
            return encode(text, **options)

        self.tokenizer = copy.copy(tokenizer)
        # Set in the wrapper's own `__dict__`: it forwards plain assignments.
        self.tokenizer.__dict__["apply_chat_template"] = counted_render
        self.tokenizer.__dict__["encode"] = counted_encode


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("every_turn", [False, True])
def test_renders_do_not_grow_with_the_chat(name: str, every_turn: bool) -> None:
    """A long chat takes one more render, for its end."""
    counts = []
    for turns in (2, 15, 150):
        counting = Counting(tokenizer_of(name))
        renderer = ChatRenderer(counting.tokenizer)
        chat = [*chat_of(turns), call(), result("13:00")]
        renderer.render(chat, TOOLS, every_turn=every_turn, marked=[-1, 1, 2, 3])
        counts.append(counting.renders)
    assert counts[0] + 1 == counts[1] == counts[2] <= MOST_RENDERS


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("every_turn", [False, True])
def test_a_turn_of_a_long_chat_renders_all_of_it_once(name: str, every_turn: bool) -> None:
    """So does a tool loop. The grid of `exact` takes one more, with tags."""
    counting = Counting(tokenizer_of(name))
    renderer = ChatRenderer(counting.tokenizer)
    chat = chat_of(100)
    for steps in range(40):
        if steps:
            chat += [call(), result("13:00")]
        counting.messages = 0
        renderer.render(chat, TOOLS, every_turn=every_turn)
        assert counting.messages <= len(chat) * (1 + every_turn) + 12 * 16


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_ends_of_messages_are_looked_for_when_they_are_asked_for(name: str) -> None:
    counting = Counting(tokenizer_of(name))
    chat = chat_of(3)
    prompt = ChatRenderer(counting.tokenizer).render(chat)
    before = counting.renders
    assert len(prompt.ends) == len(chat)
    assert counting.renders == before + 1
    assert prompt.ends is prompt.ends


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("every_turn", [False, True])
def test_text_of_earlier_turns_is_not_encoded_again(name: str, every_turn: bool) -> None:
    counting = Counting(tokenizer_of(name))
    renderer = ChatRenderer(counting.tokenizer)
    chat = chat_of(40, thinking=False)
    for turn in range(40):
        renderer.render(chat[: 2 * turn + 2], every_turn=every_turn)
    text = tokenizer_of(name).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    # All text once, and the short windows around the boundaries once more.
    assert counting.characters <= 1.5 * len(text)
    before = counting.characters
    renderer.ahead(canonical([*chat, assistant("At noon.")]))
    assert counting.characters - before <= 3000


def test_a_mark_costs_one_render_and_another_where_its_message_has_no_text() -> None:
    counting = Counting(tokenizer_of("chatml"))
    renderer = ChatRenderer(counting.tokenizer)
    chat = [user("When?"), call(), result("12:00"), call(), result("13:00")]
    counts = []
    for marks in ([], [], [0, 2, 4], [1, 3]):
        before = counting.renders
        renderer.render(chat, TOOLS, marked=marks)
        counts.append(counting.renders - before)
    assert counts[1] + 1 == counts[2] == counts[3] - 1

"""Marks lie where messages end, and `ahead` is how the next turn begins."""

from __future__ import annotations

import numpy as np
import pytest

from rewarm.errors import InvalidPrompt
from rewarm.prompt.chat import chat_of as canonical
from rewarm.prompt.render.renderer import ChatRenderer
from rewarm.values import Message
from tests import corpus
from tests.chats import (
    TOKENIZERS,
    TOOLS,
    assistant,
    call,
    chat_of,
    result,
    system,
    tokenizer_of,
    user,
)
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.corpus


def test_every_turn_gives_the_same_places_in_every_later_turn() -> None:
    for name in TOKENIZERS:
        renderer = ChatRenderer(tokenizer_of(name))
        chat = chat_of(6)
        chat[5:5] = [call("Ayr"), result("12:00")]
        seen: list[int] = []
        for turn in [i + 1 for i, m in enumerate(chat) if m["role"] == "user"]:
            prompt = renderer.render(chat[:turn], TOOLS, every_turn=True)
            places = [b.position for b in prompt.boundaries if b.durable]
            assert places[: len(seen)] == seen
            assert len(places) > len(seen)
            assert [b.kind for b in prompt.boundaries if b.durable][-1] == "user"
            seen = places
        assert len(seen) == 12


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("every_turn", [False, True])
def test_ahead_is_what_the_next_turn_begins_with(name: str, every_turn: bool) -> None:
    renderer = ChatRenderer(tokenizer_of(name))
    chat = chat_of(3)
    turns = [
        (
            assistant("At noon.", reasoning_content="Hm."),
            [[user("Why?")], [user("\n")], [user("1")]],
        ),
        (assistant("\n\nAt noon. "), [[user("é")], [user("A question?")]]),
        (
            {**call("Ayr"), "reasoning": "I must look."},
            [[result("12:00")], [result('{"at": 12}')], [result("")], [result("A result")]],
        ),
        (
            assistant(
                "",
                tool_calls=[call(p, i)["tool_calls"][0] for p, i in (("Ayr", "1"), ("Oban", "2"))],
            ),
            [[result("x", "1"), result("y", "2")], [result("\n", "1"), result("z", "2")]],
        ),
    ]
    for answer, nexts in turns:
        ahead = renderer.ahead(canonical([*chat, answer], TOOLS), every_turn=every_turn)
        assert ahead is not None
        before = renderer.render(chat, TOOLS)
        assert len(ahead.tokens) > len(before.tokens) - 8
        for ending in nexts:
            real = renderer.render([*chat, answer, *ending], TOOLS, every_turn=every_turn)
            assert np.array_equal(real.tokens[: len(ahead.tokens)], ahead.tokens)
            # The next turn adds only its own message and the generation prompt.
            own = len(renderer.tokenizer.encode("".join(m["content"] for m in ending)))
            assert len(real.tokens) - len(ahead.tokens) <= own + (90 if name == "tiny" else 40)
            if every_turn:
                grid = [b.position for b in real.boundaries if b.durable]
                mine = [b.position for b in ahead.boundaries if b.durable]
                assert grid[: len(mine)] == mine


def test_ahead_is_none_where_the_template_refuses_to_go_on() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') if messages|length > 2 }}{{ messages }}"
    renderer = ChatRenderer(tokenizer)
    assert renderer.ahead(canonical([user("a"), assistant("b")])) is None


def test_marks_are_where_messages_end() -> None:
    for name in TOKENIZERS:
        renderer = ChatRenderer(tokenizer_of(name))
        chat = chat_of(3)
        plain = renderer.render(chat)
        prompt = renderer.render(chat, marked=[-1, 1, 3, 99, -7])
        places = plain.ends
        assert list(places) == list(range(len(chat)))
        first = next(b.position for b in plain.boundaries if b.kind == "system")
        assert prompt.marks == (first, places[1], places[3])
        for i, position in places.items():
            told = renderer.tokenizer.decode(prompt.tokens[:position].tolist())
            assert told.rstrip().endswith(chat[i]["content"].strip())


@pytest.mark.parametrize("name", ["chatml", "harmony"])
def test_marks_on_messages_without_text_are_kept(name: str) -> None:
    renderer = ChatRenderer(tokenizer_of(name))
    chat = [
        *(system(), user("When?"), {**call("Ayr"), "reasoning": "Hm."}, result("12:00")),
        *(call("Oban"), result(""), call("Wick"), result("")),
    ]
    for stop in range(3, len(chat) + 1):
        part = chat[:stop]
        plain = renderer.render(part, TOOLS)
        ends = plain.ends
        for m in range(1, stop):
            (mark,) = renderer.render(part, TOOLS, marked=[m]).marks
            told = renderer.tokenizer.decode(plain.tokens[:mark].tolist())
            assert mark <= len(plain.tokens)
            assert mark >= max(p for i, p in ends.items() if i <= m)
            # No later call lies before the mark. Its own call does, where the next message has a
            # text or where there is no next message.
            ports = [p for i, p in ((2, "Ayr"), (4, "Oban"), (6, "Wick")) if i <= m]
            later = [p for i, p in ((2, "Ayr"), (4, "Oban"), (6, "Wick")) if i > m]
            assert not any(p in told for p in later)
            if m == stop - 1 or m + 1 in ends:
                assert all(p in told for p in ports)
            if m == stop - 1:
                assert len(plain.tokens) - mark <= 8
                assert mark <= max(plain.generation, plain.boundaries[-1].position)
        everyone = renderer.render(part, TOOLS, marked=range(stop)).marks
        assert everyone == tuple(sorted(everyone))


def test_marks_beside_an_answer_that_is_continued() -> None:
    renderer = ChatRenderer(tokenizer_of("chatml"))
    chat = [user("When?"), call("Ayr"), result("12:00"), call("Oban"), result(""), assistant("At ")]
    prompt = renderer.render(chat, TOOLS, continue_final=True, marked=[1, 4])
    told = [renderer.tokenizer.decode(prompt.tokens[:m].tolist()) for m in prompt.marks]
    assert "Ayr" in told[0]
    assert "12:00" not in told[0]
    assert "Oban" in told[1]
    assert "At" not in told[1].split("Oban")[1]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["The tide is", "```python\n", "Well, ", "<think>Hm"])
def test_an_answer_that_was_begun_is_continued(name: str, text: str) -> None:
    renderer = ChatRenderer(tokenizer_of(name))
    chat = chat_of(2)
    whole = renderer.render(chat)
    prompt = renderer.render([*chat, assistant(text)], continue_final=True)
    assert renderer.tokenizer.decode(prompt.tokens.tolist()).endswith(text)
    begun = renderer.tokenizer.decode(prompt.tokens[prompt.generation :].tolist())
    assert "assistant" in begun
    assert "tide? " not in begun
    durable = [b.position for b in whole.boundaries if b.durable]
    assert [b.position for b in prompt.boundaries if b.durable] == durable
    assert len(prompt.ends) == len(chat) + 1
    empty = renderer.render([*chat, assistant("")], continue_final=True)
    assert np.array_equal(empty.tokens, whole.tokens)


def test_on_every_template_an_answer_is_continued_or_refused() -> None:
    done = 0
    for template in corpus.template_names():
        renderer = ChatRenderer(tokenizer_of("tiny", template))
        options = {"bos_token": "", "eos_token": ""}
        chat = [user("When?"), assistant("Noon."), user("Sure?"), assistant("Yes, it is")]
        try:
            prompt = renderer.render(chat, continue_final=True, **options)
        except InvalidPrompt:
            continue
        assert renderer.tokenizer.decode(prompt.tokens.tolist()).endswith("Yes, it is")
        done += 1
    assert done >= (85 if corpus.RECORDED else 12)


@pytest.mark.parametrize("last", [user("x"), call(), system("x")])
def test_only_an_answer_can_be_continued(last: Message) -> None:
    renderer = ChatRenderer(tiny_tokenizer())
    with pytest.raises(InvalidPrompt, match="continued"):
        renderer.render([user("a"), last], continue_final=True)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_an_answer_is_continued_from_its_text_only(name: str) -> None:
    renderer = ChatRenderer(tokenizer_of("chatml"))
    with pytest.raises(InvalidPrompt, match="only from its text"):
        renderer.render([user("a"), assistant("", **{name: "Hm"})], continue_final=True)


def test_where_the_generation_prompt_begins() -> None:
    renderer = ChatRenderer(tokenizer_of("chatml"))
    prompt = renderer.render(chat_of(2))
    told = renderer.tokenizer.decode(prompt.tokens[prompt.generation :].tolist())
    assert told == "<|im_start|>assistant\n<think>\n"

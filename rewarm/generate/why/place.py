"""Find the message, and the part of it, that a token position of a prompt lies in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rewarm.prompt.messages import REASONING, is_system
from rewarm.prompt.render.renderer import Prompt
from rewarm.values import Message

Field = Literal[
    "content", "reasoning_content", "tool_calls", "tools", "role", "template", "generation"
]
SPARE = 8
"""The tokens that are read beyond a message's end."""


@dataclass(frozen=True)
class Location:
    """A part of a chat. `message` is None for what belongs to no message: tools, the template's own
    words, and the place where the answer begins."""

    field: Field
    message: int | None = None
    role: str | None = None


class _Occurrence(NamedTuple):
    start: int
    stop: int
    place: Location


def locate(
    tokenizer: Any,
    prompt: Prompt,
    chat: Sequence[Message],
    tools: Sequence[Any] | None,
    position: int,
) -> Location:
    """Look for the texts of the messages in the prompt's text, between the two nearest message
    ends.

    `chat` is normalised, as it was rendered."""
    if position >= prompt.generation and prompt.generation:
        return Location("generation", role="assistant")
    # They are not always in the order of the messages: a template may move the system prompt.
    ends = sorted(prompt.ends, key=lambda e: e.position)
    before = [e for e in ends if e.position <= position]
    after = [e for e in ends if e.position > position]
    first = before[-1].index if before else -1
    last = after[0].index if after else len(chat) - 1
    begin = before[-1].position if before else 0
    # An end is a little early if one token holds the last letters and the text after them.
    stop = after[0].position + SPARE if after else len(prompt.tokens)
    text = str(tokenizer.decode(prompt.tokens[begin:stop].tolist()))
    at = len(str(tokenizer.decode(prompt.tokens[begin:position].tolist())))
    at += len(text[at:]) - len(text[at:].lstrip())  # a space is one token with the word after it
    between = range(first + 1, last) if first < last else ()
    pieces = list(_messages(text, chat, first, [*between, last]))
    if first < 0 or is_system(chat[first]):
        pieces += _tools(text, tools or ())
    return _nearest(sorted(pieces), at, first)


def _nearest(pieces: Sequence[_Occurrence], at: int, first: int) -> Location:
    inside = [p for p in pieces if p.start <= at < p.stop]
    if inside:
        return max(inside).place
    coming = next((p.place for p in pieces if p.start > at), None)
    past = next((p.place for p in reversed(pieces) if p.stop <= at), None)
    if coming is None or coming == past:
        return past or Location("template")
    if past is None and first < 0:
        return Location("template")
    if coming.message is None:
        return coming
    same = past is not None and past.message == coming.message
    return coming if same else Location("role", coming.message, coming.role)


def _messages(
    text: str, chat: Sequence[Message], past: int, coming: Sequence[int]
) -> Iterator[_Occurrence]:
    """Find the parts of the coming messages, and the calls that follow the text of the past one."""
    cursor = 0
    for i in ([past] if past >= 0 else []) + list(coming):
        message = chat[i]
        role = message["role"]
        if i != past:
            thinking: tuple[Field, str] = "reasoning_content", message.get(REASONING[0]) or ""
            content: tuple[Field, str] = "content", message["content"]
            for field, words in (thinking, content):
                words = words.strip()
                start = text.find(words, cursor) if words else -1
                if start >= 0:
                    cursor = start + len(words)
                    yield _Occurrence(start, cursor, Location(field, i, role))
        for call in message.get("tool_calls") or ():
            start, stop = _extent(text, cursor, _words_of(call.get("function")))
            if stop > start:
                cursor = stop
                yield _Occurrence(start, stop, Location("tool_calls", i, role))


def _tools(text: str, tools: Sequence[Any]) -> Iterator[_Occurrence]:
    for tool in tools:
        start, stop = _extent(text, 0, _words_of(tool))
        if stop > start:
            yield _Occurrence(start, stop, Location("tools"))


def _extent(text: str, cursor: int, words: list[str]) -> tuple[int, int]:
    """Give the span from the first of the words to the end of the last, as far as they are found in
    order."""
    start = stop = -1
    for word in words:
        found = text.find(word, max(cursor, start))
        if found >= 0:
            start = found if start < 0 else start
            stop = max(stop, found + len(word))
    return start, stop


def _words_of(value: Any) -> list[str]:
    """List the names and texts in a value, as JSON writes them."""
    if isinstance(value, Mapping):
        return [word for k, v in value.items() for word in (str(k), *_words_of(v))]
    if isinstance(value, (list, tuple)):
        return [word for each in value for word in _words_of(each)]
    if isinstance(value, str):
        return [json.dumps(value, ensure_ascii=False)[1:-1]] if value else []
    return [json.dumps(value)]

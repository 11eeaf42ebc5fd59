"""Convert chat messages from the spellings of clients to the form that templates read.

Nothing here imports a model library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rewarm.errors import InvalidPrompt
from rewarm.values import Message

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that clients and templates use for an answer's thinking. The first one that is set
counts."""

Call = dict[str, Any]
"""A tool call in OpenAI's shape."""


class Part(NamedTuple):
    """A piece of an answer that is of one kind. Every tool call is a part of its own."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""
    call: Call | None = None


class AnswerParts:
    """Parts of an answer, and their texts and calls by kind."""

    parts: Sequence[Part]

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.parts if part.kind == "text"])

    @property
    def reasoning(self) -> str:
        return "".join([part.text for part in self.parts if part.kind == "thinking"])

    @property
    def calls(self) -> list[Call]:
        return [part.call for part in self.parts if part.call is not None]

    def message(self) -> Message:
        """Make the canonical message of the assistant with all of the parts."""
        return assistant_message(self.text, self.reasoning, self.calls)


TEXT_PARTS = ("text", "input_text", "output_text")

SYSTEM_ROLES = ("system", "developer")


def normalised(messages: Sequence[Any]) -> list[Message]:
    """Give the canonical messages. Spellings that mean the same give the same messages. Raises
    InvalidPrompt."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidPrompt(f"a chat is a list of messages, not a {type(messages).__name__}")
    if not messages:
        raise InvalidPrompt("the chat is empty: it needs at least one message")
    return [_normalised(message, f"messages[{i}]") for i, message in enumerate(messages)]


def assistant_message(text: str, thinking: str = "", calls: Iterable[Call] = ()) -> Message:
    """Make the canonical message of the assistant. The arguments of its calls may be given as
    JSON."""
    message: Message = {"role": "assistant", "content": text}
    if thinking:
        message |= dict.fromkeys(REASONING, thinking)
    called = [_call(call) for call in calls]
    if called:
        message["tool_calls"] = called
    return message


def tool_message(text: str, call_id: str | None, name: str | None = None) -> Message:
    """Make the canonical message of a tool's result."""
    message: Message = {"role": "tool", "content": text}
    if call_id is not None:
        message["tool_call_id"] = call_id
    if name is not None:
        message["name"] = name
    return message


def is_system(message: Message) -> bool:
    return message["role"] in SYSTEM_ROLES


def leading_system(chat: Sequence[Message]) -> int:
    """Count the system messages at the beginning of a chat."""
    return next((i for i, message in enumerate(chat) if not is_system(message)), len(chat))


def _normalised(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidPrompt(
            f"{where} is a {type(message).__name__}: a message is an object with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f"{where}.role is {role!r}: give a role such as user or assistant")
    if role == "user" and message.get("content") is None:
        raise InvalidPrompt(f"{where}.content is missing: a message of the user needs a text")
    text = _text(message.get("content"), f"{where}.content")
    thinking = next((message[name] for name in REASONING if message.get(name)), "")
    if not isinstance(thinking, str):
        raise InvalidPrompt(f"{where}.reasoning_content is not a text")
    calls = message.get("tool_calls") or ()
    _check_calls(calls, f"{where}.tool_calls")
    more = {k: v for k, v in message.items() if k not in REASONING and k != "tool_calls"}
    return {**more, **assistant_message(text, thinking, calls), "role": role}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidPrompt(f"{where} is a {type(content).__name__}: give a text or text parts")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS:
            raise InvalidPrompt(f"{where}[{i}] is of type {kind!r}: this model reads text only")
        if not isinstance(part.get("text"), str):
            raise InvalidPrompt(f"{where}[{i}].text is missing or not a text")
        texts.append(part["text"])
    return "".join(texts)


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise InvalidPrompt(f"{where} is a {type(calls).__name__}: give a list of calls")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidPrompt(f"{where}[{i}] needs a function with a name")


def _call(call: Mapping[str, Any]) -> Call:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    """Give the arguments of a call as a mapping, which templates read. What is not the JSON of an
    object is given unchanged."""
    if given is None or given == "":
        return {}
    if not isinstance(given, str):
        return given
    try:
        parsed = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) else given


def system_for_developer(chat: list[Message]) -> list[Message]:
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in chat]


def one_system(chat: list[Message]) -> list[Message]:
    """Join the leading system and developer messages to one system message."""
    leading = leading_system(chat)
    if leading < 2:
        return chat
    text = "\n\n".join(m["content"] for m in chat[:leading] if m["content"])
    return [{**chat[0], "role": "system", "content": text}, *chat[leading:]]


def words_into_thinking(chat: list[Message]) -> list[Message]:
    """Move words before a tool call into the thinking: GPT-OSS takes only one of the two."""
    return [_words_into_thinking(m) for m in chat]


def _words_into_thinking(message: Message) -> Message:
    thinking = message.get(REASONING[0])
    if not (thinking and message["content"] and message.get("tool_calls")):
        return message
    joined = f"{thinking}\n\n{message['content']}"
    return {**message, **dict.fromkeys(REASONING, joined), "content": ""}


def rewordings(chat: list[Message]) -> Iterator[list[Message]]:
    """Give other forms of a chat, each for a template that refuses the form before.

    Each form changes only what such a template refuses, so that the rest is rendered as in earlier
    turns. To add one, write a function such as `one_system` and list it here."""
    for reworded in (words_into_thinking, system_for_developer, one_system):
        other = reworded(chat)
        if other != chat:
            chat = other
            yield chat

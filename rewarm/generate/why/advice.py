"""Find the habits of clients that break prompt caches, by comparing two chats.

For each pattern that is found, the chat without it is proposed. The caller renders that chat to
find how many tokens it saves, and drops a pattern that saves none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rewarm.prompt.chat import Chat
from rewarm.prompt.messages import REASONING, is_system
from rewarm.prompt.render.probes import tool_name
from rewarm.prompt.text import common_end, common_text
from rewarm.values import Message

from .miss import SHOWN, Location

BEFORE = 12
"""The characters that are shown of what both sides have before they differ."""
LEAST_OVERLAP = 2
"""The fewest messages in common for a history to count as trimmed at the front."""
ALIKE = 64
"""The characters that two system prompts must share after their difference."""


class Pattern:
    """A habit of clients that costs hits. A subclass says how a chat looks without it."""

    name: str
    title: str
    advice: str

    def without(self, sent: Chat, before: Chat) -> Chat:
        """Give a chat without the pattern, by comparing it with an earlier one."""
        raise NotImplementedError

    def shown(self, stored: Any, sent: Any) -> tuple[str, str]:
        """Cut the first two values that differ to the place where they begin to differ."""
        a, b = _text(stored), _text(sent)
        begin = max(0, common_text(a, b) - BEFORE)
        return a[begin : begin + SHOWN], b[begin : begin + SHOWN]


class Proposal(NamedTuple):
    """A chat without a pattern, and the first place where the pattern shows."""

    pattern: Pattern
    fixed: Chat
    place: Location
    stored: Any
    """The part of the chat without the pattern that is at this place."""
    sent: Any

    def told(self, tokens: int) -> dict[str, Any]:
        """Give the proposal in words and figures. Following it saves `tokens` tokens."""
        pattern, place = self.pattern, self.place
        stored, sent = pattern.shown(self.stored, self.sent)
        where = f" (message {place.message}, {place.role})" if place.role else ""
        return {
            "pattern": pattern.name,
            "tokens": tokens,
            "message": place.message,
            "role": place.role,
            "field": place.field,
            "stored": stored,
            "sent": sent,
            "text": f"{pattern.title}{where} costs {tokens:,} tokens per request. {pattern.advice}",
        }


def proposals(patterns: Iterable[Pattern], sent: Chat, before: Chat) -> Iterator[Proposal]:
    """Give a proposal for each pattern that a chat shows, compared with an earlier one."""
    for pattern in patterns:
        fixed = pattern.without(sent, before)
        for (place, mine), (_, other) in zip(_parts(sent), _parts(fixed), strict=False):
            if mine is not other and _json(mine) != _json(other):
                yield Proposal(pattern, fixed, place, other, mine)
                break


def _parts(chat: Chat) -> Iterator[tuple[Location, Any]]:
    """Give the tools of a chat, and the fields of its messages, with their places."""
    for tool in chat.tools or ():
        yield Location("tools"), tool
    for i, message in enumerate(chat.messages):
        role = message["role"]
        yield Location("content", i, role), message["content"]
        yield Location("tool_calls", i, role), message.get("tool_calls", ())
        yield Location("reasoning_content", i, role), message.get(REASONING[0], "")


class ToolOrder(Pattern):
    name = "tools_order"
    title = "Tools in another order"
    advice = "Send the tools in the same order every time: sort them by name."

    def without(self, sent: Chat, before: Chat) -> Chat:
        by_name = {tool_name(tool): tool for tool in sent.tools or ()}
        known = [tool_name(tool) for tool in before.tools or ()]
        if sorted(by_name) != sorted(known) or len(by_name) < len(sent.tools or ()):
            return sent
        return replace(sent, tools=[by_name[name] for name in known])

    def shown(self, stored: Any, sent: Any) -> tuple[str, str]:
        return tool_name(stored), tool_name(sent)


class JsonKeys(Pattern):
    """It shows in tools, in the arguments of calls, and in messages that are JSON as a whole."""

    name = "json_keys"
    title = "JSON with its keys in another order"
    advice = (
        "Write JSON with its keys in the same order every time: sort them, or keep the order of "
        "the first request."
    )

    def without(self, sent: Chat, before: Chat) -> Chat:
        tools = _in_order_of(sent.tools, before.tools)
        return replace(_each(_message_in_order_of, sent, before), tools=tools)


class ChangingValue(Pattern):
    """A value that differs between the same places of both chats."""

    values: re.Pattern[str]

    def without(self, sent: Chat, before: Chat) -> Chat:
        return _each(self._with_values_of, sent, before)

    def shown(self, stored: Any, sent: Any) -> tuple[str, str]:
        pairs = zip(self.values.findall(stored), self.values.findall(sent), strict=False)
        return next((pair for pair in pairs if pair[0] != pair[1]), super().shown(stored, sent))

    def _with_values_of(self, message: Message, other: Message) -> Message:
        theirs = iter(self.values.findall(other["content"]))
        content = self.values.sub(lambda mine: next(theirs, mine.group()), message["content"])
        return {**message, "content": content}


class Timestamp(ChangingValue):
    name = "timestamp"
    title = "A date or time that differs from request to request"
    advice = (
        "Move the date or time to the end of the prompt, such as into the last user message, or "
        "round it to what the model needs (a day)."
    )
    values = re.compile(
        r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
        r"|\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
        r"|\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b"
        r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
        r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:st|nd|rd|th)?"
        r"(?:,? \d{4})?\b"
        r"|\b\d{1,2}\.? (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?(?: \d{4})?\b"
        r"|\b1[5-9]\d{8}(?:\d{3}){0,2}(?:\.\d+)?\b"
    )


class RandomId(ChangingValue):
    name = "random_id"
    title = "An id that differs from request to request"
    advice = (
        "Leave the id out of the prompt, keep it the same for the whole conversation, or put it "
        "into the last user message."
    )
    values = re.compile(
        r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
        r"|\b(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{10,}\b"
        r"|\b\d{6,}\b"
    )


class Thoughts(Pattern):
    name = "thinking"
    title = "Thinking that was sent back once, and once not"
    advice = (
        "Send an answer back as it was delivered: with its reasoning_content where it had one, "
        "above all between a tool call and its result."
    )

    def without(self, sent: Chat, before: Chat) -> Chat:
        return _each(_with_thinking_of, sent, before)

    def shown(self, stored: Any, sent: Any) -> tuple[str, str]:
        return stored[:SHOWN], sent[:SHOWN]


class Trimmed(Pattern):
    """A history that has lost its beginning after the system prompt."""

    name = "trimmed_history"
    title = "A history that was cut off at the front"
    advice = (
        "Keep the beginning of the history. Where it must be shortened, do so rarely and by a "
        "large step, or replace it once by a summary."
    )

    def without(self, sent: Chat, before: Chat) -> Chat:
        begin = next((i for i, m in enumerate(sent.messages) if not is_system(m)), None)
        kept, whole = sent.messages[begin:], before.messages[begin:]
        mine, theirs = [_said(m) for m in kept], [_said(m) for m in whole]
        if begin is None or mine[0] in theirs[:1]:
            return sent
        least = min(LEAST_OVERLAP, len(mine))
        for dropped in range(1, len(theirs) - least + 1):
            if theirs[dropped : dropped + len(mine)] == mine[: len(theirs) - dropped]:
                return replace(sent, messages=[*sent.messages[:begin], *whole[:dropped], *kept])
        return sent

    def shown(self, stored: Any, sent: Any) -> tuple[str, str]:
        return _text(stored)[:SHOWN], _text(sent)[:SHOWN]


class SystemPrompt(Pattern):
    name = "system_prompt"
    title = "A system prompt that differs from request to request"
    advice = (
        "Keep one system prompt for all requests. Put what differs at its very end, or into the "
        "first user message."
    )

    def without(self, sent: Chat, before: Chat) -> Chat:
        mine, theirs = sent.messages[0], before.messages[0]
        if not is_system(mine) or not is_system(theirs):
            return sent
        following = zip(sent.messages[1:3], before.messages[1:3], strict=False)
        goes_on = len(sent.messages) > 2 and all(_said(a) == _said(b) for a, b in following)
        if common_end(mine["content"], theirs["content"]) < ALIKE and not goes_on:
            return sent  # another application, not another version of the same prompt
        fixed = {**mine, "content": theirs["content"]}
        return replace(sent, messages=[fixed, *sent.messages[1:]])


PATTERNS = (ToolOrder(), JsonKeys(), Timestamp(), RandomId(), Thoughts(), Trimmed(), SystemPrompt())
"""The patterns in the order in which they are looked for."""


def _each(change: Callable[[Message, Message], Message], sent: Chat, before: Chat) -> Chat:
    """Change each message that is in the same place of both chats, with the same role."""
    pairs = zip(sent.messages, before.messages, strict=False)
    changed = [change(m, other) if m["role"] == other["role"] else m for m, other in pairs]
    return replace(sent, messages=changed + sent.messages[len(changed) :])


def _said(message: Message) -> tuple[Any, ...]:
    """Give all that a message says, without the ids of its calls."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return message["role"], message["content"], message.get(REASONING[0]), _json(calls)


def _with_thinking_of(message: Message, other: Message) -> Message:
    bare = {k: v for k, v in message.items() if k not in REASONING}
    return bare | {k: v for k, v in other.items() if k in REASONING}


def _in_order_of(value: Any, other: Any) -> Any:
    """Put the keys of a value's objects in the order of another value. Its other keys come last."""
    if isinstance(value, dict) and isinstance(other, dict):
        keys = [k for k in other if k in value] + [k for k in value if k not in other]
        return {k: _in_order_of(value[k], other.get(k)) for k in keys}
    if isinstance(value, list) and isinstance(other, list):
        ordered = [_in_order_of(a, b) for a, b in zip(value, other, strict=False)]
        return ordered + value[len(ordered) :]
    return value


def _message_in_order_of(message: Message, other: Message) -> Message:
    fixed: Message = _in_order_of(message, other)
    mine, theirs = _parsed(message["content"]), _parsed(other["content"])
    if mine is not None and mine == theirs:
        fixed["content"] = other["content"]
    return fixed


def _parsed(text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)

"""Find the habits of clients that break prompt caches, by comparing two chats.

For each pattern that is found, the chat without it is proposed. The caller renders that chat to
find how many tokens it saves, and drops a pattern that saves none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rewarm.prompt.chat import Chat
from rewarm.prompt.messages import REASONING, is_system
from rewarm.values import Message

TIMES = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
    r"|\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
    r"|\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:st|nd|rd|th)?"
    r"(?:,? \d{4})?\b"
    r"|\b\d{1,2}\.? (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?(?: \d{4})?\b"
    r"|\b1[5-9]\d{8}(?:\d{3}){0,2}(?:\.\d+)?\b"
)
IDS = re.compile(
    r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|\b(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{10,}\b"
    r"|\b\d{6,}\b"
)
SHOWN = 60
"""The characters that are shown of each side."""
LEAST_OVERLAP = 2
"""The fewest messages in common for a history to count as trimmed at the front."""
ALIKE = 64
"""The characters that two system prompts must share after their difference."""


class Change(NamedTuple):
    """A chat without a pattern, and the first place where the pattern occurs."""

    fixed: Chat
    field: str
    message: int | None = None
    role: str | None = None
    stored: str = ""
    sent: str = ""


class Pattern(NamedTuple):
    """A habit of clients that costs hits."""

    name: str
    title: str
    advice: str
    look: Callable[[Chat, Chat], Change | None]
    """Finds the pattern in a chat, given an earlier one."""


class Proposal(NamedTuple):
    """A pattern that a chat shows, and the chat without it."""

    pattern: Pattern
    change: Change

    def told(self, tokens: int) -> dict[str, Any]:
        """Give the proposal in words and figures. Following it saves `tokens` tokens."""
        pattern, change = self
        where = f" (message {change.message}, {change.role})" if change.role else ""
        return {
            "pattern": pattern.name,
            "tokens": tokens,
            "message": change.message,
            "role": change.role,
            "field": change.field,
            "stored": change.stored,
            "sent": change.sent,
            "text": f"{pattern.title}{where} costs {tokens:,} tokens per request. {pattern.advice}",
        }


def proposals(now: Chat, before: Chat) -> Iterator[Proposal]:
    """Give a proposal for each pattern that the two chats show."""
    for pattern in PATTERNS:
        change = pattern.look(now, before)
        if change is not None:
            yield Proposal(pattern, change)


def _tools_order(now: Chat, before: Chat) -> Change | None:
    names, known = ([_name(t) for t in chat.tools or ()] for chat in (now, before))
    if names == known or sorted(names) != sorted(known) or len(set(names)) < len(names):
        return None
    by_name = dict(zip(names, now.tools or (), strict=True))
    fixed = replace(now, tools=[by_name[name] for name in known])
    i = _first(names, known)
    return Change(fixed, "tools", stored=known[i], sent=names[i])


def _json_keys(now: Chat, before: Chat) -> Change | None:
    """Compare tools, the arguments of calls, and messages that are JSON as a whole."""
    sent, known = now.tools or [], before.tools or []
    tools = [_in_order_of(a, b) for a, b in zip(sent, known, strict=False)]
    tools += sent[len(tools) :]
    pairs = list(zip(now.messages, before.messages, strict=False))
    messages = [_message_in_order_of(message, other) for message, other in pairs]
    messages += now.messages[len(messages) :]
    fixed = replace(now, messages=messages, tools=tools or None)
    for tool, other, ordered in zip(sent, known, tools, strict=False):
        if _differ(tool, ordered):
            return Change(fixed, "tools", None, None, *_apart(other, tool))
    for i, (message, before_it) in enumerate(pairs):
        for key in ("tool_calls", "content"):
            if _differ(message.get(key), messages[i].get(key)):
                texts = (
                    v if isinstance(v, str) else _json(v) for v in (before_it[key], message[key])
                )
                return Change(fixed, key, i, message["role"], *_apart(*texts))
    return None


Changed = tuple[Message, str, str]
"""A message without the pattern, what the earlier chat has there, and what this one has instead."""


def _message_by_message(
    field: str,
    change: Callable[[Message, Message], Changed | None],
    now: Chat,
    before: Chat,
) -> Change | None:
    """Find a pattern that shows between two messages in the same place of both chats."""
    messages = list(now.messages)
    first: Change | None = None
    for i, (message, other) in enumerate(zip(now.messages, before.messages, strict=False)):
        role = message["role"]
        changed = change(message, other) if role == other["role"] else None
        if changed is not None:
            messages[i], stored, sent = changed
            first = first or Change(now, field, i, role, stored, sent)
    return first and first._replace(fixed=replace(now, messages=messages))


def _other_values(expression: re.Pattern[str], now: Chat, before: Chat) -> Change | None:
    """Find a value that differs between the same places of both chats."""

    def change(message: Message, other: Message) -> Changed | None:
        content, pair = _with_values_of(expression, message["content"], other["content"])
        return ({**message, "content": content}, *pair) if pair is not None else None

    return _message_by_message("content", change, now, before)


def _without_thinking(message: Message, other: Message) -> Changed | None:
    mine, theirs = message.get(REASONING[0], ""), other.get(REASONING[0], "")
    if mine == theirs or message["role"] != "assistant":
        return None
    bare = {k: v for k, v in message.items() if k not in REASONING}
    fixed = {**bare, **(dict.fromkeys(REASONING, theirs) if theirs else {})}
    return fixed, theirs[:SHOWN], mine[:SHOWN]


def _trimmed(now: Chat, before: Chat) -> Change | None:
    """Find a history that has lost its beginning after the system prompt."""
    begin = next((i for i, m in enumerate(now.messages) if not is_system(m)), len(now.messages))
    kept, whole = list(now.messages[begin:]), list(before.messages[begin:])
    if not kept or (whole and same(kept[0], whole[0])):
        return None
    for dropped in range(1, len(whole)):
        overlap = min(len(whole) - dropped, len(kept))
        if overlap < min(LEAST_OVERLAP, len(kept)):
            return None
        if all(map(same, kept[:overlap], whole[dropped : dropped + overlap])):
            fixed = [*now.messages[:begin], *whole[:dropped], *kept]
            return Change(
                replace(now, messages=fixed),
                "content",
                begin,
                kept[0]["role"],
                whole[0]["content"][:SHOWN],
                kept[0]["content"][:SHOWN],
            )
    return None


def _system_prompt(now: Chat, before: Chat) -> Change | None:
    if not now.messages or not before.messages or not is_system(now.messages[0]):
        return None
    mine, theirs = now.messages[0]["content"], before.messages[0]["content"]
    if not is_system(before.messages[0]) or mine == theirs:
        return None
    alike = _common_end(mine, theirs)
    goes_on = len(now.messages) > 2 and all(map(same, now.messages[1:3], before.messages[1:3]))
    if alike < ALIKE and not goes_on:
        return None  # another application, not another version of the same prompt
    stored, sent = _apart(theirs, mine)
    fixed = [{**now.messages[0], "content": theirs}, *now.messages[1:]]
    role = now.messages[0]["role"]
    return Change(replace(now, messages=fixed), "content", 0, role, stored, sent)


PATTERNS = (
    Pattern(
        "tools_order",
        "Tools in another order",
        "Send the tools in the same order every time: sort them by name.",
        _tools_order,
    ),
    Pattern(
        "json_keys",
        "JSON with its keys in another order",
        "Write JSON with its keys in the same order every time: sort them, or keep the order of "
        "the first request.",
        _json_keys,
    ),
    Pattern(
        "timestamp",
        "A date or time that differs from request to request",
        "Move the date or time to the end of the prompt, such as into the last user message, or "
        "round it to what the model needs (a day).",
        partial(_other_values, TIMES),
    ),
    Pattern(
        "random_id",
        "An id that differs from request to request",
        "Leave the id out of the prompt, keep it the same for the whole conversation, or put it "
        "into the last user message.",
        partial(_other_values, IDS),
    ),
    Pattern(
        "thinking",
        "Thinking that was sent back once, and once not",
        "Send an answer back as it was delivered: with its reasoning_content where it had one, "
        "above all between a tool call and its result.",
        partial(_message_by_message, "reasoning_content", _without_thinking),
    ),
    Pattern(
        "trimmed_history",
        "A history that was cut off at the front",
        "Keep the beginning of the history. Where it must be shortened, do so rarely and by a "
        "large step, or replace it once by a summary.",
        _trimmed,
    ),
    Pattern(
        "system_prompt",
        "A system prompt that differs from request to request",
        "Keep one system prompt for all requests. Put what differs at its very end, or into the "
        "first user message.",
        _system_prompt,
    ),
)
"""The patterns in the order in which they are looked for."""


def same(a: Message, b: Message) -> bool:
    """Say whether two messages are the same but for the ids of their calls."""
    return _said(a) == _said(b)


def _said(message: Message) -> tuple[Any, ...]:
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return message["role"], message["content"], message.get(REASONING[0]), _json(calls)


def _with_values_of(
    expression: re.Pattern[str], text: str, other: str
) -> tuple[str, tuple[str, str] | None]:
    """Replace each value of a text that differs from the value in the same place of the other text.

    Returns the new text, and the first such pair."""
    theirs = [m.group() for m in expression.finditer(other)]
    first: tuple[str, str] | None = None
    parts: list[str] = []
    at = 0
    for match, value in zip(expression.finditer(text), theirs, strict=False):
        if match.group() != value:
            first = first or (value, match.group())
            parts += [text[at : match.start()], value]
            at = match.end()
    return "".join([*parts, text[at:]]), first


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
    fixed = dict(message)
    if message.get("tool_calls") and other.get("tool_calls"):
        fixed["tool_calls"] = _in_order_of(message["tool_calls"], other["tool_calls"])
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


def _differ(a: Any, b: Any) -> bool:
    return _json(a) != _json(b)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    return str((function or tool).get("name", "")) if isinstance(tool, dict) else ""


def _first(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _common_end(a: str, b: str) -> int:
    n = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        n += 1
    return n


def _apart(stored: Any, sent: Any) -> tuple[str, str]:
    """Cut two values, as texts, to the place where they begin to differ, with a little before."""
    a, b = (value if isinstance(value, str) else _json(value) for value in (stored, sent))
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    begin = max(0, at - 12)
    return a[begin : begin + SHOWN], b[begin : begin + SHOWN]

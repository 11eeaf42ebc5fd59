"""Known ways in which clients break prompt caches, told from two chats.

Each pattern proposes the chat as it would be without it. How much that would save is for whoever
can render it to say: a pattern that saves nothing is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rewarm.prompt.messages import REASONING, is_system
from rewarm.values import Message

Pattern = Literal[
    "timestamp",
    "random_id",
    "tools_order",
    "json_keys",
    "trimmed_history",
    "thinking",
    "system_prompt",
]

ADVICE: dict[Pattern, str] = {
    "timestamp": "Move the date or time to the end of the prompt, such as into the last user "
    "message, or round it to what the model needs (a day).",
    "random_id": "Leave the id out of the prompt, keep it the same for the whole conversation, or "
    "put it into the last user message.",
    "tools_order": "Send the tools in the same order every time: sort them by name.",
    "json_keys": "Write JSON with its keys in the same order every time: sort them, or keep the "
    "order of the first request.",
    "trimmed_history": "Keep the beginning of the history. Where it must be shortened, do so "
    "rarely and by a large step, or replace it once by a summary.",
    "thinking": "Send an answer back as it was delivered: with its reasoning_content where it had "
    "one, above all between a tool call and its result.",
    "system_prompt": "Keep one system prompt for all requests. Put what differs at its very end, "
    "or into the first user message.",
}

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
LEAST_OVERLAP = 2
"""Messages that must go on as before for a history to count as trimmed at the front."""
ALIKE = 64
"""Characters that two system prompts must share beyond their difference."""


@dataclass(frozen=True)
class Told:
    """A chat as it was told: normalised messages, and tools."""

    messages: Sequence[Message]
    tools: Sequence[Any] = ()


@dataclass(frozen=True)
class Proposal:
    """The chat without the pattern, and where the pattern first is."""

    pattern: Pattern
    fixed: Told
    field: str
    message: int | None = None
    role: str | None = None
    stored: str = ""
    sent: str = ""

    @property
    def advice(self) -> str:
        return ADVICE[self.pattern]


def proposals(now: Told, before: Told) -> list[Proposal]:
    """One for each pattern that the two chats show."""
    found = (look(now, before) for look in LOOKS)
    return [proposal for proposal in found if proposal is not None]


def _tools_order(now: Told, before: Told) -> Proposal | None:
    names, known = ([_name(t) for t in told.tools] for told in (now, before))
    if names == known or sorted(names) != sorted(known) or len(set(names)) < len(names):
        return None
    by_name = dict(zip(names, now.tools, strict=True))
    fixed = replace(now, tools=[by_name[name] for name in known])
    i = _first(names, known)
    return Proposal("tools_order", fixed, "tools", stored=known[i], sent=names[i])


def _json_keys(now: Told, before: Told) -> Proposal | None:
    """In tools, in the arguments of calls, and in messages that are JSON as a whole."""
    tools = [_in_order_of(a, b) for a, b in zip(now.tools, before.tools, strict=False)]
    tools += now.tools[len(tools) :]
    messages = []
    place: tuple[str, int | None, str | None] | None = None
    pair: tuple[Any, Any] | None = None
    i = next(
        (i for i, (a, b) in enumerate(zip(tools, now.tools, strict=True)) if _differ(a, b)), -1
    )
    if i >= 0:
        place, pair = ("tools", None, None), (before.tools[i], now.tools[i])
    for i, (message, other) in enumerate(zip(now.messages, before.messages, strict=False)):
        fixed = _message_in_order_of(message, other)
        changed = next((k for k in ("tool_calls", "content") if _differ_in(fixed, message, k)), "")
        if changed and place is None:
            place, pair = (changed, i, message["role"]), (other[changed], message[changed])
        messages.append(fixed)
    messages += now.messages[len(messages) :]
    if place is None or pair is None:
        return None
    stored, sent = _apart(*(p if isinstance(p, str) else _json(p) for p in pair))
    return Proposal("json_keys", Told(messages, tools), *place, stored, sent)


def _masked(
    pattern: Pattern, expression: re.Pattern[str]
) -> Callable[[Told, Told], Proposal | None]:
    """Something that stands in the same place of both chats, each time with another value."""

    def look(now: Told, before: Told) -> Proposal | None:
        messages: list[Message] = []
        first: tuple[int, str, str] | None = None
        for i, (message, other) in enumerate(zip(now.messages, before.messages, strict=False)):
            content, pair = _with_values_of(expression, message["content"], other["content"])
            if pair is not None and message["role"] == other["role"]:
                message = {**message, "content": content}
                first = first or (i, *pair)
            messages.append(message)
        if first is None:
            return None
        messages += now.messages[len(messages) :]
        i, stored, sent = first
        role = now.messages[i]["role"]
        return Proposal(pattern, Told(messages, now.tools), "content", i, role, stored, sent)

    return look


def _thinking(now: Told, before: Told) -> Proposal | None:
    messages: list[Message] = []
    first: tuple[int, str, str] | None = None
    for i, (message, other) in enumerate(zip(now.messages, before.messages, strict=False)):
        mine, theirs = message.get(REASONING[0], ""), other.get(REASONING[0], "")
        if mine != theirs and message["role"] == other["role"] == "assistant":
            bare = {k: v for k, v in message.items() if k not in REASONING}
            message = {**bare, **(dict.fromkeys(REASONING, theirs) if theirs else {})}
            first = first or (i, theirs, mine)
        messages.append(message)
    if first is None:
        return None
    messages += now.messages[len(messages) :]
    i, stored, sent = first
    fixed = Told(messages, now.tools)
    return Proposal(
        "thinking", fixed, "reasoning_content", i, "assistant", stored[:SHOWN], sent[:SHOWN]
    )


def _trimmed(now: Told, before: Told) -> Proposal | None:
    """What follows the system prompt is the earlier history without its beginning."""
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
            return Proposal(
                "trimmed_history",
                replace(now, messages=fixed),
                "content",
                begin,
                kept[0]["role"],
                whole[0]["content"][:SHOWN],
                kept[0]["content"][:SHOWN],
            )
    return None


def _system_prompt(now: Told, before: Told) -> Proposal | None:
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
    return Proposal("system_prompt", replace(now, messages=fixed), "content", 0, role, stored, sent)


LOOKS: tuple[Callable[[Told, Told], Proposal | None], ...] = (
    _tools_order,
    _json_keys,
    _masked("timestamp", TIMES),
    _masked("random_id", IDS),
    _thinking,
    _trimmed,
    _system_prompt,
)


def same(a: Message, b: Message) -> bool:
    """Whether two messages say the same. Ids of calls are the client's own."""
    return _said(a) == _said(b)


def _said(message: Message) -> tuple[Any, ...]:
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return message["role"], message["content"], message.get(REASONING[0]), _json(calls)


def _with_values_of(
    expression: re.Pattern[str], text: str, other: str
) -> tuple[str, tuple[str, str] | None]:
    """A text with each value that differs from the other text's in the same place replaced by
    that, and the first such pair."""
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
    """A value with the keys of its objects in another's order; what only one has comes last."""
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


def _differ_in(a: Message, b: Message, key: str) -> bool:
    return _differ(a.get(key), b.get(key))


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


def _apart(a: str, b: str) -> tuple[str, str]:
    """Two texts from where they part, with a little of what stands before."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    begin = max(0, at - 12)
    return a[begin : begin + SHOWN], b[begin : begin + SHOWN]

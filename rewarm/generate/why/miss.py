"""Put a miss in words and figures, for the field `rewarm.miss` of a reply: its reason, and for a
difference its place in the chat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rewarm.prompt.chat import Chat
from rewarm.prompt.messages import REASONING, is_system
from rewarm.prompt.render.renderer import Prompt
from rewarm.values import Miss, Missing, Reason, Tokens

Field = Literal[
    "content", "reasoning_content", "tool_calls", "tools", "role", "template", "generation"
]
SPARE = 8
"""The tokens that are read beyond a message's end."""
SHOWN = 60
"""The most characters that are shown of each side of a difference."""
AROUND = 24
"""The tokens that are shown on each side of a difference."""

WHY: dict[Missing | None, str] = {
    "never_taken": "no checkpoint was taken between them",
    "evicted": "the checkpoint there was evicted",
    "other_origin": "what lies between was generated, and only the end of an answer is kept",
}

TEXTS: dict[Reason, str] = {
    "cold": "Nothing that begins like this prompt is known.",
    "diverged": "It differs from what is stored at token {shared:,}{where}.",
    "no_checkpoint": "{shared:,} tokens are known, but the model can go on from {resume:,} only: "
    "{because}. {lost} are computed again.",
    "evicted": "{held:,} tokens of it were held and had to go. {lost} are computed again.",
    "salt": "Under another salt {held:,} tokens of it could be reused; salts share nothing.",
    "other_model": "{held:,} tokens of it, at least, are on disk, but of another model or in "
    "another form.",
    "exact_mode": "In exact mode only whole chunks are reused. {lost} are computed again.",
    "disabled": "This model's caches cannot be captured: reuse is off.",
    "failed": "What was stored could not be restored; it is computed again.",
}

WHERE = {
    None: "",
    "generation": ", where the answer begins",
    "tools": ", in the tools",
    "template": ", in the words of the chat template",
}


class Location(NamedTuple):
    """A part of a chat. `message` is None for what belongs to no message: tools, the template's own
    words, and the place where the answer begins."""

    field: Field
    message: int | None = None
    role: str | None = None


class _Occurrence(NamedTuple):
    start: int
    stop: int
    place: Location


def described(miss: Miss, prompt: Prompt, tokenizer: Any, chat: Chat | None) -> dict[str, Any]:
    """Describe a miss for a reply. `chat` is None for plain text."""
    body: dict[str, Any] = {
        "reason": miss.reason,
        "shared": miss.shared,
        "resume": miss.resume,
        "tokens": len(prompt.tokens) - miss.resume,
    }
    if miss.reason == "diverged":
        body |= _difference(miss, prompt, tokenizer, chat)
    elif miss.reason == "no_checkpoint":
        body |= {"tokens": miss.shared - miss.resume, "why": miss.why}
    elif miss.reason == "exact_mode":
        body["tokens"] = miss.shared - miss.resume
    elif miss.reason in ("evicted", "salt", "other_model"):
        body |= {"tokens": miss.held - miss.resume, "held": miss.held}
    because, where, lost = WHY.get(miss.why), _where(body), f"{body['tokens']:,} tokens"
    body["text"] = TEXTS[miss.reason].format(**body, because=because, where=where, lost=lost)
    return body


def _difference(miss: Miss, prompt: Prompt, tokenizer: Any, chat: Chat | None) -> dict[str, Any]:
    at, tokens = miss.shared, prompt.tokens
    stored = _words(tokenizer, miss.other[:AROUND])[:SHOWN]
    sent = _words(tokenizer, tokens[at : at + AROUND])[:SHOWN]
    place = None
    if chat is not None:
        place = locate(tokenizer, prompt, chat, at)
        mark = tokenizer.think_start
        if place.role == "assistant" and mark:
            # Only one of the two sides begins to think.
            thinking = [side.lstrip().startswith(mark) for side in (stored, sent)]
            if thinking[0] != thinking[1]:
                place = place._replace(field="reasoning_content")
    return {
        "position": at,
        "tokens": len(tokens) - at,
        **{name: getattr(place, name, None) for name in ("message", "role", "field")},
        "before": _words(tokenizer, tokens[max(0, at - AROUND) : at])[-SHOWN:],
        "stored": stored,
        "sent": sent,
    }


def _words(tokenizer: Any, tokens: Tokens) -> str:
    """Decode tokens, without characters at the ends that are cut in two."""
    return str(tokenizer.decode(tokens.tolist())).strip("\ufffd") if len(tokens) else ""


def _where(body: dict[str, Any]) -> str:
    field = body.get("field")
    if field in WHERE:
        return WHERE[field]
    if body["message"] is None:
        return f", in the {field} of the answer"
    return f", in the {field} of message {body['message']} ({body['role']})"


def locate(tokenizer: Any, prompt: Prompt, chat: Chat, position: int) -> Location:
    """Look for the texts of the messages in the prompt's text, between the two nearest message
    ends."""
    if position >= prompt.generation and prompt.generation:
        return Location("generation", role="assistant")
    # They are not always in the order of the messages: a template may move the system prompt.
    ends = {-1: 0, **prompt.ends}
    in_order = sorted(ends, key=lambda message: ends[message])
    past = [message for message in in_order if ends[message] <= position][-1]
    after = (message for message in in_order if ends[message] > position)
    coming = next(after, len(chat.messages) - 1)
    begin = ends[past]
    # An end is a little early if one token holds the last letters and the text after them.
    stop = min((end for end in ends.values() if end > position), default=len(prompt.tokens)) + SPARE
    text = str(tokenizer.decode(prompt.tokens[begin:stop].tolist()))
    at = len(str(tokenizer.decode(prompt.tokens[begin:position].tolist())))
    at += len(text[at:]) - len(text[at:].lstrip())  # a space is one token with the word after it
    pieces = _found(text, _parts(chat, past, coming))
    return _nearest(sorted(pieces), at, past)


def _nearest(pieces: Sequence[_Occurrence], at: int, past: int) -> Location:
    inside = [p for p in pieces if p.start <= at < p.stop]
    if inside:
        return max(inside).place
    before = next((p.place for p in reversed(pieces) if p.stop <= at), Location("template"))
    after = next((p.place for p in pieces if p.start > at), before)
    if after == before or (before.field == "template" and past < 0):
        return before
    if after.message in (None, before.message):
        return after
    return Location("role", after.message, after.role)


def _parts(chat: Chat, past: int, coming: int) -> Iterator[tuple[Location, list[str]]]:
    """Give the words of what may follow the text of the past message, up to the coming one."""
    known = [past] if past >= 0 else []
    for i in (*known, *range(past + 1, coming), coming):
        message, role = chat.messages[i], chat.messages[i]["role"]
        if i != past:
            thinking = message.get(REASONING[0], "")
            yield Location("reasoning_content", i, role), [thinking.strip()]
            yield Location("content", i, role), [message["content"].strip()]
        for call in message.get("tool_calls", ()):
            yield Location("tool_calls", i, role), _words_of(call.get("function"))
    if past < 0 or is_system(chat.messages[past]):
        for tool in chat.tools or ():
            yield Location("tools"), _words_of(tool)


def _found(text: str, parts: Iterable[tuple[Location, list[str]]]) -> Iterator[_Occurrence]:
    """Look for the messages in their order, and for each tool anywhere."""
    cursor = 0
    for place, words in parts:
        start, stop = _extent(text, 0 if place.field == "tools" else cursor, words)
        if stop > start:
            cursor = stop
            yield _Occurrence(start, stop, place)


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

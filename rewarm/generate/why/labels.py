"""Label a span of tokens with the role and the first words of its message.

A *head* is what a template writes before a role's text. Heads are learned by rendering a few chats,
and then looked for in the tokens. No template's markers are known here. Where heads cannot be
learned, or encode differently inside a chat, spans have words and no role."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from rewarm.cache.tree import WIDTH, encode
from rewarm.errors import RewarmError
from rewarm.prompt.render.renderer import ChatRenderer
from rewarm.prompt.text import common_text
from rewarm.values import Message

log = logging.getLogger("rewarm")

WORDS = 40
"""The tokens that are decoded for a label."""
LONGEST = 90
"""The most characters of a label."""

CALL = {"id": "call_1", "type": "function", "function": {"name": "qj", "arguments": {}}}


class MessageStart(NamedTuple):
    """A message whose text begins within a span or at its end; positions in tokens of the span."""

    text: int
    head: int
    """The beginning of its head; below 0 where that is in the span before."""
    role: str


@dataclass(frozen=True)
class Label:
    role: str | None
    text: str
    messages: int
    """The number of messages that begin in the span; 0 for a part of one that began before."""


class Labels:
    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer

    @cached_property
    def heads(self) -> dict[str, bytes]:
        """The tokens of each role's head."""
        try:
            found = self._learned()
        except Exception:
            log.debug("the roles of this template cannot be told", exc_info=True)
            found = {}
        keys = {role: self._key(text) for role, text in found.items()}
        return {role: key for role, key in keys.items() if key}

    @cached_property
    def _markers(self) -> list[str]:
        """Texts that a label leaves out: cut characters, and the edges of thinking."""
        tokenizer = self.renderer.tokenizer
        edges = [tokenizer.think_start, tokenizer.think_end] if tokenizer.has_thinking else []
        return ["\ufffd", *filter(None, edges)]

    @cached_property
    def longest(self) -> int:
        """The bytes of the longest head."""
        return max(map(len, self.heads.values()), default=0)

    def starts(self, key: bytes, before: bytes = b"") -> list[MessageStart]:
        """Find the messages that begin in a span. `before` is the end of the span before it, which
        holds the head if all messages that follow have the same one."""
        found: dict[int, MessageStart] = {}
        shift = len(before) // WIDTH
        for role, head in self.heads.items():
            for place in _places(before + key, head):
                at = place // WIDTH - shift
                start = MessageStart(at + len(head) // WIDTH, at, role)
                # One role's head may begin with another's.
                if at not in found or start.text > found[at].text:
                    found[at] = start
        return sorted(m for m in found.values() if 0 <= m.text <= len(key) // WIDTH)

    def label(self, key: bytes, starts: list[MessageStart], before: str | None) -> Label:
        """Label a span. `before` is the role of the message that the span continues."""
        end = len(key) // WIDTH
        heads = [start.head for start in starts] + [end]
        begun = [start for start in starts if start.text < end]
        if begun and (before is None or not self._words(key, 0, max(heads[0], 0))):
            return Label(begun[0].role, self._words(key, begun[0].text, heads[1]), len(begun))
        words = self._words(key, 0, max(heads[0], 0))
        return Label(before, f"… {words}" if words else "", len(begun))

    def _words(self, key: bytes, start: int, stop: int) -> str:
        shown = min(stop, start + WORDS)
        tokens = np.frombuffer(key[start * WIDTH : shown * WIDTH], "<i4").tolist()
        text: str = self.renderer.tokenizer.decode(tokens, skip_special_tokens=True)
        for marker in self._markers:
            text = text.replace(marker, " ")
        line = " ".join(text.split())
        cut = shown < stop
        if len(line) > LONGEST:
            line, cut = line[:LONGEST].rsplit(" ", 1)[0], True
        return f"{line} …" if line and cut else line

    def _key(self, head: str) -> bytes:
        tokens = self.renderer.tokenizer.encode(head, add_special_tokens=False)
        return encode(np.asarray(tokens, dtype=np.int32))

    def _learned(self) -> dict[str, str]:
        """Render chats, and find the texts before messages of each role."""
        heads: dict[str, str] = {}
        users = [
            self._before([_said("user")], 0),
            self._before([_said("system"), _said("user")], 1),
            self._before([_said("user"), _said("assistant"), _said("user", "zq")], 2),
        ]
        user = _common_end(text for text in users if text is not None)
        heads["user"] = user
        opening = self._first_token(user)
        for role, chat in (
            ("system", [_said("system"), _said("user")]),
            ("assistant", [_said("user"), _said("assistant"), _said("user", "zq")]),
            ("tool", [_said("user"), _called(), _answered(), _said("user", "zq")]),
        ):
            index = next(i for i, m in enumerate(chat) if m["role"] == role)
            text = self._before(chat, index)
            if text is None:
                continue
            # The end of the message before does not belong to the head.
            cut = text.rfind(opening) if opening else -1
            heads[role] = text[cut:] if cut >= 0 else text
        stripped = {role: text.rstrip() for role, text in heads.items()}
        return {r: text for r, text in stripped.items() if text and heads[r].count(text) == 1}

    def _first_token(self, text: str) -> str:
        tokens = self.renderer.tokenizer.encode(text, add_special_tokens=False)
        first: str = self.renderer.tokenizer.decode(tokens[:1]) if tokens else ""
        return first if text.startswith(first) else ""

    def _before(self, chat: list[Message], index: int) -> str | None:
        """Give the text between a message's content and the content before it."""
        try:
            prompt = self.renderer.render(chat)
        except RewarmError:
            return None  # refused by the template
        text: str = self.renderer.tokenizer.decode(prompt.tokens.tolist())
        at, start = -1, 0
        for message in chat[: index + 1]:
            start = max(at, 0) + (len(message["content"]) if at >= 0 else 0)
            at, before = text.find(message["content"], start), at
            if at < 0:
                return None
            start = 0 if before < 0 else start
        return text[start:at]


def _said(role: str, text: str = "qz") -> Message:
    return {"role": role, "content": {"user": "xk", "system": "vj"}.get(role, "wq") + text}


def _called() -> Message:
    return {"role": "assistant", "content": "wqqz", "tool_calls": [CALL]}


def _answered() -> Message:
    return {"role": "tool", "content": "jvqz", "tool_call_id": "call_1", "name": "qj"}


def _common_end(texts: Iterable[str]) -> str:
    return reduce(lambda a, b: a[len(a) - common_text(a[::-1], b[::-1]) :], texts)


def _places(key: bytes, head: bytes) -> Iterable[int]:
    at = key.find(head)
    while at >= 0:
        if at % WIDTH == 0:
            yield at
        at = key.find(head, at + 1)

"""Label a span of tokens with the role and the first words of its message.

A *head* is what a template writes before a role's text. Heads are learned by rendering a few chats,
and then looked for in the tokens. No template's markers are known here. Where heads cannot be
learned, or encode differently inside a chat, spans have words and no role."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from rewarm.cache.tree import WIDTH, encode
from rewarm.errors import RewarmError
from rewarm.prompt.render.renderer import ChatRenderer
from rewarm.prompt.text import common_end
from rewarm.values import Message

log = logging.getLogger("rewarm")

WORDS = 40
"""The tokens that are decoded for a label."""
LONGEST = 90
"""The most characters of a label."""

# Texts that templates do not write themselves.
SYSTEM: Message = {"role": "system", "content": "vjqz"}
USER: Message = {"role": "user", "content": "xkqz"}
ANSWER: Message = {"role": "assistant", "content": "wqqz"}
NEXT: Message = {"role": "user", "content": "xkzq"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "qj", "arguments": {}}}
CALLED: Message = {**ANSWER, "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "content": "jvqz", "tool_call_id": "call_1", "name": "qj"}

CHATS = ([USER], [SYSTEM, USER], [USER, ANSWER, NEXT], [USER, CALLED, RESULT])
"""The chats that heads are learned from."""


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
            return {role: self._key(text) for role, text in self._learned().items()}
        except Exception:
            log.debug("the roles of this template cannot be told", exc_info=True)
            return {}

    @cached_property
    def _markers(self) -> list[str]:
        """Texts that a label leaves out: cut characters, and the edges of thinking."""
        tokenizer = self.renderer.tokenizer
        return [m for m in ("\ufffd", tokenizer.think_start, tokenizer.think_end) if m]

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
        words = self._words(key, 0, max(heads[0], 0))
        if begun and (before is None or not words):
            return Label(begun[0].role, self._words(key, begun[0].text, heads[1]), len(begun))
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
        learned = [self._texts_before(chat) for chat in CHATS]
        heads: dict[str, str] = {}
        for texts in learned:
            heads |= {role: text for role, text in texts.items() if role not in heads}
        user = heads["user"] = reduce(_common_end, [texts["user"] for texts in learned if texts])
        first = self.renderer.tokenizer.encode(user, add_special_tokens=False)[:1]
        opening = self.renderer.tokenizer.decode(first)
        for role, text in heads.items():
            # The end of the message before does not belong to the head.
            if role != "user" and opening and user.startswith(opening) and opening in text:
                heads[role] = text[text.rindex(opening) :]
        return {role: text.rstrip() for role, text in heads.items() if text.strip()}

    def _texts_before(self, chat: list[Message]) -> dict[str, str]:
        """Give the text before each message's content, after the content before it, by role. The
        last message of a role counts."""
        try:
            prompt = self.renderer.render(chat)
        except RewarmError:
            return {}  # refused by the template
        text: str = self.renderer.tokenizer.decode(prompt.tokens.tolist())
        found = re.match("".join(f"(.*?){m['content']}" for m in chat), text, re.DOTALL)
        texts = found.groups() if found else ()
        return dict(zip((m["role"] for m in chat), texts, strict=False))


def _common_end(a: str, b: str) -> str:
    return a[len(a) - common_end(a, b) :]


def _places(key: bytes, head: bytes) -> Iterable[int]:
    at = key.find(head)
    while at >= 0:
        if at % WIDTH == 0:
            yield at
        at = key.find(head, at + 1)

"""Keep the last chats, to compare new ones of the same tenant with them. Their number and size are
bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rewarm.prompt.chat import Chat
from rewarm.prompt.text import common_tokens
from rewarm.values import Message, Tokens

MOST = 256
"""The most chats that are kept."""
MOST_TOKENS = 2_000_000
"""The most tokens of all their prompts; their texts take a few bytes a token."""


@dataclass(frozen=True, eq=False)
class RecentChat:
    """A chat that was answered."""

    id: str
    salt: str | None
    chat: Chat
    """The chat, which ends with its answer if there was one complete answer."""
    tokens: Tokens
    generation: int
    at: float = field(default_factory=time.time)

    def overlap(self, messages: Sequence[Message]) -> int:
        """Count the characters of the messages that both chats have, at any position."""
        own = {(m["role"], m["content"]) for m in self.chat.messages}
        return sum(len(m["content"]) for m in messages if (m["role"], m["content"]) in own)


class RecentChats:
    """The last chats that were answered. Safe to use from several threads."""

    def __init__(self, most: int = MOST, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self._most_tokens = most, most_tokens
        self._chats: list[RecentChat] = []
        self._tokens = 0
        self._lock = threading.Lock()

    def add(self, chat: RecentChat) -> None:
        with self._lock:
            # A later turn of a conversation contains the earlier turn.
            covered = [c for c in self._chats if c.salt == chat.salt and _goes_on(chat, c)]
            for old in covered[-1:]:
                self._drop(old)
            self._chats.append(chat)
            self._tokens += len(chat.tokens)
            while len(self._chats) > self._most or self._tokens > self._most_tokens:
                self._drop(self._chats[0])

    def nearest(
        self, salt: str | None, messages: Sequence[Message], tokens: Tokens
    ) -> RecentChat | None:
        """Find the earlier chat of the same tenant that has most in common with this one."""
        with self._lock:
            own = [chat for chat in self._chats if chat.salt == salt]
        return max(
            own,
            key=lambda a: (a.overlap(messages), common_tokens(a.tokens, tokens), a.at),
            default=None,
        )

    def clear(self) -> None:
        with self._lock:
            self._chats.clear()
            self._tokens = 0

    def __len__(self) -> int:
        return len(self._chats)

    def _drop(self, chat: RecentChat) -> None:
        self._chats.remove(chat)
        self._tokens -= len(chat.tokens)


def _goes_on(chat: RecentChat, old: RecentChat) -> bool:
    size = old.generation
    return 0 < size <= len(chat.tokens) and bool((chat.tokens[:size] == old.tokens[:size]).all())

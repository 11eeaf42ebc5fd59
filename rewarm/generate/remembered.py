"""The last chats of each tenant, to compare new ones with. Bounded in number and in size."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rewarm.prompt.text import common_tokens
from rewarm.values import Message, Tokens

from .advice import Told

MOST = 256
MOST_TOKENS = 2_000_000
"""Of all prompts together; their texts take a few bytes a token."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A chat that was answered."""

    id: str
    salt: str | None
    told: Told
    """With the answer as it was delivered, where it is done."""
    tokens: Tokens
    generation: int
    at: float = field(default_factory=time.time)

    def overlap(self, messages: Sequence[Message]) -> int:
        """Characters of messages that both have, wherever they stand."""
        own = {(m["role"], m["content"]) for m in self.told.messages}
        return sum(len(m["content"]) for m in messages if (m["role"], m["content"]) in own)


class Remembered:
    """Safe to use from several threads."""

    def __init__(self, most: int = MOST, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self._most_tokens = most, most_tokens
        self._asked: list[Asked] = []
        self._tokens = 0
        self._lock = threading.Lock()

    def add(self, asked: Asked) -> None:
        with self._lock:
            # A turn of the same conversation says all that the one before it said.
            covered = next(
                (
                    old
                    for old in reversed(self._asked)
                    if old.salt == asked.salt and _goes_on(asked, old)
                ),
                None,
            )
            if covered is not None:
                self._drop(covered)
            self._asked.append(asked)
            self._tokens += len(asked.tokens)
            while len(self._asked) > self._most or self._tokens > self._most_tokens:
                self._drop(self._asked[0])

    def nearest(
        self, salt: str | None, messages: Sequence[Message], tokens: Tokens
    ) -> Asked | None:
        """The earlier chat of the same tenant that has most in common with this one."""
        with self._lock:
            own = [asked for asked in self._asked if asked.salt == salt]
        return max(
            own,
            key=lambda a: (a.overlap(messages), common_tokens(a.tokens, tokens), a.at),
            default=None,
        )

    def clear(self) -> None:
        with self._lock:
            self._asked.clear()
            self._tokens = 0

    def __len__(self) -> int:
        return len(self._asked)

    def _drop(self, asked: Asked) -> None:
        self._asked.remove(asked)
        self._tokens -= len(asked.tokens)


def _goes_on(asked: Asked, old: Asked) -> bool:
    size = old.generation
    return 0 < size <= len(asked.tokens) and bool((asked.tokens[:size] == old.tokens[:size]).all())

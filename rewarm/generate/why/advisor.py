"""Explain why no more of a prompt was or would be reused, and what the client may change.

Advice comes from a comparison with the last chats of the same tenant. They are kept in memory, and
their number and size are bounded."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rewarm.engine import PromptPath
from rewarm.errors import InvalidOption
from rewarm.prompt.chat import Chat, Text
from rewarm.prompt.render.renderer import Prompt
from rewarm.prompt.text import common_tokens
from rewarm.values import Message, Miss, Tokens

from ..generation import Generation, PromptRun
from ..generator import Generator
from .advice import PATTERNS, proposals
from .miss import described

LEAST = 16
"""The tokens that a pattern must cost to be mentioned."""
MOST = 256
"""The most chats that are kept."""
MOST_TOKENS = 2_000_000
"""The most tokens of all their prompts; their texts take a few bytes a token."""


class OnePrompt(InvalidOption):
    """Several prompts were given, and only one can be explained."""

    param = "prompt"


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

    def __init__(self) -> None:
        self._chats: deque[RecentChat] = deque(maxlen=MOST)
        self._lock = threading.Lock()

    def add(self, chat: RecentChat) -> None:
        with self._lock:
            for old in reversed(self._chats):
                # A later turn of a conversation contains the earlier turn.
                alike = common_tokens(chat.tokens, old.tokens) if old.salt == chat.salt else 0
                if 0 < old.generation <= alike:
                    self._chats.remove(old)
                    break
            self._chats.append(chat)
            while sum(len(each.tokens) for each in self._chats) > MOST_TOKENS:
                self._chats.popleft()

    def nearest(self, salt: str | None, chat: Chat, tokens: Tokens) -> RecentChat | None:
        """Find the earlier chat of the same tenant that has most in common with this one."""
        with self._lock:
            own = [each for each in self._chats if each.salt == salt]
        return max(
            own,
            key=lambda a: (a.overlap(chat.messages), common_tokens(a.tokens, tokens), a.at),
            default=None,
        )

    def clear(self) -> None:
        with self._lock:
            self._chats.clear()


class Advisor:
    """Explain misses to the tenant who sent the prompts. The methods may take a while: they render,
    and they may have to read a long message."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.recent = RecentChats()

    def described(
        self, miss: Miss, prompt: Prompt, chat: Chat | None, salt: str | None
    ) -> dict[str, Any]:
        """Put a miss in words and figures."""
        if miss.reason == "cold":
            foreign = self.generator.core.cache.foreign(prompt.tokens, salt)
            if foreign > miss.shared:
                miss = replace(miss, reason="other_model", held=foreign)
        return described(miss, prompt, self.generator.tokenizer, chat)

    def remember(self, id: str, generation: Generation, run: PromptRun) -> None:
        """Keep an answered chat, to compare later ones with it."""
        chat = generation.with_answer(run) or generation.chat
        if chat is not None:
            prompt, salt = run.prompt, generation.options.salt
            self.recent.add(RecentChat(id, salt, chat, prompt.tokens, prompt.generation))

    def explain(
        self, asked: Chat | Text, salt: str | None, other_salts: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Say what a request would reuse, and why no more. Nothing is run."""
        prompts = self.generator.prompts(asked)
        if len(prompts) != 1:
            raise OnePrompt("prompt: one at a time can be explained")
        prompt, chat = prompts[0], asked if isinstance(asked, Chat) else None
        path = PromptPath(prompt.tokens, prompt.boundaries, salt)
        found = self.generator.core.explain(path, other_salts).result()
        match = found.match
        body: dict[str, Any] = {
            "prompt_tokens": match.tokens,
            "cached_tokens": match.resume,
            "replayed_tokens": match.replay,
            "prefilled_tokens": match.tokens - match.resume,
            "resume": {"position": match.resume, "tier": match.tier} if match.resume else None,
            "miss": None,
            "compared_with": None,
            "advice": [],
        }
        if found.miss is None:
            return body
        body["miss"] = self.described(found.miss, prompt, chat, salt)
        if chat is not None and (before := self.recent.nearest(salt, chat, prompt.tokens)):
            body["compared_with"] = {
                "id": before.id,
                "seconds_ago": round(time.time() - before.at, 1),
                "shared_tokens": common_tokens(before.tokens, prompt.tokens),
            }
            body["advice"] = self._advice(chat, salt, before, prompt)
        return body

    def _advice(
        self, chat: Chat, salt: str | None, before: RecentChat, prompt: Prompt
    ) -> list[dict[str, Any]]:
        """Remove patterns from the chat one after the other, since one may hide another."""
        found: list[dict[str, Any]] = []
        cost = self._computed(prompt, salt, before)
        left = list(PATTERNS)
        while True:
            for proposal in proposals(left, chat, before.chat):
                without = self._computed(self.generator.render(proposal.fixed), salt, before)
                if cost - without >= LEAST:
                    found.append(proposal.told(cost - without))
                    left.remove(proposal.pattern)
                    chat, cost = proposal.fixed, without
                    break
            else:
                return found

    def _computed(self, prompt: Prompt, salt: str | None, before: RecentChat) -> int:
        """Count the tokens that neither the cache nor the earlier prompt has in common with a
        prompt."""
        path = PromptPath(prompt.tokens, prompt.boundaries, salt)
        match = self.generator.core.match(path).result()
        return len(prompt.tokens) - max(match.shared, common_tokens(before.tokens, prompt.tokens))

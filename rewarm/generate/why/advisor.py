"""Explain why no more of a prompt was or would be reused, and what the client may change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rewarm.engine import PromptPath
from rewarm.errors import InvalidOption
from rewarm.prompt.chat import Chat, Text
from rewarm.prompt.render.renderer import Prompt
from rewarm.prompt.text import common_tokens
from rewarm.values import Miss

from ..generation import Generation, PromptRun
from ..generator import Generator
from .advice import proposals
from .miss import described
from .recent import RecentChat, RecentChats

LEAST = 16
"""The tokens that a pattern must cost to be mentioned."""


class OnePrompt(InvalidOption):
    """Several prompts were given, and only one can be explained."""

    param = "prompt"


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
            held = self.generator.core.cache.foreign(prompt.tokens, salt)
            if held > miss.shared:
                miss = replace(miss, reason="other_model", held=held)
        return described(miss, prompt, self.generator.tokenizer, chat)

    def remember(self, id: str, generation: Generation, run: PromptRun) -> None:
        """Keep an answered chat, to compare later ones with it."""
        chat = generation.chat
        if chat is None or run.cost is None:
            return
        messages = list(chat.messages)
        if len(run.choices) == 1 and run.choices[0].finish in ("stop", "tool_calls"):
            messages.append(chat.returned(run.choices[0].answer))
        prompt, salt, chat = run.prompt, generation.options.salt, replace(chat, messages=messages)
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
            "replayed_tokens": max(0, min(match.replay, match.tokens - match.resume)),
            "prefilled_tokens": match.tokens - match.resume,
            "resume": {"position": match.resume, "tier": match.tier} if match.resume else None,
            "miss": None,
            "compared_with": None,
            "advice": [],
        }
        if found.miss is None:
            return body
        body["miss"] = self.described(found.miss, prompt, chat, salt)
        if chat is None:
            return body
        before = self.recent.nearest(salt, chat.messages, prompt.tokens)
        if before is not None:
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
        seen: set[str] = set()
        while True:
            for proposal in proposals(chat, before.chat):
                if proposal.pattern.name in seen:
                    continue
                fixed = proposal.change.fixed
                without = self._computed(self.generator.render(fixed), salt, before)
                if cost - without >= LEAST:
                    found.append(proposal.told(cost - without))
                    seen.add(proposal.pattern.name)
                    chat, cost = fixed, without
                    break
            else:
                return found

    def _computed(self, prompt: Prompt, salt: str | None, before: RecentChat) -> int:
        """Count the tokens that neither the cache nor the earlier prompt has in common with a
        prompt."""
        path = PromptPath(prompt.tokens, prompt.boundaries, salt)
        match = self.generator.core.match(path).result()
        return len(prompt.tokens) - max(match.shared, common_tokens(before.tokens, prompt.tokens))

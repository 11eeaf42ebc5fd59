"""Messages to tokens, and where the messages end, found by rendering with other endings.

A boundary is where the prompt and the rendering of a chat that goes on differently part. So no
template is known by its markers; one that refuses a probe only loses that boundary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rewarm.cache.placement import Boundary, Kind
from rewarm.cache.tree import Tokens
from rewarm.errors import InvalidPrompt

Message = dict[str, Any]

ANSWER: Message = {"role": "assistant", "content": "Yes."}
QUESTIONS: tuple[Message, ...] = (
    {"role": "user", "content": "A question?"},
    {"role": "user", "content": "1"},
)
"""Two that share no first character, so that what they have in common is the chat before them."""

REMEMBERED = 4096


@dataclass(frozen=True)
class Prompt:
    tokens: npt.NDArray[Any]
    boundaries: tuple[Boundary, ...] = ()


class ChatRenderer:
    """Renders chats through a tokenizer's template. Probes of earlier turns are remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ends: dict[bytes, int | None] = {}

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        *,
        every_turn: bool = False,
        **options: Any,
    ) -> Prompt:
        """The prompt of a chat. `every_turn` finds the ends of all earlier user messages too, which
        the grid of `exact` needs, at a few renders for each that is new.
        """
        if not messages:
            raise InvalidPrompt("the chat is empty: it needs at least one message")
        if not getattr(self.tokenizer, "has_chat_template", True):
            raise InvalidPrompt("this model has no chat template: give text or tokens instead")
        chat = list(messages)
        try:
            tokens = self._tokens(chat, tools, options)
        except Exception as error:
            raise InvalidPrompt(f"the chat template refuses these messages: {error}") from error
        boundaries = []
        for position, kind in self._ends_of(chat, tools, options, every_turn).items():
            if 0 < position < len(tokens):
                boundaries.append(Boundary(position, kind))
        return Prompt(tokens, tuple(sorted(boundaries, key=lambda b: b.position)))

    def _ends_of(
        self,
        chat: list[Message],
        tools: list[Any] | None,
        options: dict[str, Any],
        every_turn: bool,
    ) -> dict[int, Kind | None]:
        """Positions where messages end, by a rule that gives the same ones in every later turn."""
        users = [i for i, m in enumerate(chat) if m.get("role") == "user"]
        system = next((i for i, m in enumerate(chat) if not _is_system(m)), len(chat))
        ends: dict[int, Kind | None] = {}
        digests = _digests(chat, [tools, options])

        def add(upto: int, kind: Kind | None, *, answered: bool) -> None:
            key = digests[upto] + bytes([answered])
            if key not in self._ends:
                if len(self._ends) >= REMEMBERED:
                    self._ends.clear()
                self._ends[key] = self._common(chat[:upto], answered, tools, options)
            position = self._ends[key]
            if position is not None:
                ends[position] = kind or ends.get(position)

        for i in users if every_turn else users[-1:]:
            last = i == users[-1]
            # Parallel requests, forks and edits part before a user message.
            if i > system:
                add(i, "turn" if last else None, answered=False)
            # What follows a user message is an answer now and the history of one later.
            add(i + 1, "user" if last else None, answered=True)
        # Tools, or a template's own words, may come before the chat even without a system message.
        add(system, "system", answered=False)
        return ends

    def _common(
        self, chat: list[Message], answered: bool, tools: list[Any] | None, options: dict[str, Any]
    ) -> int | None:
        """The tokens that every continuation of a chat begins with."""
        try:
            if answered:
                renders = [
                    self._tokens(chat, tools, options),
                    *(self._tokens([*chat, ANSWER, q], tools, options) for q in QUESTIONS),
                ]
            else:
                renders = [self._tokens([*chat, q], tools, options) for q in QUESTIONS]
        except Exception:
            return None  # the template refuses this order of roles
        # Never all of a prompt: its last token is left to the first decode step, in every turn.
        shortest = min(len(r) for r in renders) - 1
        same = np.all([r[:shortest] == renders[0][:shortest] for r in renders], axis=0)
        return int(np.argmin(same)) if not same.all() else shortest

    def _tokens(
        self, chat: list[Message], tools: list[Any] | None, options: dict[str, Any]
    ) -> Tokens:
        tokens = self.tokenizer.apply_chat_template(
            chat, tools=tools, add_generation_prompt=True, tokenize=True, **options
        )
        return np.asarray(tokens, dtype=np.int32)


def _digests(chat: list[Message], context: Any) -> list[bytes]:
    """A digest of the first 0, 1, 2, ... messages, each message read once."""
    digest = hashlib.blake2b(json.dumps(context, default=str).encode(), digest_size=16)
    digests = [digest.digest()]
    for message in chat:
        digest.update(json.dumps(message, default=str).encode())
        digests.append(digest.digest())
    return digests


def _is_system(message: Message) -> bool:
    return message.get("role") in ("system", "developer")

"""A model's chat template: messages to text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rewarm.values import Message

from ..chat import Chat
from ..messages import rewordings, system_for_developer

WORDS = "Rewarm asks"


class Refused(Exception):
    """The template raised; the message is its own."""


class Template:
    """Renders through mlx-lm's wrapper, so a tokenizer's own renderer is used where it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._developer: bool | None = None
        self._parts: bool | None = None

    def render(self, chat: list[Message], context: Chat, *, generation: bool = True) -> str:
        """The text of canonical messages, with the tools and options of `context`. Raises
        Refused."""
        if not getattr(self._tokenizer, "has_chat_template", True):
            raise Refused("this model has no chat template: use completions, with text or tokens")
        if any(m["role"] == "developer" for m in chat) and not self._takes_developer():
            chat = system_for_developer(chat)
        first: Refused | None = None
        for way in rewordings(chat):
            if self._wants_parts():
                way = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in way]
            try:
                return self._render(way, context, generation)
            except Refused as refused:
                first = first or refused
        raise first or Refused("there is nothing to render")

    def attempt(self, chat: list[Message], context: Chat, *, generation: bool = True) -> str | None:
        """As `render`, for a probe: None where the template refuses it."""
        try:
            return self.render(chat, context, generation=generation)
        except Refused:
            return None

    def _render(self, chat: list[Message], context: Chat, generation: bool) -> str:
        apply: Callable[..., Any] = self._tokenizer.apply_chat_template
        if context.template:
            apply = partial(apply, **context.template)
        try:
            text = apply(
                chat, tools=context.tools, add_generation_prompt=generation, tokenize=False
            )
        except RecursionError:
            raise Refused("the messages or tools are nested too deeply") from None
        except Exception as error:  # a template may fail in any way over what it is given
            words = str(error).strip() or type(error).__name__
            raise Refused(f"the chat template refuses these messages: {words}") from error
        if not isinstance(text, str):
            raise Refused(f"the chat template gave a {type(text).__name__} instead of a text")
        return text

    def _takes_developer(self) -> bool:
        """The role "developer" reaches the prompt: some templates drop it in silence."""
        if self._developer is None:
            self._developer = self._shows("developer", WORDS)
        return self._developer

    def _wants_parts(self) -> bool:
        """The template shows contents only as lists of parts, as for images."""
        if self._parts is None:
            parts = [{"type": "text", "text": WORDS}]
            self._parts = not self._shows("user", WORDS) and self._shows("user", parts)
        return self._parts

    def _shows(self, role: str, content: Any) -> bool:
        chat: list[Message] = [{"role": role, "content": content}]
        if role != "user":
            chat.append({"role": "user", "content": "Hm?"})
        try:
            return WORDS in self._render(chat, Chat(chat), True)
        except Refused:
            return False

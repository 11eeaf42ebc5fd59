"""Render messages to text through a model's chat template."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from rewarm.errors import InvalidPrompt
from rewarm.values import Message

from ..chat import Chat
from ..messages import rewordings, system_for_developer

WORDS = "Rewarm asks"


class Template:
    """A model's chat template. mlx-lm's wrapper renders it, with a tokenizer's own renderer if it
    has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, chat: list[Message], context: Chat, *, generation: bool = True) -> str:
        """Render the text of canonical messages, with the tools and options of `context`. Raises
        InvalidPrompt where the template refuses them."""
        if not self._tokenizer.has_chat_template:
            raise InvalidPrompt(
                "this model has no chat template: use completions, with text or tokens"
            )
        if any(m["role"] == "developer" for m in chat) and not self._takes_developer:
            chat = system_for_developer(chat)
        try:
            return self._render(chat, context, generation)
        except InvalidPrompt:
            for other in rewordings(chat):
                with suppress(InvalidPrompt):
                    return self._render(other, context, generation)
            raise

    def attempt(self, chat: list[Message], context: Chat, *, generation: bool = True) -> str | None:
        """Render a probe; None where the template refuses it."""
        try:
            return self.render(chat, context, generation=generation)
        except InvalidPrompt:
            return None

    def _render(self, chat: list[Message], context: Chat, generation: bool) -> str:
        if self._wants_parts:
            chat = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat]
        return self._apply(chat, context, generation)

    def _apply(self, chat: list[Message], context: Chat, generation: bool) -> str:
        apply = self._tokenizer.apply_chat_template
        if context.template:
            apply = partial(apply, **context.template)
        try:
            text = apply(
                chat, tools=context.tools, add_generation_prompt=generation, tokenize=False
            )
        except RecursionError:
            raise InvalidPrompt("the messages or tools are nested too deeply") from None
        except Exception as error:  # a template may raise any error
            words = str(error).strip() or type(error).__name__
            raise InvalidPrompt(f"the chat template refuses these messages: {words}") from error
        if not isinstance(text, str):
            raise InvalidPrompt(f"the chat template gave a {type(text).__name__} instead of a text")
        return text

    @cached_property
    def _takes_developer(self) -> bool:
        """The role "developer" reaches the prompt. Some templates drop it without an error."""
        return self._shows("developer", WORDS)

    @cached_property
    def _wants_parts(self) -> bool:
        """The template shows contents only as lists of parts, as for images."""
        parts = [{"type": "text", "text": WORDS}]
        return not self._shows("user", WORDS) and self._shows("user", parts)

    def _shows(self, role: str, content: Any) -> bool:
        chat: list[Message] = [{"role": role, "content": content}]
        if role != "user":
            chat.append({"role": "user", "content": "Hm?"})
        try:
            return WORDS in self._apply(chat, Chat(chat), True)
        except InvalidPrompt:
            return False

"""Render messages to text through a model's chat template."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from rewarm.values import Message

from ..chat import Chat
from ..messages import rewordings, system_for_developer

WORDS = "Rewarm asks"


class TemplateRefusal(Exception):
    """The template cannot render these messages. The message says why."""


class Template:
    """A model's chat template. mlx-lm's wrapper renders it, with a tokenizer's own renderer if it
    has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, chat: list[Message], context: Chat, *, generation: bool = True) -> str:
        """Render the text of canonical messages, with the tools and options of `context`. Raises
        TemplateRefusal."""
        if not getattr(self._tokenizer, "has_chat_template", True):
            raise TemplateRefusal(
                "this model has no chat template: use completions, with text or tokens"
            )
        if any(m["role"] == "developer" for m in chat) and not self._takes_developer:
            chat = system_for_developer(chat)
        refusal: TemplateRefusal | None = None
        for way in rewordings(chat):
            if self._wants_parts:
                way = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in way]
            try:
                return self._render(way, context, generation)
            except TemplateRefusal as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def attempt(self, chat: list[Message], context: Chat, *, generation: bool = True) -> str | None:
        """Render a probe; None where the template refuses it."""
        try:
            return self.render(chat, context, generation=generation)
        except TemplateRefusal:
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
            raise TemplateRefusal("the messages or tools are nested too deeply") from None
        except Exception as error:  # a template may raise any error
            words = str(error).strip() or type(error).__name__
            raise TemplateRefusal(f"the chat template refuses these messages: {words}") from error
        if not isinstance(text, str):
            raise TemplateRefusal(
                f"the chat template gave a {type(text).__name__} instead of a text"
            )
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
            return WORDS in self._render(chat, Chat(chat), True)
        except TemplateRefusal:
            return False

"""Render chats to prompts: tokens, and the ends of the messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from rewarm.errors import InvalidPrompt
from rewarm.values import Boundary, Message, Tokens

from ..chat import Chat, chat_of
from ..messages import REASONING
from .boundaries import Places, Rendered
from .encoder import Encoder
from .probes import OTHER, QUESTION, RESULTS, results
from .tags import Tags
from .template import Template


@dataclass(frozen=True)
class Prompt:
    tokens: Tokens
    boundaries: tuple[Boundary, ...] = ()
    """In order of position."""
    marks: tuple[int, ...] = ()
    """Positions of explicit marks."""
    generation: int = 0
    """The begin of the generation prompt, or of the answer that is continued."""
    rendered: Rendered | None = None
    """The rendered chat. The prompt may be only its beginning. None for a plain text."""

    @cached_property
    def ends(self) -> dict[int, int]:
        """The positions of the ends of all messages that can be located, by message. This takes a
        render of the whole chat."""
        ends = self.rendered.ends if self.rendered is not None else {}
        return {i: position for i, position in ends.items() if position <= len(self.tokens)}


class ChatRenderer:
    """A renderer of chats through a model's template. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        self.tokenizer = tokenizer
        self._template = Template(tokenizer)
        self._rendered = partial(Rendered, self._template, Encoder(tokenizer), Places())

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        *,
        every_turn: bool = False,
        continue_final: bool = False,
        marked: Iterable[int] = (),
        **options: Any,
    ) -> Prompt:
        """Make the prompt of messages in any spelling. `options` are those of the template."""
        chat = chat_of(
            messages, tools, template=options, continue_final=continue_final, marked=tuple(marked)
        )
        return self.prompt(chat, every_turn=every_turn)

    def prompt(self, chat: Chat, *, every_turn: bool = False) -> Prompt:
        """Make the prompt of a chat.

        `every_turn` gives the boundaries of all earlier turns too, which the grid of `exact` needs.
        """
        said = chat.messages
        continued = chat.continue_final and _is_begun(said)
        if chat.continue_final and not continued:
            said = said[:-1]
        text = self._continued(said, chat) if continued else self._template.render(said, chat)
        rendered = self._rendered(said, chat, text, every_turn, continued)
        marks = rendered.marks() if chat.marked else ()
        tokens = rendered.encoded.tokens
        return Prompt(tokens, rendered.boundaries, marks, rendered.generation, rendered)

    def ahead(self, answered: Chat, *, every_turn: bool = False) -> Prompt | None:
        """Make the beginning of the next turn's prompt, after the answer that ends this chat. None
        where the template refuses to go on."""
        chat = answered.messages
        calls = chat[-1].get("tool_calls")
        if calls:
            endings = [results(calls, RESULTS[0]), results(calls, RESULTS[1], named=True)]
        else:
            endings = [(QUESTION,), (OTHER,)]
        first, other = (self._template.attempt([*chat, *e], answered) for e in endings)
        if first is None or other is None:
            return None
        rendered = self._rendered([*chat, *endings[0]], answered, first, every_turn)
        stop = rendered.position(rendered.whole.common([first, other]))
        if not stop:
            return None
        before = tuple(b for b in rendered.boundaries if b.position <= stop)
        return Prompt(rendered.encoded.tokens[:stop], before, (), stop, rendered)

    def _continued(self, chat: list[Message], context: Chat) -> str:
        """Render the text up to the end of the last message's content, without what the template
        adds after it."""
        tags = Tags()
        tagged = self._template.render(tags.tagged(chat, continued=True), context, generation=False)
        return tags.before_last(tagged)


def _is_begun(chat: list[Message]) -> bool:
    """Say whether the last message has text to continue. An empty one only begins an answer."""
    last = chat[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise InvalidPrompt("only a last message of the assistant, with text, can be continued")
    if not last["content"] and len(chat) == 1:
        raise InvalidPrompt("the chat is empty: there is nothing to answer or to continue")
    if not last["content"] and last.get(REASONING[0]):
        raise InvalidPrompt("an answer can be continued only from its text, not from its thinking")
    return bool(last["content"])

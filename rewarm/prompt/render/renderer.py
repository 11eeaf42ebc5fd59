"""Chats to prompts: tokens, and where the messages end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from rewarm.errors import InvalidPrompt
from rewarm.values import Boundary, Message, Tokens

from ..chat import Chat, chat_of
from ..messages import REASONING
from ..text import common_text
from .boundaries import Ends, Finder, MessageEnd, Rendered
from .edges import Edges
from .encoder import Encoder
from .probes import OTHER, QUESTION, RESULTS, results
from .tags import Tags
from .template import Refused, Template


@dataclass(frozen=True)
class Prompt:
    tokens: Tokens
    boundaries: tuple[Boundary, ...] = ()
    """In order of position."""
    marks: tuple[int, ...] = ()
    """Positions of explicit marks."""
    generation: int = 0
    """The begin of the generation prompt, or of the answer that is continued."""
    locate: Ends = tuple

    @property
    def ends(self) -> tuple[MessageEnd, ...]:
        """Every message that can be located."""
        return self.locate()


class ChatRenderer:
    """Renders chats through a model's template. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        self.tokenizer = tokenizer
        self._template = Template(tokenizer)
        self._encoder = Encoder(tokenizer)
        self._edges = Edges(self._encoder)
        self._finder = Finder(self._template, self._edges)

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        *,
        every_turn: bool = False,
        continue_final: bool = False,
        marked: Iterable[int] = (),
        **template_options: Any,
    ) -> Prompt:
        """The prompt of messages in any spelling, with the options of a chat."""
        chat = chat_of(
            messages,
            tools,
            template=template_options,
            continue_final=continue_final,
            marked=tuple(marked),
        )
        return self.prompt(chat, every_turn=every_turn)

    def prompt(self, chat: Chat, *, every_turn: bool = False) -> Prompt:
        """The prompt of a chat.

        `every_turn` gives the boundaries of all earlier turns too, which the grid of `exact` needs.
        """
        said = chat.messages
        continued = chat.continue_final and _is_begun(said)
        if chat.continue_final and not continued:
            said = said[:-1]
        try:
            text = self._continued(said, chat) if continued else self._template.render(said, chat)
        except Refused as refused:
            raise InvalidPrompt(str(refused)) from refused
        encoded = self._encoder.encode(text)
        return self._prompt(Rendered(said, chat, encoded, continued), every_turn, chat.marked)

    def ahead(self, answered: Chat, *, every_turn: bool = False) -> Prompt | None:
        """The beginning of the next turn's prompt, after the answer that ends this chat. None
        where the template refuses to go on."""
        chat = answered.messages
        calls = chat[-1].get("tool_calls")
        if calls:
            endings = [results(calls, RESULTS[0]), results(calls, RESULTS[1], named=True)]
        else:
            endings = [(QUESTION,), (OTHER,)]
        texts = [self._template.attempt([*chat, *ending], answered) for ending in endings]
        first, other = texts
        if first is None or other is None:
            return None
        at = common_text(first, other)
        rendered = Rendered([*chat, *endings[0]], answered, self._encoder.encode(first))
        stop = self._edges.edge(rendered.encoded, at, [first[at : at + 32], other[at : at + 32]])
        if not stop:
            return None
        whole = self._prompt(rendered, every_turn, ())
        return Prompt(
            whole.tokens[:stop],
            tuple(b for b in whole.boundaries if b.position <= stop),
            generation=stop,
            locate=lambda: tuple(e for e in whole.ends if e.position <= stop),
        )

    def _prompt(self, rendered: Rendered, every_turn: bool, marked: Iterable[int]) -> Prompt:
        ends = cache(lambda: self._finder.message_ends(rendered))
        view = self._finder.view(rendered)
        boundaries = self._finder.boundaries(rendered, view, ends, every_turn=every_turn)
        generation = self._finder.generation(rendered, view, ends)
        marks = self._marks(rendered, marked, boundaries, generation, ends) if marked else ()
        return Prompt(rendered.encoded.tokens, boundaries, marks, generation, ends)

    def _marks(
        self,
        rendered: Rendered,
        marked: Iterable[int],
        boundaries: Sequence[Boundary],
        generation: int,
        ends: Ends,
    ) -> tuple[int, ...]:
        """The positions of marked messages' ends."""
        wanted = set(marked)
        places = {e.index: e.position for e in ends()}
        places.update((-1, b.position) for b in boundaries if b.kind == "system")
        lost = sorted(m for m in wanted - places.keys() if 0 <= m < len(rendered.chat))
        if lost:
            places |= self._nearest(rendered, lost, places, boundaries, generation)
        return tuple(sorted({places[m] for m in wanted if m in places}))

    def _nearest(
        self,
        rendered: Rendered,
        wanted: list[int],
        places: dict[int, int],
        boundaries: Sequence[Boundary],
        generation: int,
    ) -> dict[int, int]:
        """Places for the ends of messages that have no text, such as tool calls: where the next
        message's text begins, or else where the nearest text before them ends."""
        last = len(rendered.chat) - 1
        begins: dict[int, int] = {}
        if wanted[0] < last:
            begins = self._finder.message_begins(rendered)
        loop = [b.position for b in boundaries if b.kind == "turn" and not b.durable]
        after = generation if rendered.continued else max(loop, default=generation)
        found: dict[int, int] = {}
        for m in wanted:
            before = max((p for i, p in places.items() if i < m), default=0)
            place = (after if m == last else begins.get(m + 1)) or before
            if place:
                found[m] = place
        return found

    def _continued(self, chat: list[Message], context: Chat) -> str:
        """The text up to the end of the last message's content, whatever a template adds there."""
        tags = Tags("".join(m["content"] for m in chat))
        tagged = self._template.render(tags.tagged(chat, continued=True), context, generation=False)
        text = tags.before_last(tagged)
        if text is None:
            raise Refused("the chat template leaves out the last message, which is to be continued")
        return text


def _is_begun(chat: list[Message]) -> bool:
    """There is an answer to continue; an empty one is only an answer to begin."""
    last = chat[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise InvalidPrompt("only a last message of the assistant, with text, can be continued")
    if not last["content"] and len(chat) == 1:
        raise InvalidPrompt("the chat is empty: there is nothing to answer or to continue")
    if not last["content"] and last.get(REASONING[0]):
        raise InvalidPrompt("an answer can be continued only from its text, not from its thinking")
    return bool(last["content"])

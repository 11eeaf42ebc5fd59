"""The ends of messages in a rendered chat, and the ends among them that no further turn moves."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rewarm.values import Boundary, Kind, Message

from ..chat import Chat
from ..messages import is_system
from ..text import common_text
from .edges import Edges
from .encoder import Encoded
from .probes import BEFORE_A_QUESTION, INTERRUPTED, Ways, after_a_question, in_a_loop
from .tags import Tags
from .template import Template
from .view import Common, Unseen, View, shortened

T = TypeVar("T")
P = TypeVar("P", bound="tuple[Common | None, ...]")

APART = 8
"""Tokens between two points that are worth two checkpoints."""

KEPT = 512
"""Chats whose places are remembered."""


@dataclass(frozen=True)
class MessageEnd:
    """The end of a message's content, in tokens."""

    index: int
    role: str
    position: int


Ends = Callable[[], tuple[MessageEnd, ...]]
"""Found when they are asked for: it takes a render of the whole chat."""


@dataclass(frozen=True)
class Rendered:
    """A chat, its text and its tokens."""

    chat: list[Message]
    context: Chat
    """It has the tools and the options that all renders share."""
    encoded: Encoded
    continued: bool = False
    """The answer continues the last message."""

    @property
    def text(self) -> str:
        return self.encoded.text

    @property
    def system(self) -> int:
        """The number of messages that lead the chat and are the system's."""
        leading = (i for i, m in enumerate(self.chat) if not is_system(m))
        return next(leading, len(self.chat))

    @property
    def user(self) -> int:
        """The last message of the user; the last of all where there is none."""
        users = [i for i, m in enumerate(self.chat) if m["role"] == "user"]
        return users[-1] if users else len(self.chat) - 1


class Around(NamedTuple):
    """The places around the last question at which a chat may go on in another way."""

    turn: Common | None
    """Before it."""
    user: Common | None
    """After it."""
    answered: Common | None
    """After it, where an answer follows."""


class Finder:
    """Finds boundaries in a number of renders that does not depend on the chat's length, most of
    them of its end only."""

    def __init__(self, template: Template, edges: Edges) -> None:
        self._template = template
        self._edges = edges
        self._places = _Places()

    def view(self, rendered: Rendered) -> View:
        """The part of a chat that probes are rendered on."""
        chat = rendered.chat
        kept = None if rendered.continued else shortened(chat, rendered.system, rendered.user)
        text = kept and self._template.attempt(kept.chat, rendered.context)
        return View.of_end(kept, text, rendered.text) if kept and text else _whole(rendered)

    def message_ends(self, rendered: Rendered) -> tuple[MessageEnd, ...]:
        """Every message whose content the template has copied, by one tagged render."""
        tags = Tags(rendered.text)
        tagged = tags.tagged(rendered.chat, continued=rendered.continued)
        return tuple(
            MessageEnd(i, rendered.chat[i]["role"], position)
            for i, position in self._located(rendered, tags, tagged).items()
        )

    def message_begins(self, rendered: Rendered) -> dict[int, int]:
        """The beginnings of the contents, in tokens, by message; by one more tagged render."""
        tags = Tags(rendered.text)
        tagged = tags.begun(rendered.chat, continued=rendered.continued)
        return self._located(rendered, tags, tagged)

    def _located(self, rendered: Rendered, tags: Tags, chat: list[Message]) -> dict[int, int]:
        """The positions of the tags, by message."""
        tagged = self._template.attempt(chat, rendered.context, generation=not rendered.continued)
        if tagged is None:
            return {}
        places = tags.places(tagged, rendered.text, whole=not rendered.continued)
        located = ((i, self._edges.end(rendered.encoded, at)) for i, at in places.items())
        return {i: position for i, position in located if position is not None}

    def generation(self, rendered: Rendered, view: View, ends: Ends) -> int:
        """The begin of the generation prompt, or of the answer that is continued."""
        chat = view.chat[:-1] if rendered.continued else view.chat
        without = chat and self._template.attempt(chat, rendered.context, generation=False)
        if without and without != view.text:
            try:
                at = view.of_whole(common_text(view.text, without))
            except Unseen:
                return self.generation(rendered, _whole(rendered), ends)
            return self._edges.end(rendered.encoded, at) or 0
        # The template writes it always, or never: it is somewhere after the last message.
        last = len(rendered.chat) - 1 - rendered.continued
        return max((e.position for e in ends() if e.index == last), default=0)

    def boundaries(
        self, rendered: Rendered, view: View, ends: Ends, *, every_turn: bool
    ) -> tuple[Boundary, ...]:
        """The boundaries that placement uses; `every_turn` adds those of all earlier turns, by a
        rule that gives the same positions again in every later turn."""
        found = _boundary(self._system(rendered), "system")
        around = self._around(rendered, view, every_turn)
        user = self._position(rendered, around.user)
        if every_turn:
            found += _of_every_turn(rendered, ends(), user or 0)
        else:
            found += _boundary(self._position(rendered, around.turn), "turn")
            found += _boundary(user, "user")
        if len(rendered.chat) > rendered.user + 1 and not rendered.continued:
            # Until the next message of the user: then thinking may go from all of it.
            loop = _seen(rendered, view, lambda view: self._loop(view, rendered.context))
            found += _beyond(found, self._position(rendered, loop), "turn", 1)
        elif not every_turn:
            # Only where an answer follows, not another message of the user.
            found += _beyond(found, self._position(rendered, around.answered), "user", APART)
        return _distinct(found, len(rendered.encoded.tokens))

    def _system(self, rendered: Rendered) -> int | None:
        """The end of system and tools, which other chats have, too."""
        chat, context = rendered.chat[: rendered.system], rendered.context

        def probed() -> tuple[Common | None]:
            return (_whole(rendered).common(self._probe(chat, context, BEFORE_A_QUESTION)),)

        key = _digest("system", chat, context)
        position = self._position(rendered, *self._places.of(key, rendered.text, probed))
        # With nothing before the chat but the header of its first message, there is no such end.
        alone = not (chat or context.tools) and (position or 0) < 2 * APART
        return None if alone else position

    def _around(self, rendered: Rendered, view: View, every_turn: bool) -> Around:
        """The steps of a tool loop ask for it again and again."""
        if not view.has_steps:
            # How the view ends says nothing of where the question is.
            view = _whole(rendered)

        def probed(view: View) -> Around:
            return self._probed(rendered, view, every_turn)

        asked = rendered.chat[: rendered.user + 1]
        key = _digest(f"question {every_turn}", asked, rendered.context)
        return self._places.of(key, rendered.text, partial(_seen, rendered, view, probed))

    def _probed(self, rendered: Rendered, view: View, every_turn: bool) -> Around:
        context = rendered.context
        before, asked = view.chat[: view.user], view.chat[: view.user + 1]
        turn = None
        if view.user > rendered.system and not every_turn:
            turn = view.common(self._probe(before, context, BEFORE_A_QUESTION))
        answered = self._probe(asked, context, after_a_question(context.tools))
        if not answered:
            return Around(turn, None, None)
        # The question itself, whatever follows it in this chat.
        last = len(asked) == len(view.chat) and not rendered.continued
        alone = view.text if last else self._template.attempt(asked, context)
        answered += [alone] if alone is not None else []
        others = self._probe(asked, context, INTERRUPTED) or []
        return Around(turn, view.common([*answered, *others]), view.common(answered))

    def _loop(self, view: View, context: Chat) -> Common | None:
        return view.common(self._probe(view.chat, context, in_a_loop(context.tools)))

    def _probe(
        self, chat: list[Message], context: Chat, endings: Iterable[Ways]
    ) -> list[str] | None:
        """The chat with each of the endings; None where the template refuses one it needs."""
        renders = []
        for ways in endings:
            attempts = (self._template.attempt([*chat, *e], context) for e in ways.endings)
            accepted = next((a for a in attempts if a is not None), None)
            if accepted is not None:
                renders.append(accepted)
            elif ways.needed:
                return None
        return renders

    def _position(self, rendered: Rendered, common: Common | None) -> int | None:
        """The number of tokens that the prompt and the probes begin with alike."""
        if common is None:
            return None
        return self._edges.edge(rendered.encoded, common.at, common.tails)


class _Places:
    """Places found in earlier chats that began with the same messages.

    Only places that these messages alone decide are kept. How a chat goes on never counts for
    another one: the grid of `exact` would depend on which chat came first.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[bytes, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: bytes, text: str, find: Callable[[], P]) -> P:
        with self._lock:
            known = self._known.get(key)
        # A template may write the date: then what is remembered is yesterday's.
        if known is None or known[0] != _text_digest(text[: _furthest(known[1])]):
            found = find()
            if not all(place.goes_with for place in found if place is not None):
                return found
            known = _text_digest(text[: _furthest(found)]), found
        with self._lock:
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        places: P = known[1]
        return places


def _furthest(places: Iterable[Common | None]) -> int:
    return max((place.at for place in places if place is not None), default=0)


def _whole(rendered: Rendered) -> View:
    return View(rendered.chat, rendered.text, rendered.user)


def _seen(rendered: Rendered, view: View, find: Callable[[View], T]) -> T:
    """Find something in a view, or else in the whole chat."""
    try:
        return find(view)
    except Unseen:
        return find(_whole(rendered))


def _of_every_turn(
    rendered: Rendered, ends: Sequence[MessageEnd], proven: int
) -> Iterable[Boundary]:
    """The ends of the user's messages, and of those before them. The ends inside a tool loop are
    left out: they would be new to the grid once the loop is over."""
    roles = [m["role"] for m in rendered.chat]
    kinds: dict[int, Kind] = {rendered.user: "user", rendered.user - 1: "turn"}
    for end in ends:
        i = end.index
        turns = roles[i] == "user" or (i + 1 < len(roles) and roles[i + 1] == "user")
        if turns and rendered.system <= i <= rendered.user and end.position <= proven:
            yield Boundary(end.position, kinds.get(i))


def _boundary(position: int | None, kind: Kind) -> list[Boundary]:
    return [] if position is None else [Boundary(position, kind)]


def _beyond(found: list[Boundary], position: int | None, kind: Kind, apart: int) -> list[Boundary]:
    """One that is not durable, where it lies after the others."""
    last = max((b.position for b in found), default=0)
    if position is None or position < last + apart:
        return []
    return [Boundary(position, kind, durable=False)]


def _distinct(found: list[Boundary], stop: int) -> tuple[Boundary, ...]:
    """In order, one for each position: a durable one rather than another, one with a kind first."""
    best: dict[int, Boundary] = {}
    for boundary in sorted(found, key=_rank):
        # The last token of a prompt is left to the first decode step.
        if boundary.position >= stop:
            boundary = replace(boundary, position=stop - 1)
        if boundary.position > 0:
            best[boundary.position] = boundary
    return tuple(best[p] for p in sorted(best))


def _rank(boundary: Boundary) -> tuple[bool, bool]:
    return boundary.durable, boundary.kind is not None


def _digest(what: str, chat: list[Message], context: Chat) -> bytes:
    return _text_digest(repr((what, chat, context.tools, context.template)))


def _text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()

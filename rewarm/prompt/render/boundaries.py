"""Find the ends of messages in a rendered chat, and the boundaries that no further turn moves.

The markers of templates are not known here. The chat is rendered with other endings too
(`probes.py`): no further turn moves the text that all renders begin with. The number of renders
does not depend on the chat's length, and most of them are of its end only."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from rewarm.values import Boundary, Kind, Message

from ..chat import SYSTEM_AND_TOOLS, Chat
from ..messages import is_system
from ..text import common_text
from . import probes
from .encoder import Encoded, Encoder
from .probes import CommonPlace, View
from .tags import Tags
from .template import Template

T = TypeVar("T")
P = TypeVar("P", bound="tuple[CommonPlace | None, ...]")

APART = 8
"""The fewest tokens between two points that are worth two checkpoints."""

KEPT = 512
"""The number of chats whose places are remembered."""


@dataclass(frozen=True)
class MessageEnd:
    """The end of a message's content, in tokens."""

    index: int
    role: str
    position: int


class QuestionPlaces(NamedTuple):
    """The places around the last question at which a chat may go on in another way."""

    turn: CommonPlace | None
    """Before the question."""
    user: CommonPlace | None
    """After the question."""
    answered: CommonPlace | None
    """After the question, if an answer follows."""


@dataclass(frozen=True, eq=False)
class Rendered:
    """A chat, its text and its tokens, and the places that are found in them."""

    chat: list[Message]
    context: Chat
    """The chat of the request, with the tools and options that all renders share."""
    encoded: Encoded
    template: Template
    encoder: Encoder
    places: Places
    continued: bool = False
    """The answer continues the last message."""

    @property
    def text(self) -> str:
        return self.encoded.text

    @property
    def system(self) -> int:
        """The number of system messages at the beginning of the chat."""
        leading = (i for i, m in enumerate(self.chat) if not is_system(m))
        return next(leading, len(self.chat))

    @cached_property
    def user(self) -> int:
        """The last message of the user; the last of all where there is none."""
        users = [i for i, m in enumerate(self.chat) if m["role"] == "user"]
        return users[-1] if users else len(self.chat) - 1

    @property
    def whole(self) -> View:
        return View(self.chat, self.text, self.user)

    @cached_property
    def view(self) -> View:
        """The part of the chat that probes are rendered on."""
        kept = None if self.continued else probes.shortened(self.chat, self.system, self.user)
        text = kept and self.template.attempt(kept.chat, self.context)
        return kept.as_end_of(self.text, text) if kept and text else self.whole

    @cached_property
    def ends(self) -> tuple[MessageEnd, ...]:
        """The ends of all messages whose contents the template copies, found by one tagged
        render."""
        located = self._located(begin=False).items()
        return tuple(MessageEnd(i, self.chat[i]["role"], position) for i, position in located)

    def _located(self, *, begin: bool) -> dict[int, int]:
        """Find the positions of the beginnings or the ends of contents, by message."""
        tags = Tags(self.text)
        chat = tags.tagged(self.chat, begin=begin, continued=self.continued)
        tagged = self.template.attempt(chat, self.context, generation=not self.continued)
        if tagged is None:
            return {}
        places = tags.places(tagged, self.text, whole=not self.continued)
        located = ((i, self.encoder.end(self.encoded, at)) for i, at in places.items())
        return {i: position for i, position in located if position is not None}

    @cached_property
    def generation(self) -> int:
        """The begin of the generation prompt, or of the answer that is continued."""
        return self._seen(self.view, self._generation)

    def _generation(self, view: View) -> int:
        chat = view.chat[:-1] if self.continued else view.chat
        without = chat and self.template.attempt(chat, self.context, generation=False)
        if without and without != view.text:
            at = view.of_whole(common_text(view.text, without))
            return self.encoder.end(self.encoded, at) or 0
        # The template always writes it, or never does: it is somewhere after the last message.
        last = len(self.chat) - 1 - self.continued
        return max((e.position for e in self.ends if e.index == last), default=0)

    def boundaries(self, *, every_turn: bool) -> tuple[Boundary, ...]:
        """Find the boundaries that placement uses. `every_turn` adds those of all earlier turns, by
        a rule that gives the same positions in every later turn."""
        found = _boundary(self._system_end(), "system")
        around = self._around(every_turn)
        user = self._position(around.user)
        if every_turn:
            found += self._of_every_turn(user or 0)
        else:
            found += _boundary(self._position(around.turn), "turn")
            found += _boundary(user, "user")
        if len(self.chat) > self.user + 1 and not self.continued:
            # It holds until the next user message: then the template may drop all this thinking.
            loop = self._position(self._seen(self.view, self._loop))
            found += _beyond(found, loop, "turn", 1)
        elif not every_turn:
            # It holds only if an answer follows, and not if another message of the user does.
            found += _beyond(found, self._position(around.answered), "user", APART)
        return _distinct(found, len(self.encoded.tokens))

    def marks(self, marked: Iterable[int], boundaries: Iterable[Boundary]) -> tuple[int, ...]:
        """Give the positions of marked messages' ends. A message without text, such as a tool call,
        is marked where the next message's text begins, or else where the nearest text before it
        ends."""
        wanted = set(marked)
        places = {e.index: e.position for e in self.ends}
        places.update((SYSTEM_AND_TOOLS, b.position) for b in boundaries if b.kind == "system")
        last = len(self.chat) - 1
        lost = sorted(m for m in wanted - places.keys() if 0 <= m <= last)
        begins = self._located(begin=True) if lost and lost[0] < last else {}
        found = dict(places)
        for m in lost:
            place = begins.get(m + 1)
            if m == last:
                loop = [b.position for b in boundaries if b.kind == "turn" and not b.durable]
                place = self.generation if self.continued or not loop else max(loop)
            place = place or max((p for i, p in places.items() if i < m), default=0)
            if place:
                found[m] = place
        return tuple(sorted({found[m] for m in wanted if m in found}))

    def _system_end(self) -> int | None:
        """Find the end of system and tools, which other chats share."""
        chat = self.chat[: self.system]

        def probed() -> tuple[CommonPlace | None]:
            return (self.whole.common(self._probe(chat, probes.BEFORE_A_QUESTION)),)

        key = _digest("system", chat, self.context)
        position = self._position(*self.places.remembered(key, self.text, probed))
        # With nothing before the chat but the header of its first message, there is no such end.
        alone = not (chat or self.context.tools) and (position or 0) < 2 * APART
        return None if alone else position

    def _around(self, every_turn: bool) -> QuestionPlaces:
        """Find the places around the question. Every step of a tool loop asks for them again."""
        # The end of a view without all steps says nothing about the places of the question.
        view = self.view if self.view.has_steps else self.whole

        def probed() -> QuestionPlaces:
            return self._seen(view, partial(self._probed, every_turn=every_turn))

        key = _digest(f"question {every_turn}", self.chat[: self.user + 1], self.context)
        return self.places.remembered(key, self.text, probed)

    def _probed(self, view: View, every_turn: bool) -> QuestionPlaces:
        before, asked = view.chat[: view.user], view.chat[: view.user + 1]
        turn = None
        if view.user > self.system and not every_turn:
            turn = view.common(self._probe(before, probes.BEFORE_A_QUESTION))
        answered = self._probe(asked, probes.after_a_question(self.context.tools))
        if not answered:
            return QuestionPlaces(turn, None, None)
        # The question alone, without what follows it in this chat.
        last = len(asked) == len(view.chat) and not self.continued
        alone = view.text if last else self.template.attempt(asked, self.context)
        answered += [alone] if alone is not None else []
        others = self._probe(asked, probes.INTERRUPTED) or []
        return QuestionPlaces(turn, view.common([*answered, *others]), view.common(answered))

    def _loop(self, view: View) -> CommonPlace | None:
        return view.common(self._probe(view.chat, probes.in_a_loop(self.context.tools)))

    def _probe(
        self, chat: list[Message], endings: Iterable[probes.ProbeEnding]
    ) -> list[str] | None:
        """Render the chat with each of the endings; None where the template refuses one that is
        needed."""
        renders = []
        for ending in endings:
            attempts = (self.template.attempt([*chat, *e], self.context) for e in ending.tried)
            accepted = next((a for a in attempts if a is not None), None)
            if accepted is not None:
                renders.append(accepted)
            elif ending.needed:
                return None
        return renders

    def _seen(self, view: View, find: Callable[[View], T]) -> T:
        """Find something in a view, or else in the whole chat."""
        try:
            return find(view)
        except probes.NotInView:
            return find(self.whole)

    def _position(self, common: CommonPlace | None) -> int | None:
        """Count the tokens that the prompt and the probes have in common at their beginning."""
        return self.encoder.edge(self.encoded, common.at, common.tails) if common else None

    def _of_every_turn(self, proven: int) -> Iterable[Boundary]:
        """Find the ends of the user's messages, and of those before them. The ends inside a tool
        loop are left out: they would be new to the grid once the loop is over."""
        roles = [m["role"] for m in self.chat]
        kinds: dict[int, Kind] = {self.user: "user", self.user - 1: "turn"}
        for end in self.ends:
            i = end.index
            turns = roles[i] == "user" or (i + 1 < len(roles) and roles[i + 1] == "user")
            if turns and self.system <= i <= self.user and end.position <= proven:
                yield Boundary(end.position, kinds.get(i))


class Places:
    """The remembered places of chats, which chats that begin with the same messages share.

    Only places that these messages alone decide are remembered. Otherwise the grid of `exact` would
    depend on which chat came first.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[bytes, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def remembered(self, key: bytes, text: str, find: Callable[[], P]) -> P:
        """Give the places of a chat with this text, found or remembered."""
        with self._lock:
            known = self._known.get(key)
        # A template may write the date, so that the remembered text is yesterday's.
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


def _furthest(places: Iterable[CommonPlace | None]) -> int:
    return max((place.at for place in places if place is not None), default=0)


def _boundary(position: int | None, kind: Kind) -> list[Boundary]:
    return [] if position is None else [Boundary(position, kind)]


def _beyond(found: list[Boundary], position: int | None, kind: Kind, apart: int) -> list[Boundary]:
    """Make a boundary that is not durable, where it lies after the others."""
    last = max((b.position for b in found), default=0)
    if position is None or position < last + apart:
        return []
    return [Boundary(position, kind, durable=False)]


def _distinct(found: list[Boundary], stop: int) -> tuple[Boundary, ...]:
    """Give the boundaries in order, one for each position. A durable boundary is preferred, and
    then one with a kind."""
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

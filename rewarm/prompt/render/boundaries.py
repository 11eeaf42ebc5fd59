"""Find the ends of messages in a rendered chat, and the boundaries that no further turn moves.

The markers of templates are not known here. The chat is rendered with other endings too
(`probes.py`): no further turn moves the text that all renders begin with. The number of renders
does not depend on the chat's length, and most of them are of its end only."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from rewarm.values import Boundary, Kind, Message

from ..chat import SYSTEM_AND_TOOLS, Chat
from ..messages import leading_system
from ..text import common_text
from . import probes
from .encoder import Encoded, Encoder
from .probes import BEGINNING, CommonPlace, View
from .tags import Tags
from .template import Template

T = TypeVar("T")

APART = 8
"""The fewest tokens between two points that are worth two checkpoints."""

KEPT = 512
"""The number of chats whose places are remembered."""


class FoundPlaces(NamedTuple):
    """The places at which a chat may go on in another way, as far as they were looked for."""

    system: CommonPlace = BEGINNING
    """After the system messages."""
    turn: CommonPlace = BEGINNING
    """Before the last question."""
    user: CommonPlace = BEGINNING
    """After that question."""
    answered: CommonPlace = BEGINNING
    """After that question, if an answer follows."""


@dataclass(frozen=True, eq=False)
class Rendered:
    """A chat, its text and its tokens, and the places that are found in them."""

    template: Template
    encoder: Encoder
    places: Places
    chat: list[Message]
    context: Chat
    """The chat of the request, with the tools and options that all renders share."""
    text: str
    every_turn: bool
    """The boundaries are those of all earlier turns too, by a rule that gives the same positions in
    every later turn."""
    continued: bool = False
    """The answer continues the last message."""

    @cached_property
    def encoded(self) -> Encoded:
        return self.encoder.encode(self.text)

    @cached_property
    def system(self) -> int:
        """The number of system messages at the beginning of the chat."""
        return leading_system(self.chat)

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
        if self.continued:
            return self.whole
        return probes.shortened(self.whole, self.system, self._attempt)

    @cached_property
    def ends(self) -> dict[int, int]:
        """The positions of the ends of all messages whose contents the template copies, found by
        one tagged render."""
        return self._located(begin=False)

    def _located(self, *, begin: bool) -> dict[int, int]:
        """Find the positions of the beginnings or the ends of contents, by message."""
        tags = Tags()
        chat = tags.tagged(self.chat, begin=begin, continued=self.continued)
        tagged = self._attempt(chat, generation=not self.continued)
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
        without = chat and self._attempt(chat, generation=False)
        if without and without != view.text:
            at = view.of_whole(common_text(view.text, without))
            return self.encoder.end(self.encoded, at) or 0
        # The template always writes it, or never does: it is somewhere after the last message.
        return self.ends.get(len(self.chat) - 1 - self.continued, 0)

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        """The boundaries that placement uses, in order of position."""
        found = [Boundary(self._system_end(), "system")]
        around = self._around()
        user = self.position(around.user)
        if self.every_turn:
            found += self._of_every_turn(user)
        else:
            found += [Boundary(self.position(around.turn), "turn"), Boundary(user, "user")]
        last = max(b.position for b in found)
        if len(self.chat) > self.user + 1 and not self.continued:
            # It holds until the next user message: then the template may drop all this thinking.
            loop = self.position(self._seen(self.view, self._loop))
            if loop > last:
                found.append(Boundary(loop, "turn", durable=False))
        elif not self.every_turn:
            # It holds only if an answer follows, and not if another message of the user does.
            answered = self.position(around.answered)
            if answered >= last + APART:
                found.append(Boundary(answered, "user", durable=False))
        return _distinct(found, len(self.encoded.tokens))

    def marks(self) -> tuple[int, ...]:
        """Give the positions of marked messages' ends. A message without text, such as a tool call,
        is marked where the next message's text begins, or else where the nearest text before it
        ends."""
        wanted = set(self.context.marked)
        places = dict(self.ends)
        places.update((SYSTEM_AND_TOOLS, b.position) for b in self.boundaries if b.kind == "system")
        found = {places[m] for m in wanted if m in places}
        last = len(self.chat) - 1
        lost = [m for m in wanted - places.keys() if 0 <= m <= last]
        begins = self._located(begin=True) if any(m < last for m in lost) else {}
        for m in lost:
            place = begins.get(m + 1)
            if m == last:
                loop = [b.position for b in self.boundaries if b.kind == "turn" and not b.durable]
                place = self.generation if self.continued or not loop else max(loop)
            place = place or max((p for i, p in places.items() if i < m), default=0)
            if place:
                found.add(place)
        return tuple(sorted(found))

    def position(self, place: CommonPlace) -> int:
        """Count the tokens that the prompt and the probes have in common at their beginning."""
        return self.encoder.edge(self.encoded, place.at, place.tails) or 0

    def _system_end(self) -> int:
        """Find the end of system and tools, which other chats share; 0 where there is none."""
        chat = self.chat[: self.system]

        def probed() -> FoundPlaces:
            return FoundPlaces(self.whole.common(self._probe(chat, probes.BEFORE_A_QUESTION)))

        about = ("system", chat, self.context.tools, self.context.template)
        position = self.position(self.places.remembered(about, self.text, probed).system)
        # With nothing before the chat but the header of its first message, there is no such end.
        alone = not (chat or self.context.tools) and position < 2 * APART
        return 0 if alone else position

    def _around(self) -> FoundPlaces:
        """Find the places around the question. Every step of a tool loop asks for them again."""
        # The end of a view without all steps says nothing about the places of the question.
        view = self.view if self.view.has_steps else self.whole
        asked = self.chat[: self.user + 1]
        about = (self.every_turn, asked, self.context.tools, self.context.template)
        return self.places.remembered(about, self.text, lambda: self._seen(view, self._probed))

    def _probed(self, view: View) -> FoundPlaces:
        before, asked = view.chat[: view.user], view.chat[: view.user + 1]
        turn = BEGINNING
        if view.user > self.system and not self.every_turn:
            turn = view.common(self._probe(before, probes.BEFORE_A_QUESTION))
        answered = self._probe(asked, probes.after_a_question(self.context.tools))
        if not answered:
            return FoundPlaces(turn=turn)
        # The question alone, without what follows it in this chat.
        last = len(asked) == len(view.chat) and not self.continued
        alone = view.text if last else self._attempt(asked)
        answered += [alone] if alone is not None else []
        user = view.common([*answered, *self._probe(asked, probes.INTERRUPTED)])
        return FoundPlaces(turn=turn, user=user, answered=view.common(answered))

    def _loop(self, view: View) -> CommonPlace:
        return view.common(self._probe(view.chat, probes.in_a_loop(self.context.tools)))

    def _probe(self, chat: list[Message], endings: Iterable[probes.ProbeEnding]) -> list[str]:
        """Render the chat with each of the endings; give none where the template refuses one that
        is needed."""
        renders = []
        for ending in endings:
            attempts = (self._attempt([*chat, *e]) for e in ending.tried)
            accepted = next((a for a in attempts if a is not None), None)
            if accepted is not None:
                renders.append(accepted)
            elif ending.needed:
                return []
        return renders

    def _attempt(self, chat: list[Message], *, generation: bool = True) -> str | None:
        return self.template.attempt(chat, self.context, generation=generation)

    def _seen(self, view: View, find: Callable[[View], T]) -> T:
        """Find something in a view, or else in the whole chat."""
        try:
            return find(view)
        except probes.NotInView:
            return find(self.whole)

    def _of_every_turn(self, proven: int) -> Iterable[Boundary]:
        """Find the ends of the user's messages, and of those before them. The ends inside a tool
        loop are left out: they would be new to the grid once the loop is over."""
        roles = [m["role"] for m in self.chat]
        kinds: dict[int, Kind] = {self.user: "user", self.user - 1: "turn"}
        for i, position in self.ends.items():
            turns = "user" in roles[i : i + 2]
            if turns and self.system <= i <= self.user and position <= proven:
                yield Boundary(position, kinds.get(i))


class Places:
    """The remembered places of chats, which chats that begin with the same messages share.

    Only places that these messages alone decide are remembered. Otherwise the grid of `exact` would
    depend on which chat came first.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[int, FoundPlaces]] = OrderedDict()
        self._lock = threading.Lock()

    def remembered(self, about: object, text: str, find: Callable[[], FoundPlaces]) -> FoundPlaces:
        """Give the places in a text, found or remembered. `about` is all that decides them."""
        key = hash(repr(about))
        with self._lock:
            beginning, places = self._known.get(key, (0, None))
        # A template may write the date, so that the remembered text is yesterday's.
        if places is None or beginning != _beginning(text, places):
            places = find()
            if not all(place.goes_with for place in places):
                return places
        with self._lock:
            self._known[key] = _beginning(text, places), places
            self._known.move_to_end(key)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return places


def _beginning(text: str, places: FoundPlaces) -> int:
    """Give the hash of a text up to the last of the places."""
    return hash(text[: max(place.at for place in places)])


def _distinct(found: list[Boundary], stop: int) -> tuple[Boundary, ...]:
    """Give the boundaries in order, one for each position. A durable boundary is preferred, and
    then one with a kind."""
    best: dict[int, Boundary] = {}
    for boundary in sorted(found, key=_rank):
        # The last token of a prompt is left to the first decode step.
        if boundary.position >= stop:
            boundary = replace(boundary, position=stop - 1)
        best[boundary.position] = boundary
    return tuple(best[position] for position in sorted(best) if position > 0)


def _rank(boundary: Boundary) -> tuple[bool, bool]:
    return boundary.durable, boundary.kind is not None

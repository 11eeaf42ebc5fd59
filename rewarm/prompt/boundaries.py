"""Where the messages of a rendered chat end, and which of these ends no further turn moves."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rewarm.cache.placement import Boundary, Kind

from .edges import Edges
from .encoder import Encoded
from .messages import Message, is_system
from .probes import Slot, after_a_question, before_a_question, in_a_loop, interrupted
from .tags import Tags
from .template import Context, Template
from .text import common_text

TAIL = 32
"""Characters of a probe after the common text: enough to show which tokens it changes."""

APART = 8
"""Tokens between two points that are worth two checkpoints."""

KEPT_SYSTEMS = 256


@dataclass(frozen=True)
class MessageEnd:
    """Where a message's content ends, in tokens."""

    index: int
    role: str
    position: int


class Common(NamedTuple):
    """What several renderings begin with."""

    text: str
    tails: tuple[str, ...]


@dataclass(frozen=True)
class Rendered:
    """A chat, its text and its tokens."""

    chat: list[Message]
    context: Context
    encoded: Encoded
    continued: bool = False
    """Whether the answer continues the last message."""

    @property
    def text(self) -> str:
        return self.encoded.text

    @property
    def system(self) -> int:
        """How many messages lead the chat that are the system's."""
        leading = (i for i, m in enumerate(self.chat) if not is_system(m))
        return next(leading, len(self.chat))

    @property
    def user(self) -> int:
        """The last message of the user; the last of all where there is none."""
        users = [i for i, m in enumerate(self.chat) if m["role"] == "user"]
        return users[-1] if users else len(self.chat) - 1


class Finder:
    """Finds boundaries in a number of renders that does not depend on the chat's length."""

    def __init__(self, template: Template, edges: Edges) -> None:
        self._template = template
        self._edges = edges
        self._systems: OrderedDict[bytes, Common] = OrderedDict()
        self._lock = threading.Lock()

    def message_ends(self, rendered: Rendered) -> tuple[MessageEnd, ...]:
        """Every message whose content the template has copied, by one tagged render."""
        tags = Tags(rendered.text)
        tagged = tags.tagged(rendered.chat, continued=rendered.continued)
        return tuple(
            MessageEnd(i, rendered.chat[i]["role"], position)
            for i, position in self._located(rendered, tags, tagged).items()
        )

    def message_begins(self, rendered: Rendered) -> dict[int, int]:
        """Where the contents begin, in tokens, by message; by one more tagged render."""
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

    def generation(self, rendered: Rendered, ends: Sequence[MessageEnd]) -> int:
        """Where the generation prompt begins, or the answer that is continued."""
        chat = rendered.chat[:-1] if rendered.continued else rendered.chat
        without = chat and self._template.attempt(chat, rendered.context, generation=False)
        if without and without != rendered.text:
            at = common_text(rendered.text, without)
            return self._edges.end(rendered.encoded, at) or 0
        # The template writes it always, or never: it is somewhere after the last message.
        return max((e.position for e in ends if e.index == len(chat) - 1), default=0)

    def boundaries(
        self, rendered: Rendered, ends: Sequence[MessageEnd], *, every_turn: bool
    ) -> tuple[Boundary, ...]:
        """The boundaries that placement uses; `every_turn` adds those of all earlier turns, by a
        rule that gives the same positions again in every later turn."""
        chat, context, user = rendered.chat, rendered.context, rendered.user
        found: list[Boundary] = []
        system = self._system(rendered)
        if system is not None:
            found.append(Boundary(system, "system"))
        asked = chat[: user + 1]
        answered = self._probe(asked, context, after_a_question(context.tools))
        others = self._probe(asked, context, interrupted()) or []
        proven = self._position(rendered, answered and [*answered, *others])
        if every_turn:
            found += _of_every_turn(rendered, ends, proven or 0)
        else:
            if user > rendered.system:
                turn = self._probe(chat[:user], context, before_a_question())
                found += _boundary(self._position(rendered, turn), "turn")
            found += _boundary(proven, "user")
        if len(chat) > user + 1 and not rendered.continued:
            # Until the next message of the user: then thinking may go from all of it.
            loop = self._probe(chat, context, in_a_loop(context.tools))
            found += _beyond(found, self._position(rendered, loop), "turn", 1)
        elif not every_turn:
            # Only where an answer follows, not another message of the user.
            found += _beyond(found, self._position(rendered, answered), "user", APART)
        return _distinct(found, len(rendered.encoded.tokens))

    def _system(self, rendered: Rendered) -> int | None:
        """The end of system and tools; the probes are remembered for other chats."""
        chat, context = rendered.chat[: rendered.system], rendered.context
        key = _digest(chat, context)
        with self._lock:
            common = self._systems.get(key)
        # A template may write the date: then what is remembered is yesterday's.
        if common is None or not rendered.text.startswith(common.text):
            renders = self._probe(chat, context, before_a_question())
            if not renders:
                return None
            common = _common(renders, rendered.text)
            with self._lock:
                self._systems[key] = common
                while len(self._systems) > KEPT_SYSTEMS:
                    self._systems.popitem(last=False)
        position = self._edges.edge(rendered.encoded, len(common.text), common.tails)
        # With nothing before the chat but the header of its first message, there is no such end.
        alone = not (chat or context.tools) and (position or 0) < 2 * APART
        return None if alone else position

    def _probe(
        self, chat: list[Message], context: Context, slots: Iterable[Slot]
    ) -> list[str] | None:
        """The chat with each of the endings; None where the template refuses one it needs."""
        renders = []
        for slot in slots:
            attempts = (self._template.attempt([*chat, *e], context) for e in slot.endings)
            accepted = next((a for a in attempts if a is not None), None)
            if accepted is not None:
                renders.append(accepted)
            elif slot.needed:
                return None
        return renders

    def _position(self, rendered: Rendered, renders: list[str] | None) -> int | None:
        """How many tokens the prompt and the probes begin with alike."""
        if not renders:
            return None
        common = _common(renders, rendered.text)
        return self._edges.edge(rendered.encoded, len(common.text), common.tails)


def _common(renders: list[str], text: str) -> Common:
    at = min(common_text(text, r) for r in renders)
    return Common(text[:at], tuple(r[at : at + TAIL] for r in renders))


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
    for boundary in sorted(found, key=lambda b: (b.durable, b.kind is not None)):
        # The last token of a prompt is left to the first decode step.
        position = min(boundary.position, stop - 1)
        if position > 0:
            best[position] = replace(boundary, position=position)
    return tuple(best[p] for p in sorted(best))


def _digest(chat: list[Message], context: Context) -> bytes:
    words = repr((chat, context.tools, dict(context.options)))
    return hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=16).digest()

"""What a chat's probes are made on: its end, where that renders as it does in the whole chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .messages import Message
from .text import common_end, common_text

TURNS = 2
"""Questions before the last one that are kept."""

STEPS = 4
"""Steps at the end of a tool loop that are kept."""

WORTH = 8
"""Messages left out that are worth the one render more."""

TAIL = 32
"""Characters of a probe after the common text: enough to show which tokens it changes."""


class Unseen(Exception):
    """A place lies before what a view shows."""


class Common(NamedTuple):
    """Where a prompt and its probes part, in characters, and how the probes go on from there."""

    at: int
    tails: tuple[str, ...]


class Kept(NamedTuple):
    """A chat without most of its earlier turns, and of the steps of a loop that is under way."""

    chat: list[Message]
    user: int
    """The last message of the user."""


def shortened(chat: list[Message], system: int, user: int) -> Kept | None:
    """None where little could be left out."""
    questions = [i for i in range(system, user) if chat[i]["role"] == "user"]
    steps = [i for i in range(user + 1, len(chat)) if chat[i]["role"] == "assistant"]
    first = questions[-TURNS] if len(questions) > TURNS else system
    last = steps[-STEPS] if len(steps) > STEPS else user + 1
    kept = [*chat[:system], *chat[first : user + 1], *chat[last:]]
    return Kept(kept, system + user - first) if len(kept) + WORTH <= len(chat) else None


@dataclass(frozen=True)
class View:
    """A chat with its text, or the end of one with its own."""

    chat: list[Message]
    text: str
    user: int
    begins: int = 0
    """From here on the text is the end of the whole one."""
    left_out: int = 0
    """Characters that the whole text has more."""

    @staticmethod
    def of_end(kept: Kept, text: str, whole: str) -> View:
        begins = len(text) - common_end(text, whole)
        return View(kept.chat, text, kept.user, begins, len(whole) - len(text))

    def of_whole(self, at: int) -> int:
        """A place in the whole text. Raises Unseen."""
        if at < self.begins:
            raise Unseen
        return at + self.left_out

    def common(self, renders: Sequence[str] | None) -> Common | None:
        """Where these part from it. Raises Unseen."""
        if not renders:
            return None
        at = min(common_text(self.text, r) for r in renders)
        return Common(self.of_whole(at), tuple(r[at : at + TAIL] for r in renders))

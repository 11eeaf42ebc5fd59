"""The part of a chat that probes are rendered on: its end, if that renders as in the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rewarm.values import Message

from ..messages import REASONING
from ..text import common_end, common_text

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
    """A place in a prompt that other endings do not move."""

    at: int
    """In characters."""
    tails: tuple[str, ...]
    """The texts with which the other endings go on from there."""
    goes_with: bool = True
    """The prompt agrees with the other endings for as long as they agree with each other.

    Then the place is theirs. A prompt that leaves them earlier has a place of its own.
    """


class Kept(NamedTuple):
    """A chat without most of its earlier turns, and of the steps of a loop that is under way."""

    chat: list[Message]
    user: int
    """The last message of the user."""
    has_steps: bool
    """All that follows it was kept."""


def shortened(chat: list[Message], system: int, user: int) -> Kept | None:
    """None where little could be left out.

    A template may treat the first message of a kind in its own way, or every one that says what the
    last question says. So there is one of each kind in what is kept, and no such question is left
    out."""
    if len(chat) <= WORTH:
        return None
    before, after = range(system, user), range(user + 1, len(chat))
    questions = [i for i in before if chat[i]["role"] == "user"]
    steps = [i for i in after if chat[i]["role"] == "assistant"]
    same = [i for i in questions if chat[i]["content"] == chat[user]["content"]]
    first = _latest(chat, before, questions[: max(len(questions) - TURNS + 1, 0)], same)
    last = _latest(chat, after, steps[: max(len(steps) - STEPS + 1, 0)], [])
    kept = [*chat[:system], *chat[first : user + 1], *chat[last:]]
    if len(kept) + WORTH > len(chat):
        return None
    return Kept(kept, system + user - first, last == user + 1)


def _latest(chat: list[Message], span: range, starts: list[int], needed: list[int]) -> int:
    """The last of the starts after which one message of each kind comes, and all that is needed."""
    of_kind = {_kind(chat[i]): i for i in span}
    bound = min([*of_kind.values(), *needed], default=span.start)
    return max((i for i in starts if i <= bound), default=span.start)


def _kind(message: Message) -> tuple[str, bool, bool]:
    return message["role"], bool(message.get("tool_calls")), bool(message.get(REASONING[0]))


@dataclass(frozen=True)
class View:
    """A chat with its text, or the end of one with its own."""

    chat: list[Message]
    text: str
    user: int
    has_steps: bool = True
    """All that follows the last question is there."""
    begins: int = 0
    """From here on the text is the end of the whole one."""
    left_out: int = 0
    """Characters that the whole text has more."""

    @staticmethod
    def of_end(kept: Kept, text: str, whole: str) -> View:
        begins = len(text) - common_end(text, whole)
        return View(kept.chat, text, kept.user, kept.has_steps, begins, len(whole) - len(text))

    def of_whole(self, at: int) -> int:
        """A place in the whole text. Raises Unseen."""
        if at < self.begins:
            raise Unseen
        return at + self.left_out

    def common(self, renders: Sequence[str] | None) -> Common | None:
        """The place up to which it and these renders are alike. Raises Unseen."""
        if not renders:
            return None
        agreed = min(common_text(renders[0], r) for r in renders)
        at = min(agreed, common_text(self.text, renders[0]))
        tails = tuple(r[at : at + TAIL] for r in renders)
        return Common(self.of_whole(at), tails, goes_with=at == agreed)

"""Other endings of a chat, and the part of a chat that they are rendered on.

No further turn moves the text that all renders begin with. The endings are rendered on the end of
the chat only, if its text is the same as in the whole chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rewarm.values import Message

from ..messages import REASONING, assistant_message, tool_message
from ..text import common_end, common_text

# The questions share no first character, so that they have only the chat before them in common.
QUESTION: Message = {"role": "user", "content": "A question?"}
OTHER: Message = {"role": "user", "content": "1"}

ANSWER = assistant_message("Yes.")
THOUGHT = assistant_message("Yes.", "Hm.")

CALL_ID = "rewarm000"
"""Nine letters or digits, which Mistral's templates require."""

NAME = "rewarm"

RESULTS = ("A result", "1")

Ending = tuple[Message, ...]


@dataclass(frozen=True)
class ProbeEnding:
    """An ending that a boundary must hold for, and others to try where a template refuses it."""

    tried: tuple[Ending, ...]
    """The first one that the template takes is rendered."""
    needed: bool = True
    """The boundary is lost where the template refuses all of them."""


BEFORE_A_QUESTION = (
    ProbeEnding(((QUESTION, ANSWER, OTHER), (QUESTION,))),
    ProbeEnding(((OTHER, QUESTION), (OTHER,))),
)
"""The endings where it is the user's turn. Two questions in a row reveal templates that move
earlier text to the last question."""

ANSWERED = (ProbeEnding(((ANSWER, QUESTION),)), ProbeEnding(((THOUGHT, QUESTION),), needed=False))

INTERRUPTED = (ProbeEnding(((OTHER,),), needed=False),)
"""The ending where another message of the user comes instead of an answer."""


def after_a_question(tools: list[Any] | None) -> tuple[ProbeEnding, ...]:
    """Give the endings after a message of the user."""
    return (*ANSWERED, ProbeEnding((called(tools),), needed=False)) if tools else ANSWERED


def in_a_loop(tools: list[Any] | None) -> tuple[ProbeEnding, ...]:
    """Give the endings after a tool's result."""
    return (
        ProbeEnding((called(tools), (ANSWER, QUESTION))),
        ProbeEnding((called(tools, thought="Hm."), (THOUGHT, QUESTION)), needed=False),
    )


def called(tools: list[Any] | None, thought: str = "") -> Ending:
    name = tool_name(tools[0]) if tools else NAME
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": {}}}
    return (assistant_message("", thought, [call]), *results([call], RESULTS[0]))


def tool_name(tool: Any) -> str:
    """Give the name of a tool: templates may look it up."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else NAME


def results(calls: Iterable[dict[str, Any]], text: str, *, named: bool = False) -> Ending:
    """Make a message with a result for each call."""
    return tuple(
        tool_message(text, call.get("id") or CALL_ID, call["function"]["name"] if named else None)
        for call in calls
    )


TURNS = 2
"""Questions before the last one that are kept."""

STEPS = 4
"""Steps at the end of a tool loop that are kept."""

WORTH = 8
"""The fewest messages left out that are worth one more render."""

TAIL = 32
"""Characters of a probe after the common text that decide which tokens it changes."""


class NotInView(Exception):
    """A place lies before the part that a view shows."""


class CommonPlace(NamedTuple):
    """A place in a prompt that other endings do not move."""

    at: int
    """In characters."""
    tails: tuple[str, ...] = ()
    """The texts with which the other endings go on from there."""
    goes_with: bool = True
    """The prompt agrees with the other endings as far as they agree with each other: the place does
    not depend on how this prompt goes on."""


BEGINNING = CommonPlace(0)
"""The place where no other is found."""


@dataclass(frozen=True)
class View:
    """A chat with its text, or the end of a chat with the text of that end.

    The end leaves out most earlier turns, and most steps of a loop that is under way."""

    chat: list[Message]
    text: str
    user: int
    has_steps: bool = True
    """Everything after the last question is there."""
    begins: int = 0
    """The first character from which the text is the same as the end of the whole text."""
    left_out: int = 0
    """The number of characters that only the whole text has."""

    def of_whole(self, at: int) -> int:
        """Give the same place in the whole text. Raises NotInView."""
        if at < self.begins:
            raise NotInView
        return at + self.left_out

    def common(self, renders: Sequence[str]) -> CommonPlace:
        """Find the place up to which the text and these renders are alike. Raises NotInView."""
        if not renders:
            return BEGINNING
        agreed = min(common_text(renders[0], r) for r in renders)
        at = min(agreed, common_text(self.text, renders[0]))
        tails = tuple(r[at : at + TAIL] for r in renders)
        return CommonPlace(self.of_whole(at), tails, goes_with=at == agreed)


def shortened(whole: View, system: int, render: Callable[[list[Message]], str | None]) -> View:
    """Give the end of a chat; the whole where little could be left out, or the template refuses.

    A template may treat the first message of a kind in its own way, or every message with the text
    of the last question. So a message of each kind is kept, and every such question."""
    chat, user = whole.chat, whole.user
    if len(chat) <= WORTH:
        return whole
    before, after = range(system, user), range(user + 1, len(chat))
    questions = [i for i in before if chat[i]["role"] == "user"]
    steps = [i for i in after if chat[i]["role"] == "assistant"]
    same = [i for i in questions if chat[i]["content"] == chat[user]["content"]]
    first = _latest(chat, before, questions[: max(len(questions) - TURNS + 1, 0)], same)
    last = _latest(chat, after, steps[: max(len(steps) - STEPS + 1, 0)], [])
    kept = [*chat[:system], *chat[first : user + 1], *chat[last:]]
    text = render(kept) if len(kept) + WORTH <= len(chat) else None
    if not text:
        return whole
    begins = len(text) - common_end(text, whole.text)
    left_out = len(whole.text) - len(text)
    return View(kept, text, system + user - first, last == user + 1, begins, left_out)


def _latest(chat: list[Message], span: range, starts: list[int], needed: list[int]) -> int:
    """Give the last of the starts that is followed by a message of each kind, and by all that is
    needed."""
    of_kind = {_kind(chat[i]): i for i in span}
    bound = min([*of_kind.values(), *needed], default=span.start)
    return max((i for i in starts if i <= bound), default=span.start)


def _kind(message: Message) -> tuple[str, bool, bool]:
    return message["role"], bool(message.get("tool_calls")), bool(message.get(REASONING[0]))

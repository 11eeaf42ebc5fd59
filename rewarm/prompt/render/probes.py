"""Other endings of a chat. What all of them begin with is what no further turn moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rewarm.values import Message

from ..messages import REASONING

# Questions that share no first character, so that what they have in common is the chat before them.
QUESTION: Message = {"role": "user", "content": "A question?"}
OTHER: Message = {"role": "user", "content": "1"}

ANSWER: Message = {"role": "assistant", "content": "Yes."}
THOUGHT: Message = {**ANSWER, **dict.fromkeys(REASONING, "Hm.")}

CALL_ID = "rewarm000"
"""Nine letters or digits, which Mistral's templates insist on."""

NAME = "rewarm"

RESULTS = ("A result", "1")

Ending = tuple[Message, ...]


@dataclass(frozen=True)
class Ways:
    """An ending that a boundary must hold for, and what to try where the template refuses it."""

    endings: tuple[Ending, ...]
    needed: bool = True
    """The boundary is lost where the template refuses all of them."""


BEFORE_A_QUESTION = (
    Ways(((QUESTION, ANSWER, OTHER), (QUESTION,))),
    Ways(((OTHER, QUESTION), (OTHER,))),
)
"""The ways in which a chat goes on that is the user's to continue. Two questions in a row show the
templates that move earlier text to the last one."""

ANSWERED = (Ways(((ANSWER, QUESTION),)), Ways(((THOUGHT, QUESTION),), needed=False))

INTERRUPTED = (Ways(((OTHER,),), needed=False),)
"""Another message of the user comes instead of an answer."""


def after_a_question(tools: list[Any] | None) -> tuple[Ways, ...]:
    """The ways in which a chat goes on after the user's message."""
    return (*ANSWERED, Ways((called(tools),), needed=False)) if tools else ANSWERED


def in_a_loop(tools: list[Any] | None) -> tuple[Ways, ...]:
    """The ways in which a chat goes on after a tool's result."""
    return (
        Ways((called(tools), (ANSWER, QUESTION))),
        Ways((called(tools, thought="Hm."), (THOUGHT, QUESTION)), needed=False),
    )


def called(tools: list[Any] | None, thought: str | None = None) -> Ending:
    name = _name(tools[0]) if tools else NAME
    call = {
        "id": CALL_ID,
        "type": "function",
        "function": {"name": name, "arguments": {}},
    }
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    if thought:
        message |= dict.fromkeys(REASONING, thought)
    return (message, *results([call], RESULTS[0]))


def _name(tool: Any) -> str:
    """A tool's name, as templates may look it up."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else NAME


def results(calls: Iterable[dict[str, Any]], text: str, *, named: bool = False) -> Ending:
    """A result for each call."""
    return tuple(
        {
            "role": "tool",
            "tool_call_id": call.get("id") or CALL_ID,
            **({"name": call["function"]["name"]} if named else {}),
            "content": text,
        }
        for call in calls
    )

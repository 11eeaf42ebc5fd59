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
class Slot:
    """An ending that a boundary must hold for, and what to try where the template refuses it."""

    endings: tuple[Ending, ...]
    needed: bool = True
    """Whether the boundary is lost where the template refuses all of them."""


def before_a_question() -> tuple[Slot, ...]:
    """How a chat goes on that is the user's to continue. Two questions in a row show the templates
    that move earlier text to the last one."""
    return (
        Slot(((QUESTION, ANSWER, OTHER), (QUESTION,))),
        Slot(((OTHER, QUESTION), (OTHER,))),
    )


def after_a_question(tools: list[Any] | None) -> tuple[Slot, ...]:
    """How a chat goes on after the user's message."""
    slots = (
        Slot(((ANSWER, QUESTION),)),
        Slot(((THOUGHT, QUESTION),), needed=False),
    )
    return (*slots, Slot((called(tools),), needed=False)) if tools else slots


def interrupted() -> tuple[Slot, ...]:
    """Another message of the user comes instead of an answer."""
    return (Slot(((OTHER,),), needed=False),)


def in_a_loop(tools: list[Any] | None) -> tuple[Slot, ...]:
    """How a chat goes on after a tool's result."""
    return (
        Slot((called(tools), (ANSWER, QUESTION))),
        Slot((called(tools, thought="Hm."), (THOUGHT, QUESTION)), needed=False),
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

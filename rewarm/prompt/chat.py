"""The canonical form of a request: a chat to answer, or texts to continue. All APIs share it.

Nothing here imports a model library: a gateway reads requests with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewarm.errors import InvalidPrompt
from rewarm.options import TAKEN_BY_RENDERING
from rewarm.values import Message

from .messages import AnswerParts, normalised

SYSTEM_AND_TOOLS = -1
"""The value among indices of messages that stands for the end of system and tools."""


@dataclass(frozen=True)
class Chat:
    """Messages to answer through the model's chat template."""

    messages: list[Message]
    """The canonical messages, as `normalised` gives them."""
    tools: list[Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template. Raises InvalidPrompt for one that a request may not set."""
    continue_final: bool = False
    """The answer continues the last message, which is the assistant's."""
    marked: tuple[int, ...] = ()
    """The messages whose ends are to be checkpoints, or `SYSTEM_AND_TOOLS`."""
    must_call: bool = False
    """The answer has to call a tool."""
    returned: Callable[[AnswerParts], Message] = AnswerParts.message
    """Gives the message that the client sends in the next turn for a delivered answer."""

    def __post_init__(self) -> None:
        for name in self.template:
            if not isinstance(name, str) or name in TAKEN_BY_RENDERING:
                raise InvalidPrompt(f"the template option {name!r} cannot be set by a request")


@dataclass(frozen=True)
class Text:
    """Texts, or tokens, to continue without a template. Each is a prompt of its own."""

    prompts: Sequence[str | Sequence[int]]
    echo: bool = False
    """The text of each prompt is part of its answers."""


def chat_of(messages: Sequence[Any], tools: list[Any] | None = None, **options: Any) -> Chat:
    """Make a chat from messages in any spelling. Raises InvalidPrompt."""
    return Chat(normalised(messages), tools or None, **options)

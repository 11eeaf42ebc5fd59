"""The form of a chat that templates know: one way to write each message, so that an answer that
comes back in the next turn renders as the one that was warmed ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewarm.values import Message


def assistant_message(
    text: str, reasoning: str = "", calls: Sequence[dict[str, Any]] = ()
) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": dict(call["function"])}
            for call in calls
        ]
    return message


def tool_message(text: str, call_id: str | None, name: str | None = None) -> Message:
    message: Message = {"role": "tool", "content": text}
    if call_id is not None:
        message["tool_call_id"] = call_id
    if name is not None:
        message["name"] = name
    return message

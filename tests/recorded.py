"""Requests made from recorded conversations, short enough for a model that reads bytes."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

from .support import shared

LONGEST = 160
"""Characters of a message; the system prompt has more."""
SYSTEM = 700

Body = dict[str, Any]


@cache
def _recorded() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        shared("traces/tau-bench/gpt-4o-airline.json").read_text()
    )
    return found


def conversation(number: int = 0, messages: int = 9) -> list[dict[str, Any]]:
    """The beginning of a recorded conversation, which ends with a message of the user or a tool."""
    taken: list[dict[str, Any]] = []
    for recorded in _recorded()[number]["traj"][:messages]:
        message = {k: v for k, v in recorded.items() if v is not None}
        size = SYSTEM if message["role"] == "system" else LONGEST
        message["content"] = (recorded.get("content") or "")[:size]
        taken.append(message)
    while taken[-1]["role"] == "assistant":
        taken.pop()
    return copy.deepcopy(taken)


def tools(number: int = 0) -> list[dict[str, Any]]:
    """A description of each tool that a conversation calls."""
    calls = [
        call["function"]
        for message in _recorded()[number]["traj"]
        for call in message.get("tool_calls") or ()
    ]
    found: dict[str, dict[str, Any]] = {}
    for call in calls:
        properties = {
            name: {"type": "string", "description": f"The {name.replace('_', ' ')}."}
            for name in json.loads(call["arguments"])
        }
        found[call["name"]] = {
            "type": "function",
            "function": {
                "name": call["name"],
                "description": f"Does what {call['name'].replace('_', ' ')} says.",
                "parameters": {"type": "object", "properties": properties},
            },
        }
    return copy.deepcopy(list(found.values()))


def request(number: int = 0, messages: int = 9, **more: Any) -> Body:
    return {"messages": conversation(number, messages), "max_tokens": 2, **more}

"""Requests made from the corpus's conversations, short enough for a model that reads bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from tests import corpus

LONGEST = 160
"""The number of characters that a message is cut to. The system prompt has more."""
SYSTEM = 700

MOST = 4

Body = dict[str, Any]


def conversation(number: int = 0, messages: int = 9) -> list[dict[str, Any]]:
    """Return the beginning of a conversation, up to a message of the user or a tool."""
    taken: list[dict[str, Any]] = []
    for whole in corpus.conversations(MOST)[number][:messages]:
        message = {k: v for k, v in whole.items() if v is not None}
        size = SYSTEM if message["role"] == "system" else LONGEST
        message["content"] = (whole.get("content") or "")[:size]
        taken.append(message)
    while taken[-1]["role"] == "assistant":
        taken.pop()
    return copy.deepcopy(taken)


def user_id(body: Body) -> str:
    """Return the user's id from the first tool call."""
    calls = next(m["tool_calls"] for m in body["messages"] if m.get("tool_calls"))
    found: str = json.loads(calls[0]["function"]["arguments"])["user_id"]
    return found


def tools(number: int = 0) -> list[dict[str, Any]]:
    """Describe each tool that a conversation calls."""
    calls = [
        call["function"]
        for message in corpus.conversations(MOST)[number]
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

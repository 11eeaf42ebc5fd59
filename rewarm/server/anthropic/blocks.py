"""The content blocks of a reply: the same ones whole, as a stream, and when they come back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rewarm.generate.collect import Part

from ..sse import encoded

SIGNATURE = "rewarm"
"""Anthropic signs thinking; clients want the field and send it back."""


def content_blocks(parts: Iterable[Part]) -> list[dict[str, Any]]:
    return [block_of(part) for part in parts if is_block(part)]


def is_block(part: Part) -> bool:
    """Text of nothing but blanks is none: models put them around calls."""
    return part.kind != "text" or bool(part.text.strip())


def block_of(part: Part) -> dict[str, Any]:
    if part.call is not None:
        return {
            "type": "tool_use",
            "id": part.call["id"],
            "name": part.call["function"]["name"],
            "input": call_input(part.call),
        }
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    return {"type": "text", "text": part.text}


def call_input(call: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments; a model may have written anything."""
    try:
        found = json.loads(call["function"]["arguments"])
        encoded(found)  # Python reads numbers that no reply can hold
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}

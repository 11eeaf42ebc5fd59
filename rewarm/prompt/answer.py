"""Generated text to reasoning, content and tool calls, by mlx-lm's own parsers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine


class Piece(NamedTuple):
    """What a step added."""

    text: str
    reasoning: str


@dataclass
class Answer:
    """What has been generated so far, taken apart by mlx-lm's state machine."""

    state: Any
    tools: list[Any] | None
    parse: Callable[[str, Any], Any] | None
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    _call: str = ""
    _was: str = "normal"

    def add(self, piece: str, *, last: bool, cut: bool) -> Piece:
        """`cut`: a stop sequence ended the answer, and what was held back belongs to it."""
        self.state, segments = TextStateMachine.split(self.state, piece)
        if last and not cut:
            self.state, rest, name = TextStateMachine.flush(self.state)
            segments.append((name, rest))
        text = reasoning = ""
        for name, part in segments:
            if self._was == "tool" and name != "tool":
                text += self._finish_call()
            if name == "reasoning":
                reasoning += part
            elif name == "tool":
                self._call += part
            else:
                text += part
            self._was = name
        if last and self._was == "tool":
            text += self._finish_call()
        self.text += text
        self.reasoning += reasoning
        return Piece(text, reasoning)

    def _finish_call(self) -> str:
        """Take up the call just written; returns its text where it is none after all."""
        text, self._call = self._call, ""
        if not text.strip():
            return ""
        try:
            parsed = self.parse(text, self.tools) if self.parse is not None else json.loads(text)
            calls = [_call(c) for c in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # a parser may stumble in any way over what a model writes
            return text
        self.calls += calls
        return ""


def _call(parsed: dict[str, Any]) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    arguments = json.dumps(parsed.get("arguments", {}), ensure_ascii=False)
    return {
        "id": parsed.get("id") or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": parsed["name"], "arguments": arguments},
    }

"""Anthropic's replies, whole and as streams of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewarm.generate.collect import Choice, Delta, Event, Failed, Part, Progress

from ..errors import ApiError, anthropic_body, as_api_error
from ..sse import data, encoded
from ..usage import anthropic_usage, rewarm_object
from ..work import Work
from .blocks import SIGNATURE, block_of, content_blocks, is_block

STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}

UNWRITTEN: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""What the deltas of a block fill."""


@dataclass(frozen=True)
class Head:
    id: str
    model: str
    request_id: str
    marked: bool
    """The request has cache_control marks."""

    def message(self, **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **more,
        }


def usage_of(head: Head, work: Work, resume: int, choice: Choice | None = None) -> dict[str, Any]:
    prompt = work.runs[0].prompt
    last = max(prompt.marks, default=0) if head.marked else None
    return anthropic_usage(len(prompt.tokens), resume, last, choice)


def stop_of(choice: Choice) -> dict[str, Any]:
    """What was cut short, by a limit or because the server had to stop, has reached its maximum."""
    stopped_by = choice.answer.stopped_by if choice.finish == "stop" else None
    reason = STOP_REASONS.get(choice.finish, "max_tokens")
    return {
        "stop_reason": "stop_sequence" if stopped_by is not None else reason,
        "stop_sequence": stopped_by,
    }


def whole_message(head: Head, work: Work) -> dict[str, Any]:
    run = work.runs[0]
    choice = run.choices[0]
    resume = run.report.match.resume if run.report is not None else 0
    return head.message(
        content=content_blocks(choice.parts),
        **stop_of(choice),
        usage=usage_of(head, work, resume, choice),
        rewarm=rewarm_object(work.runs),
    )


def _content(block: dict[str, Any]) -> dict[str, Any]:
    """A block's content as a delta."""
    if block["type"] == "tool_use":
        return {"type": "input_json_delta", "partial_json": encoded(block["input"])}
    if block["type"] == "thinking":
        return {"type": "thinking_delta", "thinking": block["thinking"]}
    return {"type": "text_delta", "text": block["text"]}


@dataclass
class MessageStream:
    """The message begins when the prefill does: only then is known what the cache gave."""

    head: Head
    work: Work
    _started: bool = False
    _index: int = -1
    _kind: str | None = None
    """Of the part that is being written."""
    _open: str | None = None
    """The type of its block, once it has begun."""
    _blank: str = ""
    """The beginning of a text that has been nothing but blanks."""
    _failed: bool = False

    def opening(self) -> str:
        return ""

    def events(self, batch: Sequence[Event]) -> str:
        parts = [self._event(event) for event in batch if not self._failed]
        if self.work.over and not self._failed:
            parts.append(self._last())
        return "".join(parts)

    def idle(self) -> str:
        return data({"type": "ping"}, "ping") if self._started else ": keep-alive\n\n"

    def failure(self, error: ApiError) -> str:
        self._failed = True
        return data(anthropic_body(error, self.head.request_id), "error")

    def _event(self, event: Event) -> str:
        if isinstance(event, Progress):
            note = f": prefill {event.done}/{event.total}\n\n"
            return note if self._started else self._start(event.done) + note
        if isinstance(event, Failed):
            self.work.abandon()
            return self.failure(as_api_error(event.error))
        if isinstance(event, Delta):
            return self._start(0) + "".join([self._part(part) for part in event.parts])
        return ""

    def _start(self, resume: int) -> str:
        if self._started:
            return ""
        self._started = True
        message = self.head.message(usage=usage_of(self.head, self.work, resume))
        return data({"type": "message_start", "message": message}, "message_start")

    def _part(self, part: Part) -> str:
        """Written as `content_blocks` writes the whole of it, of which this is a piece."""
        before = ""
        if part.kind != self._kind or part.kind == "call":
            before = self._close()
            self._kind, self._blank = part.kind, ""
        if self._open is None:
            part = part._replace(text=self._blank + part.text)
            if not is_block(part):
                self._blank = part.text
                return before
        block = block_of(part)
        return before + self._enter(block) + self._add(_content(block))

    def _enter(self, block: dict[str, Any]) -> str:
        if self._open is not None:
            return ""
        self._index += 1
        self._open = block["type"]
        begun = {**block, **UNWRITTEN[block["type"]]}
        start = {"type": "content_block_start", "index": self._index, "content_block": begun}
        return data(start, "content_block_start")

    def _add(self, delta: dict[str, Any]) -> str:
        body = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return data(body, "content_block_delta")

    def _close(self) -> str:
        if self._open is None:
            return ""
        signed = ""
        if self._open == "thinking":
            signed = self._add({"type": "signature_delta", "signature": SIGNATURE})
        self._open = None
        stop = {"type": "content_block_stop", "index": self._index}
        return signed + data(stop, "content_block_stop")

    def _last(self) -> str:
        run = self.work.runs[0]
        resume = run.report.match.resume if run.report is not None else 0
        choice = run.choices[0]
        ended = {
            "type": "message_delta",
            "delta": stop_of(choice),
            "usage": usage_of(self.head, self.work, resume, choice),
            "rewarm": rewarm_object(self.work.runs),
        }
        return (
            self._start(resume)
            + self._close()
            + data(ended, "message_delta")
            + data({"type": "message_stop"}, "message_stop")
        )

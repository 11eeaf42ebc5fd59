"""Anthropic's replies, whole and as streams of events. Both have the same blocks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewarm.generate.generation import Choice, Delta, Prefilled
from rewarm.prompt.messages import Part

from ..dialect import KEEP_ALIVE, Dialect, progress_note, rewarm_object
from ..errors import ApiError
from ..exchange import data, encoded, token_figures
from .blocks import SIGNATURE, block_of, content_blocks, is_block
from .parse import MessagesRequest, error_body

STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}

UNWRITTEN: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""The fields of a block that its deltas fill."""


def usage(prompt: int, resume: int, last_mark: int, tokens: int = 0) -> dict[str, Any]:
    """Count the tokens. Anthropic counts every prompt token once: read from the cache, written to
    it because of a `cache_control` mark, or neither. `last_mark` is 0 where there is no mark, and
    `tokens` are those of the answer."""
    created = max(0, last_mark - resume)
    return {
        "input_tokens": prompt - resume - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": resume,
        "output_tokens": tokens,
    }


def stop_of(choice: Choice) -> dict[str, Any]:
    """Give the reason in Anthropic's words. It is `max_tokens` for an answer that was cut short by
    a limit or because the server had to stop."""
    stopped_by = choice.answer.stopped_by if choice.finish == "stop" else None
    reason = STOP_REASONS.get(choice.finish, "max_tokens")
    if stopped_by is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stopped_by}


def written(type: str, **fields: Any) -> str:
    """Write an event of a stream."""
    return data({"type": type, **fields}, type)


@dataclass
class MessagesDialect(Dialect):
    """Answer a conversation."""

    path = "/v1/messages"
    name = "messages"
    tag = "Anthropic"
    schema = MessagesRequest
    reply_fields = (*("id", "type", "role", "model", "content", "stop_reason", "usage", "rewarm"),)
    error_body = error_body

    _started: bool = False
    _index: int = -1
    _kind: str | None = None
    """The kind of the part that is being written."""
    _open: str | None = None
    """The type of its block, once it has begun."""
    _blank: str = ""
    """The beginning of a text, as long as it has only blanks."""

    def whole(self) -> dict[str, Any]:
        choice = self.work.choices[0]
        return {
            **self._message(content_blocks(choice.answer.parts), stop_of(choice)),
            "usage": self._usage(token_figures(self.work.costs)["cached_tokens"], choice.tokens),
            "rewarm": rewarm_object(self.work),
        }

    def progress(self, event: Prefilled) -> str:
        note = progress_note(event)
        return note if self._started or event.is_fetch else self._start(event.done) + note

    def delta(self, event: Delta) -> str:
        return self._start(0) + "".join([self._part(part) for part in event.parts])

    def last(self) -> str:
        resume, choice = token_figures(self.work.costs)["cached_tokens"], self.work.choices[0]
        usage, rewarm = self._usage(resume, choice.tokens), rewarm_object(self.work)
        ended = written("message_delta", delta=stop_of(choice), usage=usage, rewarm=rewarm)
        return self._start(resume) + self._close() + ended + written("message_stop")

    def idle(self) -> str:
        return written("ping") if self._started else KEEP_ALIVE

    def error(self, error: ApiError) -> str:
        return written(**error_body(error, self.work.exchange.id))

    def _message(self, content: Sequence[dict[str, Any]], stop: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": content,
            **stop,
        }

    def _usage(self, resume: int, tokens: int = 0) -> dict[str, Any]:
        prompt = self.work.runs[0].prompt
        return usage(len(prompt.tokens), resume, max(prompt.marks, default=0), tokens)

    def _start(self, resume: int) -> str:
        # The message begins when the prefill starts: then it is known what the cache gave.
        if self._started:
            return ""
        self._started = True
        message = self._message((), {"stop_reason": None, "stop_sequence": None})
        message["usage"] = self._usage(resume)
        return written("message_start", message=message)

    def _part(self, part: Part) -> str:
        """Write a piece of a part, so that all pieces add up to the block of `content_blocks`."""
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
        if self._open is None:
            self._index += 1
            self._open = block["type"]
            begun = {**block, **UNWRITTEN[block["type"]]}
            before += written("content_block_start", index=self._index, content_block=begun)
        return before + self._delta(_content(block))

    def _close(self) -> str:
        if self._open is None:
            return ""
        signed = ""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open = None
        return signed + written("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> str:
        return written("content_block_delta", index=self._index, delta=delta)


def _content(block: dict[str, Any]) -> dict[str, Any]:
    """Give the content of a block as a delta."""
    kind = block["type"]
    if kind == "tool_use":
        return {"type": "input_json_delta", "partial_json": encoded(block["input"])}
    return {"type": f"{kind}_delta", kind: block[kind]}

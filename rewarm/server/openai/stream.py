"""OpenAI's streams: chunks of a reply, then `[DONE]`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rewarm.generate.collect import Delta, Ended, Event, Failed, Progress

from ..errors import ApiError, as_api_error, openai_body
from ..sse import data
from ..usage import openai_usage, rewarm_object
from ..work import Work
from .reply import Head, chat_logprobs, finish_reason, text_logprobs

DONE = "data: [DONE]\n\n"


@dataclass
class OpenAIStream(ABC):
    head: Head
    work: Work
    usage: bool
    """Send a last chunk with the usage."""
    logprobs: bool
    _progress: Progress | None = None
    _held: dict[str, Any] | None = None
    """The last chunk with a finish reason, held back until it is known whether it is the last."""
    _failed: bool = False

    @abstractmethod
    def opening(self) -> str: ...

    @abstractmethod
    def _part(self, event: Delta) -> dict[str, Any]:
        """A choice with what is new."""

    @abstractmethod
    def _nothing(self) -> dict[str, Any]:
        """A choice with nothing new."""

    def events(self, batch: Sequence[Event]) -> str:
        parts = [self._event(event) for event in batch if not self._failed]
        if self.work.over and not self._failed:
            parts.append(self._last())
        return "".join(parts)

    def idle(self) -> str:
        return self._prefill() or ": keep-alive\n\n"

    def failure(self, error: ApiError) -> str:
        self._failed = True
        return data(openai_body(error)) + DONE

    def _event(self, event: Event) -> str:
        if isinstance(event, Delta):
            return data(self._body({"index": event.choice, **self._part(event)}))
        if isinstance(event, Ended):
            before = self._released()
            finish = {"finish_reason": finish_reason(event.finish)}
            self._held = self._body({"index": event.choice, **self._nothing(), **finish})
            return before
        if isinstance(event, Progress):
            self._progress = event
            return self._prefill()
        if isinstance(event, Failed):
            self.work.abandon()
            return self.failure(as_api_error(event.error))
        return ""

    def _prefill(self) -> str:
        """A comment, which clients skip: it keeps the connection alive and can be watched."""
        progress = self._progress
        if progress is None or any(choice.tokens for choice in self.work.choices):
            return ""
        return f": prefill {progress.done}/{progress.total}\n\n"

    def _body(self, *choices: dict[str, Any]) -> dict[str, Any]:
        body = self.head.body(list(choices), chunk=True)
        if self.usage:
            body["usage"] = None
        return body

    def _released(self) -> str:
        held, self._held = self._held, None
        return data(held) if held is not None else ""

    def _last(self) -> str:
        """A chunk without choices surprises clients that did not ask for the usage."""
        before = ""
        if self.usage:
            before = self._released()
            self._held = {**self._body(), "usage": openai_usage(self.work.runs)}
        if self._held is not None:
            self._held["rewarm"] = rewarm_object(self.work.runs)
        return before + self._released() + DONE


@dataclass
class ChatStream(OpenAIStream):
    _calls: dict[int, int] = field(default_factory=dict)
    """Tool calls sent so far, by choice."""

    def opening(self) -> str:
        begin = {**self._nothing(), "delta": {"role": "assistant", "content": ""}}
        return "".join(
            data(self._body({"index": i, **begin})) for i in range(len(self.work.choices))
        )

    def _part(self, event: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if event.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = event.reasoning
        if event.text:
            delta["content"] = event.text
        if event.calls:
            first = self._calls.get(event.choice, 0)
            self._calls[event.choice] = first + len(event.calls)
            delta["tool_calls"] = [{"index": first + i, **c} for i, c in enumerate(event.calls)]
        part = {**self._nothing(), "delta": delta}
        if self.logprobs:
            part["logprobs"] = chat_logprobs(self.head.texts, event.sampled)
        return part

    def _nothing(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None, "finish_reason": None}


@dataclass
class TextStream(OpenAIStream):
    echo: Sequence[str] = ()
    """The prompts' texts, where they are part of the answer; one for each choice."""
    _written: dict[int, int] = field(default_factory=dict)
    """Characters sent so far, by choice."""

    def opening(self) -> str:
        self._written = {i: len(text) for i, text in enumerate(self.echo)}
        return "".join(
            data(self._body({"index": i, **self._nothing(), "text": text}))
            for i, text in enumerate(self.echo)
        )

    def _part(self, event: Delta) -> dict[str, Any]:
        part = {**self._nothing(), "text": event.text}
        if self.logprobs:
            before = self._written.get(event.choice, 0)
            part["logprobs"], self._written[event.choice] = text_logprobs(
                self.head.texts, event.sampled, before
            )
        return part

    def _nothing(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None, "finish_reason": None}

"""OpenAI's replies, whole and as streams: chunks of a reply, then `[DONE]`."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import rewarm
from rewarm.generate.generation import Choice, Delta, Ended, Prefilled
from rewarm.values import Sampled

from ..dialect import KEEP_ALIVE, Dialect, cached_tokens, progress_note, rewarm_object
from ..errors import ApiError
from ..work import data
from .parse import ChatRequest, CompletionRequest, error_body

DONE = "data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""The value that OpenAI gives for a probability of 0, since JSON has no infinity."""

ChoiceBody = dict[str, Any]


def finish_reason(finish: str) -> str:
    """Give the reason in OpenAI's words. It is `length` for an answer that the server had to break
    off."""
    return "length" if finish == "cancelled" else finish


def finite(logprob: float | None) -> float:
    # NaN fails the comparison, too.
    return logprob if logprob is not None and logprob > LEAST_LOGPROB else LEAST_LOGPROB


@dataclass
class OpenAIDialect(Dialect):
    tag = "OpenAI"
    reply_fields = ("id", "object", "created", "model", "choices", "usage", "rewarm")
    error_body = error_body
    prefix: ClassVar[str]
    """The beginning of an id."""
    kind: ClassVar[str]
    """The `object` of a whole reply."""
    chunk: ClassVar[str]
    """The `object` of a chunk."""
    nothing: ClassVar[Any]
    """The content of a chunk in which nothing is new."""

    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _progress: Prefilled | None = None
    _held: dict[str, Any] | None = None
    """The last chunk with a finish reason, held back until it is known whether it is the last."""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.model = self.body.model or self.model
        self.logprobs = self.work.options.top_logprobs is not None

    @abstractmethod
    def whole_choice(self, index: int, choice: Choice) -> ChoiceBody:
        """Write a whole choice."""

    @abstractmethod
    def new_content(self, event: Delta) -> Any:
        """Give the part of an answer that is new."""

    @abstractmethod
    def part(self, index: int, content: Any, logprobs: Any = None) -> ChoiceBody:
        """Write a choice of a chunk."""

    @abstractmethod
    def logged(self, index: int, sampled: Sequence[Sampled]) -> Any:
        """Give the log-probabilities of a choice's next tokens; None where none are asked for."""

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, choice in enumerate(self.work.choices):
            body = self.whole_choice(i, choice)
            body["logprobs"] = self.logged(i, choice.sampled)
            body["finish_reason"] = finish_reason(choice.finish)
            choices.append(body)
        reply = self._reply(self.kind, choices)
        return {**reply, "usage": self._usage(), "rewarm": rewarm_object(self.work)}

    def delta(self, event: Delta) -> str:
        logprobs = self.logged(event.choice, event.sampled)
        return data(self._chunk(self.part(event.choice, self.new_content(event), logprobs)))

    def ended(self, event: Ended) -> str:
        before = self._released()
        choice = self.part(event.choice, self.nothing)
        choice["finish_reason"] = finish_reason(self.work.choices[event.choice].finish)
        self._held = self._chunk(choice)
        return before

    def progress(self, event: Prefilled) -> str:
        self._progress = event
        return self._prefill()

    def idle(self) -> str:
        return self._prefill() or KEEP_ALIVE

    def last(self) -> str:
        # A chunk without choices surprises clients that did not ask for the usage.
        before = ""
        if self.body.usage_in_stream:
            before = self._released()
            self._held = self._chunk()
            self._held["usage"] = self._usage()
        if self._held is not None:
            self._held["rewarm"] = rewarm_object(self.work)
        return before + self._released() + DONE

    def error(self, error: ApiError) -> str:
        return data(error_body(error, self.work.exchange.id)) + DONE

    def _prefill(self) -> str:
        """Write the progress in a comment. Clients skip it, and it keeps the connection alive."""
        progress = self._progress
        if progress is None or any(choice.tokens for choice in self.work.choices):
            return ""
        return progress_note(progress)

    def _chunk(self, *choices: ChoiceBody) -> dict[str, Any]:
        body = self._reply(self.chunk, choices)
        if self.body.usage_in_stream:
            body["usage"] = None
        return body

    def _released(self) -> str:
        held, self._held = self._held, None
        return data(held) if held is not None else ""

    def _reply(self, kind: str, choices: Sequence[ChoiceBody]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"rewarm-{rewarm.__version__}",
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(run.prompt.tokens) for run in self.work.runs)
        completion = sum(choice.tokens for choice in self.work.choices)
        thinking = sum(choice.reasoning_tokens for choice in self.work.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached_tokens(self.work)},
            "completion_tokens_details": {"reasoning_tokens": thinking},
        }


@dataclass
class ChatDialect(OpenAIDialect):
    path = "/v1/chat/completions"
    name = "chat"
    summary = "Answer a chat."
    schema = ChatRequest
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk = "chat.completion.chunk"
    nothing: ClassVar[Mapping[str, Any]] = {}
    _called: dict[int, int] = field(default_factory=dict)
    """Tool calls sent so far, by choice."""

    def whole_choice(self, index: int, choice: Choice) -> ChoiceBody:
        answer = choice.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if thinking := answer.reasoning:
            message["reasoning_content"] = message["reasoning"] = thinking
        if calls := answer.calls:
            message["tool_calls"] = calls
            message["content"] = answer.text or None
        return {"index": index, "message": message}

    def opening(self) -> str:
        begun = {"role": "assistant", "content": ""}
        indices = range(len(self.work.choices))
        return "".join(data(self._chunk(self.part(i, begun))) for i in indices)

    def new_content(self, event: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if thinking := event.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = thinking
        if text := event.text:
            delta["content"] = text
        if calls := event.calls:
            first = self._called.get(event.choice, 0)
            self._called[event.choice] = first + len(calls)
            delta["tool_calls"] = [{"index": first + i, **c} for i, c in enumerate(calls)]
        return delta

    def part(self, index: int, content: Any, logprobs: Any = None) -> ChoiceBody:
        return {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": None}

    def logged(self, index: int, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {
                **self._logged_token(s.token, s.logprob),
                "top_logprobs": [self._logged_token(a.token, a.logprob) for a in s.top],
            }
            for s in sampled
        ]
        return {"content": content, "refusal": None}

    def _logged_token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.texts.of(token)
        return {"token": text.text, "logprob": finite(logprob), "bytes": text.bytes}


@dataclass
class CompletionDialect(OpenAIDialect):
    path = "/v1/completions"
    name = "completions"
    summary = "Continue texts or tokens, without a chat template."
    schema = CompletionRequest
    prefix = "cmpl"
    kind = chunk = "text_completion"
    nothing = ""
    _logged: dict[int, int] = field(default_factory=dict)
    """Characters of the tokens whose log-probabilities were given so far, by choice."""

    @property
    def echoes(self) -> Sequence[str]:
        return [run.echo for run in self.work.runs for _ in run.choices]

    def whole_choice(self, index: int, choice: Choice) -> ChoiceBody:
        return {"index": index, "text": self.echoes[index] + choice.answer.text}

    def opening(self) -> str:
        if not self.body.echo:
            return ""
        return "".join(data(self._chunk(self.part(i, text))) for i, text in enumerate(self.echoes))

    def new_content(self, event: Delta) -> str:
        return event.text

    def part(self, index: int, content: Any, logprobs: Any = None) -> ChoiceBody:
        return {"index": index, "text": content, "logprobs": logprobs, "finish_reason": None}

    def logged(self, index: int, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        texts = [self.texts.of(s.token).text for s in sampled]
        offsets = list(accumulate(map(len, texts), initial=self._logged.get(index, 0)))
        self._logged[index] = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": [finite(s.logprob) for s in sampled],
            "top_logprobs": [
                {self.texts.of(a.token).text: finite(a.logprob) for a in s.top} for s in sampled
            ],
            "text_offset": offsets,
        }

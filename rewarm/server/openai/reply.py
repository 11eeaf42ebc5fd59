"""OpenAI's replies, whole and as streams: chunks of a reply, then `[DONE]`."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import rewarm
from rewarm.generate.generation import Choice, Delta, Ended, Generation, Progress
from rewarm.prompt.parse.texts import TokenTexts
from rewarm.values import Sampled

from ..dialect import KEEP_ALIVE, Dialect, cached_tokens, rewarm_object
from ..errors import ApiError
from ..work import data
from .parse import ChatRequest, CompletionRequest, error_body

DONE = "data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""The value that OpenAI gives where a probability is 0; JSON has no infinity."""

ChoiceBody = dict[str, Any]
NOTHING: Mapping[str, Any] = {}


def usage(generation: Generation) -> dict[str, Any]:
    prompt = sum(len(run.prompt.tokens) for run in generation.runs)
    completion = sum(choice.tokens for choice in generation.choices)
    thinking = sum(choice.reasoning_tokens for choice in generation.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(generation)},
        "completion_tokens_details": {"reasoning_tokens": thinking},
    }


def finish_reason(finish: str) -> str:
    """An answer that the server had to break off was cut short, as by a limit."""
    return "length" if finish == "cancelled" else finish


def finite(logprob: float | None) -> float:
    # Not a number fails the comparison too.
    return logprob if logprob is not None and logprob > LEAST_LOGPROB else LEAST_LOGPROB


@dataclass
class OpenAIDialect(Dialect):
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _progress: Progress | None = None
    _held: dict[str, Any] | None = None
    """The last chunk with a finish reason, held back until it is known whether it is the last."""

    tag = "OpenAI"
    reply_fields = ("id", "object", "created", "model", "choices", "usage", "rewarm")
    error_body = error_body
    prefix: ClassVar[str]
    """The beginning of an id."""
    kind: ClassVar[str]
    """The `object` of a whole reply."""
    chunk: ClassVar[str]
    """The `object` of a chunk."""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.model = self.body.model or self.model
        self.logprobs = self.work.options.top_logprobs is not None

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> ChoiceBody:
        """A whole choice, without its finish reason."""

    @abstractmethod
    def part(self, event: Delta) -> ChoiceBody:
        """A choice with what is new."""

    @abstractmethod
    def nothing(self, index: int) -> ChoiceBody:
        """A choice with nothing new."""

    def _reply(self, kind: str, choices: list[ChoiceBody]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"rewarm-{rewarm.__version__}",
            "choices": choices,
        }

    def whole(self) -> dict[str, Any]:
        choices = [
            {**self.choice(i, choice), "finish_reason": finish_reason(choice.finish)}
            for i, choice in enumerate(self.work.choices)
        ]
        body = self._reply(self.kind, choices)
        body["usage"] = usage(self.work)
        body["rewarm"] = rewarm_object(self.work)
        return body

    def delta(self, event: Delta) -> str:
        return data(self._chunk(self.part(event)))

    def ended(self, event: Ended) -> str:
        before = self._released()
        choice = self.nothing(event.choice)
        choice["finish_reason"] = finish_reason(event.finish)
        self._held = self._chunk(choice)
        return before

    def progress(self, event: Progress) -> str:
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
            self._held["usage"] = usage(self.work)
        if self._held is not None:
            self._held["rewarm"] = rewarm_object(self.work)
        return before + self._released() + DONE

    def error(self, error: ApiError) -> str:
        return data(error_body(error, self.work.exchange.id)) + DONE

    def _prefill(self) -> str:
        """A comment, which clients skip: it keeps the connection alive and can be watched."""
        progress = self._progress
        if progress is None or any(choice.tokens for choice in self.work.choices):
            return ""
        return f": prefill {progress.done}/{progress.total}\n\n"

    def _chunk(self, *choices: ChoiceBody) -> dict[str, Any]:
        body = self._reply(self.chunk, list(choices))
        if self.body.usage_in_stream:
            body["usage"] = None
        return body

    def _released(self) -> str:
        held, self._held = self._held, None
        return data(held) if held is not None else ""


@dataclass
class ChatDialect(OpenAIDialect):
    path = "/v1/chat/completions"
    name = "chat"
    summary = "Answer a chat."
    schema = ChatRequest
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk = "chat.completion.chunk"
    _called: dict[int, int] = field(default_factory=dict)
    """Tool calls sent so far, by choice."""

    def choice(self, index: int, choice: Choice) -> ChoiceBody:
        answer = choice.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if thinking := answer.reasoning:
            message["reasoning_content"] = message["reasoning"] = thinking
        if calls := answer.calls:
            message["tool_calls"] = calls
            message["content"] = answer.text or None
        logprobs = chat_logprobs(self.texts, choice.sampled) if self.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs}

    def opening(self) -> str:
        begun = {"role": "assistant", "content": ""}
        indices = range(len(self.work.choices))
        return "".join(data(self._chunk(self.nothing(i, begun))) for i in indices)

    def part(self, event: Delta) -> ChoiceBody:
        delta: dict[str, Any] = {}
        if thinking := event.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = thinking
        if text := event.text:
            delta["content"] = text
        if calls := event.calls:
            first = self._called.get(event.choice, 0)
            self._called[event.choice] = first + len(calls)
            delta["tool_calls"] = [{"index": first + i, **c} for i, c in enumerate(calls)]
        body = self.nothing(event.choice, delta)
        if self.logprobs:
            body["logprobs"] = chat_logprobs(self.texts, event.sampled)
        return body

    def nothing(self, index: int, delta: Mapping[str, Any] = NOTHING) -> ChoiceBody:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def chat_logprobs(texts: TokenTexts, sampled: Iterable[Sampled]) -> dict[str, Any]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = texts.of(token)
        return {"token": text.text, "logprob": finite(logprob), "bytes": text.bytes}

    content = [
        {**entry(s.token, s.logprob), "top_logprobs": [entry(a.token, a.logprob) for a in s.top]}
        for s in sampled
    ]
    return {"content": content, "refusal": None}


@dataclass
class CompletionDialect(OpenAIDialect):
    path = "/v1/completions"
    name = "completions"
    summary = "Continue texts or tokens, without a chat template."
    schema = CompletionRequest
    prefix = "cmpl"
    kind = chunk = "text_completion"
    _written: dict[int, int] = field(default_factory=dict)
    """Characters sent so far, by choice."""

    @property
    def echoes(self) -> Sequence[str]:
        return [run.echo for run in self.work.runs for _ in run.choices]

    def choice(self, index: int, choice: Choice) -> ChoiceBody:
        echo = self.echoes[index]
        found = text_logprobs(self.texts, choice.sampled, len(echo)) if self.logprobs else None
        return {"index": index, "text": echo + choice.answer.text, "logprobs": found}

    def opening(self) -> str:
        if not self.body.echo:
            return ""
        return "".join(
            data(self._chunk(self.nothing(i, text))) for i, text in enumerate(self.echoes)
        )

    def part(self, event: Delta) -> ChoiceBody:
        body = self.nothing(event.choice, event.text)
        if self.logprobs:
            start = self._written.get(event.choice, 0)
            body["logprobs"] = text_logprobs(self.texts, event.sampled, start)
            told = "".join(body["logprobs"]["tokens"])
            self._written[event.choice] = start + len(told)
        return body

    def nothing(self, index: int, text: str = "") -> ChoiceBody:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def text_logprobs(texts: TokenTexts, sampled: Iterable[Sampled], start: int) -> dict[str, Any]:
    """`start`: the characters before these tokens."""
    body: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for s in sampled:
        text = texts.of(s.token).text
        body["tokens"].append(text)
        body["token_logprobs"].append(finite(s.logprob))
        body["top_logprobs"].append({texts.of(a.token).text: finite(a.logprob) for a in s.top})
        body["text_offset"].append(start)
        start += len(text)
    return body

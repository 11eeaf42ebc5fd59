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

from ..dialect import KEEP_ALIVE, Dialect, progress_note, rewarm_object
from ..errors import ApiError
from ..exchange import data, token_figures
from .parse import ChatRequest, CompletionRequest, error_body

DONE = "data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""The value that OpenAI gives for a probability of 0, since JSON has no infinity."""


Content = Mapping[str, Any]
"""The field of a choice that has its content."""


def finite(logprob: float | None) -> float:
    # NaN fails the comparison, too.
    return logprob if logprob is not None and logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _choice(index: int, content: Content, logprobs: Any, finish: str | None) -> dict[str, Any]:
    # An answer that the server had to break off was cut short, in OpenAI's words.
    reason = "length" if finish == "cancelled" else finish
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


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

    _progress: str = ""
    """The progress of the prompt, in a comment."""
    _unsent: list[dict[str, Any]] = field(default_factory=list)
    """The last chunk with a finish reason, until it is known whether it is the last of all."""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = self.body.model or self.model
        self.logprobs = self.work.options.top_logprobs is not None

    @abstractmethod
    def whole_content(self, index: int, choice: Choice) -> Content: ...

    @abstractmethod
    def first_contents(self) -> Sequence[Content]:
        """Give the contents that the choices of a stream begin with."""

    @abstractmethod
    def new_content(self, event: Delta) -> Content: ...

    @abstractmethod
    def logged(self, index: int, sampled: Sequence[Sampled]) -> Any:
        """Give the log-probabilities of a choice's next tokens; None where none are asked for."""

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, choice in enumerate(self.work.choices):
            content, logprobs = self.whole_content(i, choice), self.logged(i, choice.sampled)
            choices.append(_choice(i, content, logprobs, choice.finish))
        reply = self._reply(self.kind, choices)
        return {**reply, "usage": self._usage(), "rewarm": rewarm_object(self.work)}

    def opening(self) -> str:
        return "".join(data(self._chunk(i, text)) for i, text in enumerate(self.first_contents()))

    def delta(self, event: Delta) -> str:
        logprobs = self.logged(event.choice, event.sampled)
        return data(self._chunk(event.choice, self.new_content(event), logprobs))

    def ended(self, event: Ended) -> str:
        before = self._flushed()
        nothing = self.new_content(Delta(event.choice))
        finish = self.work.choices[event.choice].finish
        self._unsent = [self._chunk(event.choice, nothing, finish=finish)]
        return before

    def progress(self, event: Prefilled) -> str:
        self._progress = progress_note(event)
        return self._prefill()

    def idle(self) -> str:
        return self._prefill() or KEEP_ALIVE

    def last(self) -> str:
        # A chunk without choices surprises clients that did not ask for the usage.
        if self.body.usage_in_stream:
            self._unsent.append({**self._reply(self.chunk, ()), "usage": self._usage()})
        if self._unsent:
            self._unsent[-1]["rewarm"] = rewarm_object(self.work)
        return self._flushed() + DONE

    def error(self, error: ApiError) -> str:
        return data(error_body(error, self.work.exchange.id)) + DONE

    def _prefill(self) -> str:
        """Write the progress, until the first token. Clients skip it, and it keeps the connection
        alive."""
        return "" if any(choice.tokens for choice in self.work.choices) else self._progress

    def _chunk(
        self, index: int, content: Content, logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        body = self._reply(self.chunk, [_choice(index, content, logprobs, finish)])
        if self.body.usage_in_stream:
            body["usage"] = None
        return body

    def _flushed(self) -> str:
        unsent, self._unsent = self._unsent, []
        return "".join(map(data, unsent))

    def _reply(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
        cached = token_figures(self.work.costs)["cached_tokens"]
        completion = sum(choice.tokens for choice in self.work.choices)
        thinking = sum(choice.reasoning_tokens for choice in self.work.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thinking},
        }


@dataclass
class ChatDialect(OpenAIDialect):
    """Answer a chat."""

    path = "/v1/chat/completions"
    name = "chat"
    schema = ChatRequest
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk = "chat.completion.chunk"
    _called: dict[int, int] = field(default_factory=dict)
    """Tool calls sent so far, by choice."""

    def whole_content(self, index: int, choice: Choice) -> Content:
        answer = choice.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if thinking := answer.reasoning:
            message["reasoning_content"] = message["reasoning"] = thinking
        if calls := answer.calls:
            message["tool_calls"] = calls
            message["content"] = answer.text or None
        return {"message": message}

    def first_contents(self) -> Sequence[Content]:
        return [{"delta": {"role": "assistant", "content": ""}} for _ in self.work.choices]

    def new_content(self, event: Delta) -> Content:
        delta: dict[str, Any] = {}
        if thinking := event.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = thinking
        if text := event.text:
            delta["content"] = text
        if calls := event.calls:
            first = self._called.get(event.choice, 0)
            self._called[event.choice] = first + len(calls)
            delta["tool_calls"] = [{"index": first + i, **c} for i, c in enumerate(calls)]
        return {"delta": delta}

    def logged(self, index: int, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = []
        for s in sampled:
            top = [self._logged_token(a.token, a.logprob) for a in s.top]
            content.append({**self._logged_token(s.token, s.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logged_token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.texts.of(token)
        return {"token": text.text, "logprob": finite(logprob), "bytes": text.bytes}


@dataclass
class CompletionDialect(OpenAIDialect):
    """Continue texts or tokens, without a chat template."""

    path = "/v1/completions"
    name = "completions"
    schema = CompletionRequest
    prefix = "cmpl"
    kind = chunk = "text_completion"
    _logged: dict[int, int] = field(default_factory=dict)
    """Characters of the tokens whose log-probabilities were given so far, by choice."""

    @property
    def echoes(self) -> Sequence[str]:
        return [run.echo for run in self.work.runs for _ in run.choices]

    def whole_content(self, index: int, choice: Choice) -> Content:
        return {"text": self.echoes[index] + choice.answer.text}

    def first_contents(self) -> Sequence[Content]:
        return [{"text": echo} for echo in self.echoes if self.body.echo]

    def new_content(self, event: Delta) -> Content:
        return {"text": event.text}

    def logged(self, index: int, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        texts = [self.texts.of(s.token).text for s in sampled]
        offsets = list(accumulate(map(len, texts), initial=self._logged.get(index, 0)))
        self._logged[index] = offsets.pop()
        tops = [{self.texts.of(a.token).text: finite(a.logprob) for a in s.top} for s in sampled]
        return {
            "tokens": texts,
            "token_logprobs": [finite(s.logprob) for s in sampled],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

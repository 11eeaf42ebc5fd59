"""OpenAI's replies, whole and as streams."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import rewarm
from rewarm.generate.collect import Choice
from rewarm.values import Sampled

from ..texts import TokenTexts
from ..usage import openai_usage, rewarm_object
from ..work import Work

LEAST_LOGPROB = -9999.0
"""What OpenAI gives where a probability is 0; JSON has no infinity."""


@dataclass(frozen=True)
class Head:
    """What every object of a reply begins with."""

    id: str
    kind: str
    """"chat.completion" or "text_completion"."""
    model: str
    texts: TokenTexts
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = f"rewarm-{rewarm.__version__}"

    def body(self, choices: list[dict[str, Any]], *, chunk: bool = False) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": f"{self.kind}.chunk"
            if chunk and self.kind == "chat.completion"
            else self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def whole_reply(head: Head, work: Work, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **head.body(choices),
        "usage": openai_usage(work.runs),
        "rewarm": rewarm_object(work.runs),
    }


def chat_choice(head: Head, index: int, choice: Choice, *, logprobs: bool) -> dict[str, Any]:
    answer = choice.answer
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = message["reasoning"] = answer.reasoning
    if choice.calls:
        message["tool_calls"] = choice.calls
        message["content"] = answer.text or None
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(head.texts, choice.sampled) if logprobs else None,
        "finish_reason": finish_reason(choice.finish),
    }


def finish_reason(finish: str) -> str:
    """An answer that the server had to break off was cut short, as by a limit."""
    return "length" if finish == "cancelled" else finish


def chat_logprobs(texts: TokenTexts, sampled: Iterable[Sampled]) -> dict[str, Any]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = texts.of(token)
        return {"token": text.text, "logprob": finite(logprob), "bytes": text.bytes}

    content = [
        {**entry(s.token, s.logprob), "top_logprobs": [entry(a.token, a.logprob) for a in s.top]}
        for s in sampled
    ]
    return {"content": content, "refusal": None}


def finite(logprob: float | None) -> float:
    # Not a number fails the comparison too.
    return logprob if logprob is not None and logprob > LEAST_LOGPROB else LEAST_LOGPROB


def text_choice(
    head: Head, index: int, choice: Choice, *, logprobs: bool, echo: str
) -> dict[str, Any]:
    found = text_logprobs(head.texts, choice.sampled, len(echo)) if logprobs else None
    return {
        "index": index,
        "text": echo + choice.answer.text,
        "logprobs": found.body if found else None,
        "finish_reason": finish_reason(choice.finish),
    }


class TextLogprobs(NamedTuple):
    body: dict[str, Any]
    end: int
    """Where the text stands after these tokens."""


def text_logprobs(texts: TokenTexts, sampled: Iterable[Sampled], start: int) -> TextLogprobs:
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
    return TextLogprobs(body, start)

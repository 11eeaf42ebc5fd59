"""A client of a chat server: it notes when each token came, and the usage."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 1800.0
"""Seconds that an answer may take. A long prompt on a slow machine is no error."""


@dataclass
class Answered:
    """One answer. `ttft` and `total` are seconds."""

    ttft: float = 0.0
    total: float = 0.0
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    counted: bool = False
    """The server said how many tokens were cached. Not all servers do."""
    finish: str = ""
    text: str = ""
    reasoning: str = ""
    times: list[float] = field(default_factory=list)
    """The moment at which each piece of text came."""

    @property
    def prefilled(self) -> int:
        return self.prompt - self.cached

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first one. None where that cannot be known: for a single token,
        and where several tokens come as one piece of text."""
        if len(self.times) < max(2, self.tokens / 2) or self.tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a client sends it back in the next turn."""
        said: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            said["reasoning_content"] = self.reasoning
        return said


def ask(
    url: str, messages: list[dict[str, Any]], max_tokens: int, more: dict[str, Any] | None = None
) -> Answered:
    """Send a chat and read the streamed answer. `more` are other fields of the request."""
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(more or {}),
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    answer = Answered()
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        for line in response:
            if line.startswith(b"data: {"):
                _take(answer, json.loads(line[6:]), time.perf_counter())
    answer.total = time.perf_counter() - began
    answer.ttft = (answer.times[0] - began) if answer.times else answer.total
    return answer


def hit(*replies: Answered) -> float:
    """Give the share of the prompts' tokens that was not computed; NaN where a server does not
    say."""
    prompt = sum(r.prompt for r in replies)
    if not prompt or not all(r.counted for r in replies):
        return math.nan
    return sum(r.cached for r in replies) / prompt


def get(url: str) -> Any:
    return json.loads(_body(url))


def read_metric(url: str, name: str) -> float:
    """Read the sum of a Prometheus metric over its labels."""
    lines = _body(f"{url}/metrics").decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name
    )


def delete(url: str) -> None:
    _body(urllib.request.Request(url, method="DELETE"))


def _body(request: str | urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        body: bytes = response.read()
    return body


def _take(answer: Answered, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices", []):
        delta = choice.get("delta", {})
        text = delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        answer.text += text
        answer.reasoning += thought
        answer.finish = choice.get("finish_reason") or answer.finish
        # A tool call and a token that is no text yet have no text, so the end counts as well.
        if text or thought or delta.get("tool_calls") or choice.get("finish_reason"):
            answer.times.append(now)
    usage = event.get("usage")
    if usage:
        answer.prompt = int(usage.get("prompt_tokens") or 0)
        answer.tokens = int(usage.get("completion_tokens") or 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        answer.cached, answer.counted = int(cached or 0), cached is not None

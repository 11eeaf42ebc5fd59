"""From the engine's thread to the event loop: tokens become text where they are made."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rewarm.prompt.parse.answer import Answer
from rewarm.values import Cost, Finish, Sampled

log = logging.getLogger("rewarm")


@dataclass(frozen=True)
class Progress:
    """Prompt tokens in the caches, and in all."""

    run: int
    done: int
    total: int


class Part(NamedTuple):
    """A stretch of an answer that is all of one kind; every call is a part of its own."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""
    call: dict[str, Any] | None = None


def parts_of(reasoning: str, text: str, calls: Sequence[dict[str, Any]]) -> Iterator[Part]:
    """What a token added, in the order in which it is delivered."""
    if reasoning:
        yield Part("thinking", reasoning)
    if text:
        yield Part("text", text)
    for call in calls:
        yield Part("call", call=call)


@dataclass(frozen=True)
class Delta:
    """What a token added to a choice; with logprobs, the tokens since the last one."""

    choice: int
    text: str = ""
    reasoning: str = ""
    calls: Sequence[dict[str, Any]] = ()
    sampled: Sequence[Sampled] = ()

    @property
    def parts(self) -> Iterator[Part]:
        return parts_of(self.reasoning, self.text, self.calls)


@dataclass(frozen=True)
class Ended:
    choice: int
    finish: str
    """"stop", "length", "tool_calls" or "cancelled"."""


@dataclass(frozen=True)
class Done:
    run: int
    report: Cost


@dataclass(frozen=True)
class Failed:
    run: int
    error: Exception


Event = Progress | Delta | Ended | Done | Failed


@dataclass
class Choice:
    """One answer as it grows."""

    answer: Answer
    tokens: int = 0
    reasoning_tokens: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Those that are delivered: all of them, or the first where one was asked for."""
    parts: list[Part] = field(default_factory=list)
    """What is delivered, in its order; no two neighbours are text, or thinking."""
    sampled: list[Sampled] = field(default_factory=list)
    """With logprobs: every token but the one that ends the answer."""
    finish: str = "cancelled"
    first_at: float = 0.0
    last_at: float = 0.0
    _silent: int = 0
    _told: int = 0

    def count(self, text: str, reasoning: str) -> None:
        """Tokens that gave nothing yet belong to what comes out next."""
        self.tokens += 1
        self._silent += 1
        if reasoning:
            self.reasoning_tokens += self._silent
        if text or reasoning:
            self._silent = 0

    def add(self, reasoning: str, text: str, calls: Sequence[dict[str, Any]]) -> None:
        self.calls += calls
        for part in parts_of(reasoning, text, calls):
            last = self.parts[-1] if self.parts else None
            if last is not None and last.kind == part.kind != "call":
                self.parts[-1] = Part(part.kind, last.text + part.text)
            else:
                self.parts.append(part)

    def untold(self) -> list[Sampled]:
        fresh = self.sampled[self._told :]
        self._told = len(self.sampled)
        return fresh


@dataclass(eq=False)
class Collector:
    """A request's sink. Nothing raises here: the engine's thread serves others too."""

    choices: list[Choice]
    deliver: Callable[[Event], None]
    """Called on the event loop."""
    loop: asyncio.AbstractEventLoop
    run: int = 0
    """Which of an HTTP request's prompts this is; its choices are numbered through."""
    stream: bool = False
    logprobs: bool = False
    one_call: bool = False
    end_tokens: frozenset[int] = frozenset()
    between: Callable[[float], None] = lambda _: None
    """Told the seconds between two tokens of a choice."""
    error: Exception | None = None
    resumed: int | None = None
    """Prompt tokens that the cache gave; None until the prefill starts."""
    _last_progress: int = -1

    @property
    def position(self) -> int:
        """Prompt tokens that are in the caches."""
        return max(self._last_progress, 0)

    def prefilled(self, done: int, total: int) -> None:
        if self.resumed is None:
            self.resumed = done
        if done != self._last_progress:
            self._last_progress = done
            self._put(Progress(self.run, done, total))

    def token(self, choice: int, sampled: Sampled) -> bool:
        try:
            return self._take(choice, sampled)
        except Exception as error:
            log.exception("an answer could not be read")
            self.error = error
            return True

    def ended(self, choice: int, reason: Finish) -> None:
        try:
            self._end(choice, reason)
        except Exception as error:
            log.exception("an answer could not be read to its end")
            self.error = error

    def done(self, report: Cost) -> None:
        if self.error is not None:
            self._put(Failed(self.run, self.error))
        else:
            self._put(Done(self.run, report))

    def failed(self, error: Exception) -> None:
        self._put(Failed(self.run, error))

    def _take(self, index: int, sampled: Sampled) -> bool:
        choice = self.choices[index]
        now = time.perf_counter()
        if choice.tokens:
            self.between(now - choice.last_at)
        else:
            choice.first_at = now
        choice.last_at = now
        piece = choice.answer.add(sampled.token)
        choice.count(piece.text or ("calls" if piece.calls else ""), piece.reasoning)
        if self.logprobs and sampled.token not in self.end_tokens:
            choice.sampled.append(sampled)
        self._add(index, piece.text, piece.reasoning, piece.calls)
        return piece.stop is not None or (self.one_call and bool(choice.calls))

    def _end(self, index: int, reason: Finish) -> None:
        choice = self.choices[index]
        piece = choice.answer.finish()
        self._add(index, piece.text, piece.reasoning, piece.calls, last=True)
        stopped = reason == "stop" or choice.answer.stopped_by is not None
        choice.finish = "tool_calls" if stopped and choice.calls else "stop" if stopped else reason
        self._put(Ended(self._number(index), choice.finish))

    def _add(
        self,
        index: int,
        text: str,
        reasoning: str,
        calls: Sequence[dict[str, Any]],
        last: bool = False,
    ) -> None:
        choice = self.choices[index]
        if self.one_call:
            calls = calls[:1] if not choice.calls else ()
        choice.add(reasoning, text, calls)
        if not self.stream:
            return
        sampled = choice.untold() if text or reasoning or calls or last else ()
        if text or reasoning or calls or sampled:
            self._put(Delta(self._number(index), text, reasoning, tuple(calls), sampled))

    def _number(self, index: int) -> int:
        return self.run * len(self.choices) + index

    def _put(self, event: Event) -> None:
        try:
            self.loop.call_soon_threadsafe(self.deliver, event)
        except RuntimeError:
            log.debug("an answer came after its event loop was closed")

"""One request for text, from its prompts to its end. Tokens become text on the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from rewarm.engine.request import Request
from rewarm.prompt.chat import Chat, Text
from rewarm.prompt.messages import AnswerParts, Part
from rewarm.prompt.parse.answer import NOTHING, Answer
from rewarm.prompt.render.renderer import Prompt
from rewarm.values import Cost, Finish, Sampled

from .options import GenerationOptions

log = logging.getLogger("rewarm")


@dataclass(frozen=True)
class Prefilled:
    """The number of prompt tokens that are ready, and of all."""

    run: int
    done: int
    total: int
    is_fetch: bool = False
    """True while lower tiers are asked for them. How many the cache gives is not known yet."""


@dataclass(frozen=True)
class Delta(AnswerParts):
    """The parts that were added to a choice since its last delta."""

    choice: int
    parts: Sequence[Part] = ()
    sampled: Sequence[Sampled] = ()
    """The choice's new tokens, if every token or logprobs were asked for."""


@dataclass(frozen=True)
class Ended:
    choice: int
    finish: str
    """"stop", "length", "tool_calls" or "cancelled"."""


@dataclass(frozen=True)
class PromptDone:
    """A prompt is answered."""

    run: int
    cost: Cost


@dataclass(frozen=True)
class PromptFailed:
    """A prompt cannot be answered."""

    run: int
    error: Exception


Event = Prefilled | Delta | Ended | PromptDone | PromptFailed
Emit = Callable[[Event], object]


@dataclass(eq=False)
class Choice:
    """One answer as it grows."""

    answer: Answer
    tokens: int = 0
    reasoning_tokens: int = 0
    sampled: list[Sampled] = field(default_factory=list)
    """All tokens, if every token or logprobs were asked for."""
    told: int = 0
    """The number of `sampled` tokens that deltas have carried."""
    finish: str = "cancelled"
    first_at: float = 0.0
    last_at: float = 0.0
    silent: int = 0
    """The tokens since its last part."""


@dataclass(eq=False)
class PromptRun:
    """One prompt with its answers; the sink of its request. Its methods are called on the thread
    that turns the engine."""

    number: int
    """The prompt's number. Choices are numbered across all prompts."""
    prompt: Prompt
    choices: list[Choice]
    options: GenerationOptions
    end_tokens: frozenset[int]
    emit: Emit
    between: Callable[[float], None] | None
    """Called with the seconds between two tokens of a choice."""
    echo: str = ""
    """The prompt's text, where it is part of the answers."""
    resumed: int | None = None
    """Prompt tokens that the cache gave; None until the prefill starts."""
    position: int = 0
    """Prompt tokens that are ready."""
    cost: Cost | None = None
    error: Exception | None = None
    miss: dict[str, Any] | None = None
    """The reason why no more of the prompt was reused, in words and figures."""

    def fetched(self, done: int, total: int) -> None:
        self._emit(Prefilled(self.number, done, total, is_fetch=True))

    def prefilled(self, done: int, total: int) -> None:
        if self.resumed is None or done != self.position:
            self.resumed = done if self.resumed is None else self.resumed
            self.position = done
            self._emit(Prefilled(self.number, done, total))

    def token(self, choice: int, sampled: Sampled) -> bool:
        chosen, options, now = self.choices[choice], self.options, time.perf_counter()
        if not chosen.tokens:
            chosen.first_at = now
        elif self.between is not None:
            self.between(now - chosen.last_at)
        chosen.last_at = now
        chosen.tokens += 1
        piece = chosen.answer.add(sampled.token)
        # Tokens that gave no part yet count for the next part.
        chosen.silent += 1
        if piece.parts:
            if piece.parts[0].kind == "thinking":
                chosen.reasoning_tokens += chosen.silent
            chosen.silent = 0
        logged = options.top_logprobs is not None and sampled.token not in self.end_tokens
        if logged or options.every_token:
            chosen.sampled.append(sampled)
        if piece.parts or options.every_token:
            self._tell(choice, piece.parts)
        return piece.stop is not None or (options.one_call and bool(piece.calls))

    def ended(self, choice: int, reason: Finish) -> None:
        chosen, rest = self.choices[choice], NOTHING
        try:
            rest = chosen.answer.finish()
        except Exception as error:
            log.exception("an answer could not be read to its end")
            self.error = error
        self._tell(choice, rest.parts)
        stopped = reason == "stop" or chosen.answer.stopped_by is not None
        called = stopped and bool(chosen.answer.calls)
        chosen.finish = "tool_calls" if called else "stop" if stopped else reason
        self._emit(Ended(self.number * len(self.choices) + choice, chosen.finish))

    def done(self, report: Cost) -> None:
        failed = self.error
        self._emit(
            PromptDone(self.number, report) if failed is None else PromptFailed(self.number, failed)
        )

    def failed(self, error: Exception) -> None:
        self._emit(PromptFailed(self.number, error))

    def _tell(self, choice: int, parts: Sequence[Part]) -> None:
        if self.options.stream:
            chosen = self.choices[choice]
            sampled = chosen.sampled[chosen.told :]
            chosen.told = len(chosen.sampled)
            if parts or sampled:
                self._emit(Delta(self.number * len(self.choices) + choice, parts, sampled))

    def _emit(self, event: Event) -> None:
        try:
            self.emit(event)
        except RuntimeError:
            log.debug("an answer came after its event loop was closed")


def nowhere(event: Event) -> None:
    """Drop an event that comes after the end."""


@dataclass(eq=False)
class Generation:
    """One request for text, with prompts and answers. It belongs to the reader of its events."""

    asked: Chat | Text
    options: GenerationOptions
    runs: list[PromptRun] = field(default_factory=list)
    pending: dict[int, Request] = field(default_factory=dict)
    """The requests that are not over, by the number of their run."""

    @property
    def over(self) -> bool:
        return not self.pending

    @property
    def choices(self) -> list[Choice]:
        return [choice for run in self.runs for choice in run.choices]

    @property
    def costs(self) -> list[Cost]:
        return [run.cost for run in self.runs if run.cost is not None]

    @property
    def chat(self) -> Chat | None:
        return self.asked if isinstance(self.asked, Chat) else None

    def take(self, event: Event) -> PromptRun | None:
        """Note an event that is about to be read. Returns the run that ends with it."""
        if not isinstance(event, (PromptDone, PromptFailed)):
            return None
        run = self.runs[event.run]
        if isinstance(event, PromptDone):
            run.cost = event.cost
        else:
            run.error = event.error
        run.emit = nowhere  # it refers to the reader, which refers to the run
        self.pending.pop(event.run, None)
        return run


@dataclass(eq=False)
class Reading(Generation):
    """A generation whose events wait until they are read, one by one."""

    events: SimpleQueue[Event] = field(default_factory=SimpleQueue)

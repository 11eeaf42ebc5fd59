"""One request for text, from its prompts to its end. Tokens become text on the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from rewarm.engine import Request, Sink
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
    """A choice gets no more parts."""

    choice: int


@dataclass(frozen=True)
class PromptOver:
    """A prompt is answered, or cannot be: its run has the cost or the error."""

    run: int


Event = Prefilled | Delta | Ended | PromptOver
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
    """"stop", "length", "tool_calls" or "cancelled"."""
    first_at: float = 0.0
    last_at: float = 0.0
    silent: int = 0
    """The tokens since its last part."""


@dataclass(eq=False)
class PromptRun(Sink):
    """One prompt with its answers; the sink of its request. Its methods are called on the thread
    that turns the engine."""

    number: int
    """The prompt's number. Choices are numbered across all prompts."""
    prompt: Prompt
    choices: list[Choice]
    options: GenerationOptions
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
    """The work that the prompt took, once all of its choices have ended."""
    error: Exception | None = None
    """The reason why the prompt cannot be answered."""
    miss: dict[str, Any] | None = None
    """The reason why no more of the prompt was reused, in words and figures."""

    def fetched(self, done: int, total: int) -> None:
        self.emit(Prefilled(self.number, done, total, is_fetch=True))

    def prefilled(self, done: int, total: int) -> None:
        if self.resumed is None or done != self.position:
            self.resumed = done if self.resumed is None else self.resumed
            self.position = done
            self.emit(Prefilled(self.number, done, total))

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
        logged = options.top_logprobs is not None and sampled.token not in chosen.answer.ends
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
        self.emit(Ended(self.number * len(self.choices) + choice))

    def done(self, report: Cost) -> None:
        self.cost = report if self.error is None else None
        self.emit(PromptOver(self.number))

    def failed(self, error: Exception) -> None:
        self.error = error
        self.emit(PromptOver(self.number))

    def _tell(self, choice: int, parts: Sequence[Part]) -> None:
        if self.options.stream:
            chosen = self.choices[choice]
            sampled = chosen.sampled[chosen.told :]
            chosen.told = len(chosen.sampled)
            if parts or sampled:
                self.emit(Delta(self.number * len(self.choices) + choice, parts, sampled))


def nowhere(event: Event) -> None:
    """Drop an event that comes after the end."""


@dataclass(eq=False)
class Generation:
    """One request for text, with prompts and answers. It belongs to the reader of its events."""

    asked: Chat | Text
    options: GenerationOptions
    runs: list[PromptRun] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """The requests of the runs."""
    pending: set[int] = field(default_factory=set)
    """The numbers of the runs whose requests were submitted and are not over."""

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
        if not isinstance(event, PromptOver):
            return None
        run = self.runs[event.run]
        run.emit = nowhere  # it refers to the reader, which refers to the run
        self.pending.discard(event.run)
        return run

    def with_answer(self, run: PromptRun) -> Chat | None:
        """Give the chat with its answer, as the next turn has it. None where there is not one
        complete answer."""
        chat, choice = self.chat, run.choices[0]
        if chat is None or len(run.choices) > 1 or choice.finish not in ("stop", "tool_calls"):
            return None
        before, answer = chat.messages, chat.returned(choice.answer)
        if chat.continue_final:
            *before, begun = before
            answer["content"] = f"{begun['content']}{answer['content']}"
        return replace(chat, messages=[*before, answer], continue_final=False)


@dataclass(eq=False)
class Reading(Generation):
    """A generation whose events wait until they are read, one by one."""

    events: SimpleQueue[Event] = field(default_factory=SimpleQueue)

"""The engine's requests. They have tokens and no text: the caller converts between the two."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rewarm.values import (
    Boundary,
    Cost,
    Finish,
    Sampled,
    Sampling,
    Tokens,
)


class Sink(Protocol):
    """A sink takes the results of a request, on the engine's thread. Every method must return soon
    and never block."""

    def fetched(self, done: int, total: int) -> None:
        """Take the number of prompt tokens that were fetched, and of all. The first call comes when
        a fetch starts, and all of them before `prefilled`."""

    def prefilled(self, done: int, total: int) -> None:
        """Take the number of prompt tokens that are ready, and of all. The first call comes when
        the prefill starts."""

    def token(self, choice: int, sampled: Sampled) -> bool:
        """Take one token of an answer, also its end-of-text token. Return True to end this
        choice."""

    def ended(self, choice: int, reason: Finish) -> None:
        """Say that this choice gets no more tokens."""

    def done(self, report: Cost) -> None:
        """Say that every choice has ended, by itself or by cancel. The last call is this one or
        `failed`."""

    def failed(self, error: Exception) -> None:
        """Say that the request cannot be answered. The last call."""


_numbers = itertools.count(1)


class Silent:
    """A sink that drops all results."""

    def fetched(self, done: int, total: int) -> None: ...
    def prefilled(self, done: int, total: int) -> None: ...
    def token(self, choice: int, sampled: Sampled) -> bool:
        return False

    def ended(self, choice: int, reason: Finish) -> None: ...
    def done(self, report: Cost) -> None: ...
    def failed(self, error: Exception) -> None: ...


@dataclass(eq=False)
class Request:
    """One prompt, and options for its answers."""

    tokens: Tokens
    sink: Sink
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    """The number of answers to the prompt, which is computed once."""
    boundaries: Sequence[Boundary] = ()
    marks: Sequence[int] = ()
    """Positions of explicit checkpoints."""
    top_logprobs: int | None = None
    """The number of alternatives to report for each token; None for no logprobs at all."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer with "stop"."""
    opening: tuple[int, ...] = ()
    """Tokens that the answer must have after its thinking, e.g. those that open a tool call."""
    opens_after: tuple[int, ...] = ()
    """The end of the thinking; empty where the answer starts with `opening`."""
    salt: str | None = None
    hint: float = 1.0
    """A value above 1 means that this prompt is likelier than others to come again."""
    name: str = ""
    """A name for the log."""
    id: int = field(default_factory=lambda: next(_numbers))
    """A unique number, by which the request is cancelled."""

"""A request as the engine sees it: tokens in, tokens out. Text is the caller's."""

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
    """Where a request's results go. Called on the engine's thread: return soon, never block."""

    def prefilled(self, done: int, total: int) -> None:
        """Prompt tokens that are in the caches, and in all. First called when prefill starts."""

    def token(self, choice: int, sampled: Sampled) -> bool:
        """One token of an answer, its end-of-text token too. True ends this choice here."""

    def ended(self, choice: int, reason: Finish) -> None:
        """No more tokens for this choice."""

    def done(self, report: Cost) -> None:
        """Every choice has ended, by itself or by cancel. The last call, unless `failed` is."""

    def failed(self, error: Exception) -> None:
        """The request cannot be answered. The last call."""


_numbers = itertools.count(1)


class Silent:
    """For whoever takes the steps himself, and asks nothing of the engine."""

    def prefilled(self, done: int, total: int) -> None: ...
    def token(self, choice: int, sampled: Sampled) -> bool:
        return False

    def ended(self, choice: int, reason: Finish) -> None: ...
    def done(self, report: Cost) -> None: ...
    def failed(self, error: Exception) -> None: ...


@dataclass(eq=False)
class Request:
    """One prompt and what is wanted for it."""

    tokens: Tokens
    sink: Sink
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    """Answers to the same prompt, which is computed once."""
    boundaries: Sequence[Boundary] = ()
    marks: Sequence[int] = ()
    """Positions of explicit checkpoints."""
    top_logprobs: int | None = None
    """How many alternatives to report for each token; None for no logprobs at all."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer with "stop"."""
    opening: tuple[int, ...] = ()
    """Tokens that the answer must have after its thinking, e.g. those that open a tool call."""
    opens_after: tuple[int, ...] = ()
    """The end of the thinking; empty where the answer starts with `opening`."""
    salt: str | None = None
    hint: float = 1.0
    """Above 1: this prompt is likelier than others to be asked for again."""
    name: str = ""
    """For the log."""
    id: int = field(default_factory=lambda: next(_numbers))
    """A number of its own, by which it is cancelled."""

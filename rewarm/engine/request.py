"""A request as the engine sees it: tokens in, tokens out. Its caller makes text of them."""

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
    """Takes the results of a request, on the engine's thread: every method returns soon and never
    blocks."""

    def prefilled(self, done: int, total: int) -> None:
        """Say how many prompt tokens are in the caches, and how many there are. First called when
        the prefill starts, or the fetch of what it goes on from."""

    def token(self, choice: int, sampled: Sampled) -> bool:
        """Take one token of an answer, its end-of-text token too. Returning True ends this
        choice."""

    def ended(self, choice: int, reason: Finish) -> None:
        """Say that this choice gets no more tokens."""

    def done(self, report: Cost) -> None:
        """Say that every choice has ended, by itself or by cancel. The last call, unless `failed`
        is."""

    def failed(self, error: Exception) -> None:
        """Say that the request cannot be answered. The last call."""


_numbers = itertools.count(1)


class Silent:
    """Drops all results."""

    def prefilled(self, done: int, total: int) -> None: ...
    def token(self, choice: int, sampled: Sampled) -> bool:
        return False

    def ended(self, choice: int, reason: Finish) -> None: ...
    def done(self, report: Cost) -> None: ...
    def failed(self, error: Exception) -> None: ...


@dataclass(eq=False)
class Request:
    """One prompt, and the answers that are wanted."""

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
    """Above 1: this prompt is likelier than others to be asked for again."""
    name: str = ""
    """A name for the log."""
    id: int = field(default_factory=lambda: next(_numbers))
    """A number of its own, by which it is cancelled."""

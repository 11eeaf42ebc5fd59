"""The messages that an engine takes: all that changes its cache or its queue.

A message is plain data. It carries the times, seeds and estimates that would differ in another run.
So the turns of an engine depend on its messages and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rewarm.cache import PrefixCache
from rewarm.cache.tiers.base import Found
from rewarm.cache.views.miss import Missed
from rewarm.values import Boundary, Match, Tokens

from .request import Request

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PromptPath:
    """The part of a prompt that the cache needs."""

    tokens: Tokens
    boundaries: Sequence[Boundary] = ()
    salt: str | None = None


@dataclass(frozen=True, eq=False)
class Submit:
    """Answer a request. It was checked, and its seed is set."""

    request: Request
    at: float
    """The time at which it was posted, by `time.perf_counter`."""
    pace: float | None = None
    """The seconds that a prompt token takes to compute, as estimated at that time; None where the
    cache has no lower tier."""


@dataclass(frozen=True)
class Cancel:
    """Stop a request. What was computed is kept."""

    request: int
    """The request's `id`."""


@dataclass(frozen=True)
class Warm:
    """Prefill all of these tokens once there is nothing else to do."""

    path: PromptPath


@dataclass(frozen=True)
class MarkIdle:
    """Note that the chat which this prompt belongs to waits for a person."""

    path: PromptPath


@dataclass(frozen=True, eq=False, kw_only=True)
class Question(Generic[T]):
    """A message that the cache answers."""

    answer: Future[T] = field(default_factory=Future)

    def asked_of(self, cache: PrefixCache) -> T:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class FindMatch(Question[Match]):
    """Say how much of a prompt could be reused now."""

    path: PromptPath
    below: Sequence[Found] = ()
    """The answers of lower tiers, which were asked before the message was posted."""

    def asked_of(self, cache: PrefixCache) -> Match:
        path = self.path
        return cache.match(path.tokens, path.salt, path.boundaries, tiers=self.below)


@dataclass(frozen=True, eq=False)
class Explain(Question[Missed]):
    """Say why no more of a prompt could be reused now."""

    path: PromptPath
    below: Sequence[Found] = ()
    other_salts: Sequence[str] = ()

    def asked_of(self, cache: PrefixCache) -> Missed:
        path, others = self.path, self.other_salts
        return cache.miss(
            path.tokens, path.salt, path.boundaries, other_salts=others, tiers=self.below
        )


@dataclass(frozen=True, eq=False)
class Clear(Question[Sequence[Future[None]]]):
    """Forget everything that is stored. The answer has a future for each deletion that lower tiers
    still have to do."""

    give_back: bool = True

    def asked_of(self, cache: PrefixCache) -> Sequence[Future[None]]:
        return cache.clear(give_back=self.give_back, wait=False)


@dataclass(frozen=True, eq=False)
class Resize(Question[None]):
    """Give the cache another budget."""

    nbytes: int

    def asked_of(self, cache: PrefixCache) -> None:
        cache.resize(self.nbytes)


@dataclass(frozen=True)
class Fetched:
    """Lower tiers have answered for a prompt."""

    sequence: int
    came: bool
    """They gave something. If not, the prompt is computed."""


@dataclass(frozen=True)
class FetchLate:
    """Compute a prompt that is still being fetched, since that is faster now. What still comes is
    kept for later requests."""

    sequence: int


@dataclass(frozen=True)
class FetchMoved:
    """Report how far the fetch of a prompt is."""

    sequence: int
    nbytes: int = 0
    """The bytes that had come when this was posted."""
    silent: float = 0.0
    """The seconds without another byte until then."""


@dataclass(frozen=True)
class Close:
    """End everything that runs. What was computed is kept."""


AboutFetch = Fetched | FetchLate | FetchMoved
Message = Submit | Cancel | Warm | MarkIdle | Question[Any] | AboutFetch | Close

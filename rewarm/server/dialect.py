"""One API's words for the same generation, and what the replies of all of them say of its cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rewarm.generate.generation import Delta, Ended, Event, Generation, Progress, RunFailed
from rewarm.options import ServerOptions
from rewarm.prompt.parse.texts import TokenTexts

from .errors import ApiError, as_api_error
from .fields import Asked
from .work import Work

KEEP_ALIVE = ": keep-alive\n\n"
"""A comment, which clients skip."""


@dataclass
class ReplyWriter(ABC):
    """The reply to one request: whole, or as a stream of the events that come of it."""

    asked: Asked
    work: Work
    model: str
    """The name that is served, for a request that names none."""
    texts: TokenTexts
    failed: bool = False

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...

    def opening(self) -> str:
        """The beginning of a stream, before anything is known."""
        return ""

    @abstractmethod
    def progress(self, event: Progress) -> str: ...

    @abstractmethod
    def delta(self, event: Delta) -> str: ...

    def ended(self, event: Ended) -> str:
        return ""

    @abstractmethod
    def last(self) -> str:
        """The end of a stream."""

    @abstractmethod
    def idle(self) -> str:
        """A sign of life."""

    @abstractmethod
    def error(self, error: ApiError) -> str:
        """An error that ends a stream."""

    def events(self, batch: Sequence[Event]) -> str:
        """Events that came together, as a part of a stream."""
        parts = [self._event(event) for event in batch if not self.failed]
        if self.work.over and not self.failed:
            parts.append(self.last())
        return "".join(parts)

    def failure(self, error: ApiError) -> str:
        """The stream ends with this error."""
        self.failed = True
        return self.error(error)

    def _event(self, event: Event) -> str:
        if isinstance(event, Delta):
            return self.delta(event)
        if isinstance(event, Progress):
            return self.progress(event)
        if isinstance(event, Ended):
            return self.ended(event)
        if isinstance(event, RunFailed):
            self.work.abandon()
            return self.failure(as_api_error(event.error))
        return ""


@dataclass(frozen=True)
class Dialect:
    """An endpoint that answers, in the words of its API."""

    path: str
    name: str
    """A name for the log and the metrics."""
    tag: str
    summary: str
    schema: type[BaseModel]
    parse: Callable[[bytes, ServerOptions], Asked]
    """Called off the event loop. Raises ApiError, or pydantic's ValidationError."""
    reply: type[ReplyWriter]
    error: Callable[[ApiError, str], dict[str, Any]]
    """The body that tells an error, with the request's id."""
    has: Sequence[str]
    """The fields of a whole reply, for the OpenAPI schema."""


def rewarm_object(generation: Generation) -> dict[str, Any]:
    """The cost of all prompts together; where there are several, the resume point is the first
    one's."""
    costs = generation.costs
    if not costs:
        return {}
    first = costs[0]
    resume = None
    if first.match.resume:
        resume = {
            "position": first.match.resume,
            "boundary": first.resumed_at,
            "tier": first.match.tier,
        }
    return {
        "cached_tokens": cached_tokens(generation),
        "replayed_tokens": sum(cost.replayed for cost in costs),
        "prefilled_tokens": sum(cost.prefilled for cost in costs),
        "resume": resume,
        "miss": miss_object(generation),
        "timings": {name: round(ms, 3) for name, ms in first.timings.items()},
    }


def miss_object(generation: Generation) -> dict[str, Any] | None:
    """Why not more of the first prompt was reused; None where all that could be was."""
    return next((run.miss for run in generation.runs if run.cost is not None), None)


def cached_tokens(generation: Generation) -> int:
    return sum(cost.match.resume for cost in generation.costs)

"""The contract of an API, and the costs in the replies of all APIs.

To add an API, write a folder with two modules. `parse.py` has a `RequestBody` for each endpoint,
which reads a body into a `ParsedRequest`; it imports no model library. `reply.py` has a `Dialect`
for each endpoint, which names that request and writes the reply: whole, as a stream, or as an
error. Then add the dialects to `DIALECTS` in `app.py`: routes, the OpenAPI schema, the log and the
metrics follow from that. `POST /v1/cache/explain` takes the bodies of all APIs, and
`parse_explained` in `app.py` tells them apart.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rewarm.generate.generation import Delta, Ended, Event, Generation, Prefilled, PromptOver
from rewarm.prompt.parse.texts import TokenTexts

from .errors import ApiError, as_api_error
from .exchange import Work, sendable, token_figures
from .fields import RequestBody

log = logging.getLogger("rewarm")

KEEP_ALIVE = ": keep-alive\n\n"
"""A comment, which clients skip."""


@dataclass
class Dialect(ABC):
    """An endpoint that answers prompts, in the words of its API. An instance writes the reply to
    one request. The docstring of a subclass is the summary in the OpenAPI schema."""

    path: ClassVar[str]
    name: ClassVar[str]
    """The endpoint's name in the log and the metrics."""
    tag: ClassVar[str]
    schema: ClassVar[type[RequestBody]]
    reply_fields: ClassVar[Sequence[str]]
    """The fields of a whole reply, for the OpenAPI schema."""
    error_body: ClassVar[Callable[[ApiError, str], dict[str, Any]]]
    """Gives the body of an error, for the id of its request."""

    body: Any
    """The request, an instance of `schema`."""
    work: Work
    model: str
    """The model's name, for a request that names none."""
    texts: TokenTexts
    failed: bool = False

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Write the reply to a request that is not streamed."""

    def opening(self) -> str:
        """Write the beginning of a stream, before anything is known."""
        return ""

    @abstractmethod
    def progress(self, event: Prefilled) -> str: ...

    @abstractmethod
    def delta(self, event: Delta) -> str: ...

    def ended(self, event: Ended) -> str:
        return ""

    @abstractmethod
    def last(self) -> str:
        """Write the end of a stream."""

    @abstractmethod
    def idle(self) -> str:
        """Write a sign of life."""

    @abstractmethod
    def error(self, error: ApiError) -> str:
        """Write an error that ends a stream."""

    async def stream(self, keep_alive: float) -> AsyncIterator[bytes]:
        """Write the reply as it comes, as server-sent events."""
        try:
            if opening := self.opening():
                yield sendable(opening)
            async for batch in self.work.batches(keep_alive):
                if part := self.events(batch) if batch else self.idle():
                    yield sendable(part)
        except Exception as error:
            log.exception("a stream could not be written")
            yield sendable(self.failure(error))

    def events(self, batch: Sequence[Event]) -> str:
        """Write events that came together, as a part of a stream."""
        parts = [self._event(event) for event in batch if not self.failed]
        if self.work.over and not self.failed:
            parts.append(self.last())
        return "".join(parts)

    def failure(self, error: Exception) -> str:
        """Write the end of a stream that fails with this error."""
        self.failed = True
        return self.error(as_api_error(error))

    def _event(self, event: Event) -> str:
        match event:
            case Delta():
                return self.delta(event)
            case Prefilled():
                return self.progress(event)
            case Ended():
                return self.ended(event)
            case PromptOver():
                error = self.work.runs[event.run].error
                if error is not None:
                    self.work.abandon()
                    return self.failure(error)
        return ""


def progress_note(event: Prefilled) -> str:
    """Write the progress of a prompt in a comment, which clients skip."""
    return f": {'fetch' if event.is_fetch else 'prefill'} {event.done}/{event.total}\n\n"


def rewarm_object(generation: Generation) -> dict[str, Any]:
    """Give the cost of a generation. Where it has several prompts, the resume point, the miss and
    the times are the first one's."""
    costs = generation.costs
    if not costs:
        return {}
    first, match = costs[0], costs[0].match
    resume = None
    if match.resume:
        resume = {"position": match.resume, "boundary": first.resumed_at, "tier": match.tier}
    figures = token_figures(costs)
    del figures["prompt_tokens"]
    return {
        **figures,
        "resume": resume,
        "miss": miss_object(generation),
        "timings": {name: round(ms, 3) for name, ms in first.timings.items()},
    }


def miss_object(generation: Generation) -> dict[str, Any] | None:
    """Give the reason why no more of the first prompt was reused; None where there is none."""
    return next((run.miss for run in generation.runs if run.cost is not None), None)

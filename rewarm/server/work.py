"""A generation that an HTTP request waits for, on the event loop, and the JSON of its response."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive

from rewarm.generate.generation import Event, Generation, PromptOver

from .errors import ApiError, as_api_error
from .exchange import Exchange

if TYPE_CHECKING:
    from .backend import Backend

log = logging.getLogger("rewarm")

# These are valid in JSON, but some readers of text take them for line ends.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


@dataclass(eq=False, kw_only=True)
class Work(Generation):
    """The generation of one HTTP request. It belongs to the event loop."""

    exchange: Exchange
    backend: Backend
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: list[Event] = field(default_factory=list)
    """Events that are not read yet."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Wakes the reader."""
    abandoned: bool = False
    """The client has gone."""
    _heard: bool = True
    _timer: asyncio.TimerHandle = field(init=False)

    def send(self, event: Event) -> None:
        """Take an event. Called on the engine's thread."""
        if isinstance(event, PromptOver):
            cost = self.runs[event.run].cost
            if cost is not None and cost.miss is not None:
                return self.backend.describe(self, event, cost.miss)
        self.hand_over(event)

    def hand_over(self, event: Event) -> None:
        """Bring an event to the event loop, from another thread."""
        try:
            self.loop.call_soon_threadsafe(self.deliver, event)
        except RuntimeError:
            log.debug("an answer came after its event loop was closed")

    def deliver(self, event: Event) -> None:
        """Give an event to the reader, if it is still there."""
        run = self.take(event)
        if run is not None:
            self.backend.note_run(self, run)
        self.events.append(event)
        self.news.set()

    def abandon(self) -> None:
        """Stop the work that still runs, since the client has gone or reads no further."""
        if not self.over:
            self.abandoned = True
            self.backend.generator.cancel(self)

    async def batches(self, keep_alive: float) -> AsyncIterator[list[Event]]:
        """Give events as they come, those that came together in one list. An empty list means that
        none came for at least `keep_alive` seconds."""
        # One timer for the stream: a timeout around every wait would cost more than the event.
        self._tick(keep_alive)
        try:
            while self.events or not self.over:
                await self.news.wait()
                self.news.clear()
                batch, self.events = self.events, []
                self._heard = True
                yield batch
        finally:
            self._timer.cancel()

    def _tick(self, keep_alive: float) -> None:
        if not self._heard:
            self.news.set()
        self._heard = False
        self._timer = self.loop.call_later(keep_alive, self._tick, keep_alive)

    async def wait_for_end(self, receive: Receive) -> bool:
        """Wait until all of it is over; False where the client went away before."""
        left = asyncio.ensure_future(_disconnect(receive))
        left.add_done_callback(lambda _: self.news.set())
        try:
            while not (self.over or left.done()):
                await self.news.wait()
                self.news.clear()
            return self.over
        finally:
            left.cancel()

    def raise_error(self) -> None:
        """Raise the error that prevented the answer, if there is one."""
        for run in self.runs:
            if run.error is not None:
                raise as_api_error(run.error)
        if any(choice.finish == "cancelled" for choice in self.choices):
            raise ApiError(503, "the server is stopping: try again later", code="not_ready")


async def _disconnect(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return sendable(encoded(content))


def sendable(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a model can write half a surrogate pair


def encoded(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def data(body: Any, event: str | None = None) -> str:
    """Write one server-sent event."""
    head = f"event: {event}\n" if event else ""
    text = encoded(body)
    if not text.isascii():
        text = text.translate(LINE_ENDS)
    return f"{head}data: {text}\n\n"

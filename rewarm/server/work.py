"""A generation that an HTTP request waits for, on the event loop, and its response."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rewarm.generate.generation import Event, Generation, PromptOver

from .errors import ApiError, as_api_error
from .exchange import Exchange

if TYPE_CHECKING:
    from .backend import Backend
    from .dialect import Dialect

log = logging.getLogger("rewarm")

# These are valid in JSON, but some readers of text take them for line ends.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


@dataclass(eq=False, kw_only=True)
class Work(Generation):
    """The generation of one HTTP request. It belongs to the event loop."""

    exchange: Exchange
    backend: Backend
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    arrived: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    """Events that are not read yet. None wakes the reader without one."""
    abandoned: bool = False
    """The client has gone."""
    _heard: bool = True
    _timer: asyncio.TimerHandle | None = None

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
        self.arrived.put_nowait(event)

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
            while not (self.over and self.arrived.empty()):
                batch = [await self.arrived.get()]
                while not self.arrived.empty():
                    batch.append(self.arrived.get_nowait())
                self._heard = True
                yield [event for event in batch if event is not None]
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _tick(self, keep_alive: float) -> None:
        if not self._heard and self.arrived.empty():
            self.arrived.put_nowait(None)
        self._heard = False
        self._timer = self.loop.call_later(keep_alive, self._tick, keep_alive)

    async def wait_for_end(self, receive: Receive) -> bool:
        """Wait until all of it is over; False where the client went away before."""
        left = asyncio.ensure_future(_disconnect(receive))
        left.add_done_callback(lambda _: self.arrived.put_nowait(None))
        try:
            while not (self.over or left.done()):
                await self.arrived.get()
            return self.over
        finally:
            left.cancel()
            self.abandon()

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


class EventStream(StreamingResponse):
    """Server-sent events, written until the work is done or the client has gone."""

    def __init__(self, reply: Dialect, keep_alive: float) -> None:
        # A proxy that buffers would hold tokens back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_parts(reply, keep_alive), headers=headers, media_type="text/event-stream")
        self.work = reply.work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.work.abandon()


async def _parts(reply: Dialect, keep_alive: float) -> AsyncIterator[bytes]:
    try:
        if opening := reply.opening():
            yield _sendable(opening)
        async for batch in reply.work.batches(keep_alive):
            if part := reply.events(batch) if batch else reply.idle():
                yield _sendable(part)
    except Exception as error:
        log.exception("a stream could not be written")
        yield _sendable(reply.failure(error))


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _sendable(encoded(content))


def _sendable(text: str) -> bytes:
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

"""A generation that an HTTP request waits for, on the event loop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rewarm.generate.generation import Event, Generation, RunDone

from .errors import ApiError, as_api_error
from .exchange import Exchange

if TYPE_CHECKING:
    from .backend import Backend
    from .dialect import ReplyWriter

log = logging.getLogger("rewarm")

# Valid in JSON, but line ends to some readers of text lines.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


@dataclass(eq=False, kw_only=True)
class Work(Generation):
    """The generation of one HTTP request. It lives on the event loop."""

    exchange: Exchange
    backend: Backend
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    arrived: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    """None: nothing happened for a while."""
    abandoned: bool = False
    """The client has gone."""
    _heard: bool = True
    _timer: asyncio.TimerHandle | None = None

    def send(self, event: Event) -> None:
        """Take an event on the engine's thread."""
        if isinstance(event, RunDone) and event.cost.miss is not None:
            self.backend.describe(self, event)
        else:
            self.loop.call_soon_threadsafe(self.deliver, event)

    def deliver(self, event: Event) -> None:
        run = self.take(event)
        if run is not None:  # whether or not somebody still waits for it
            self.backend.ran(self, run)
        self.arrived.put_nowait(event)

    def abandon(self) -> None:
        """Nobody waits any more: what still runs is stopped."""
        if not self.over:
            self.abandoned = True
            self.backend.generator.cancel(self)

    async def batches(self, keep_alive: float) -> AsyncIterator[list[Event]]:
        """Events as they come, those that came together in one list; an empty list where there was
        none for at least `keep_alive` seconds."""
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

    async def finished(self, receive: Receive) -> bool:
        """Wait for the end of it all; False where the client went away before."""
        drained = asyncio.ensure_future(self._drain())
        left = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({drained, left}, return_when=asyncio.FIRST_COMPLETED)
            return self.over
        finally:
            drained.cancel()
            left.cancel()
            self.abandon()

    async def _drain(self) -> None:
        while not self.over:
            await self.arrived.get()

    def check(self) -> None:
        """Raise what kept it from being answered."""
        for run in self.runs:
            if run.error is not None:
                raise as_api_error(run.error)
        if any(choice.finish == "cancelled" for choice in self.choices):
            raise ApiError(503, "the server is stopping: try again later", code="not_ready")


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, written until the work is done or the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, work: Work, reply: ReplyWriter, keep_alive: float) -> None:
        # A proxy that buffers would hold tokens back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.work, self.reply, self.keep_alive = work, reply, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.ensure_future(gone(receive))
        sent = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait({left, sent}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.work.abandon()
            left.cancel()
            sent.cancel()
            await asyncio.gather(left, sent, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for part in self._parts():
            if part:
                body = part.encode("utf-8", "replace")
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncIterator[str]:
        try:
            yield self.reply.opening()
            async for batch in self.work.batches(self.keep_alive):
                yield self.reply.events(batch) if batch else self.reply.idle()
        except Exception as error:
            log.exception("a stream could not be written")
            yield self.reply.failure(as_api_error(error))


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content).encode("utf-8", "replace")


def encoded(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def data(body: Any, event: str | None = None) -> str:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    text = encoded(body)
    if not text.isascii():
        text = text.translate(LINE_ENDS)
    return f"{head}data: {text}\n\n"

"""Server-sent events, written until the work is done or the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rewarm.generate.collect import Event

from .errors import ApiError, as_api_error
from .work import Work, gone

log = logging.getLogger("rewarm")

# Valid in JSON, but line ends to some readers of text lines.
LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def encoded(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def data(body: Any, event: str | None = None) -> str:
    head = f"event: {event}\n" if event else ""
    text = encoded(body)
    if not text.isascii():
        text = text.translate(LINE_ENDS)
    return f"{head}data: {text}\n\n"


class Encoder(Protocol):
    """An API's way to write events."""

    def opening(self) -> str:
        """Before anything is known."""

    def events(self, batch: Sequence[Event]) -> str: ...

    def idle(self) -> str:
        """A sign of life."""

    def failure(self, error: ApiError) -> str:
        """The stream ends with this error."""


class EventStream(Response):
    """A stream that stops its work when it cannot be sent any further."""

    media_type = "text/event-stream"

    def __init__(self, work: Work, encoder: Encoder, keep_alive: float) -> None:
        # A proxy that buffers would hold tokens back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.work, self.encoder, self.keep_alive = work, encoder, keep_alive

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
            yield self.encoder.opening()
            async for batch in self.work.batches(self.keep_alive):
                yield self.encoder.events(batch) if batch else self.encoder.idle()
        except Exception as error:
            log.exception("a stream could not be written")
            yield self.encoder.failure(as_api_error(error))

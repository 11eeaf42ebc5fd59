"""Limits on each connection: the head of a request, the progress of its body, and its reader.

They hold before anything of a request is known, so before its key is checked. uvicorn's own
protocol has no such limits. Nothing here is done for each token that is sent."""

from __future__ import annotations

import asyncio
import json
import time
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rewarm.options import ServerOptions

CHECKED_EVERY = 0.5
"""Seconds between two looks at all connections."""


async def watch(connections: set[LimitedProtocol]) -> None:
    """Close the connections that are over a limit of time, until this is cancelled."""
    while True:
        await asyncio.sleep(CHECKED_EVERY)
        now = time.monotonic()
        for connection in list(connections):
            connection.check(now)


class LimitedProtocol(HttpToolsProtocol):
    """A connection with limits. It belongs to the event loop."""

    connections: set[LimitedProtocol]  # type: ignore[assignment]
    """All connections of the server."""

    def __init__(self, limits: ServerOptions, **options: Any) -> None:
        super().__init__(**options)
        self.limits = limits
        self.since = time.monotonic()
        """The time at which the head began, or the body made its last progress."""
        self._head = 0
        """Bytes since the last head or part of a body was complete: those of a head that still
        comes, or of what lies between and after the parts of a body."""
        self._unread_since: float | None = None
        """The time since which the client has not read what was sent."""

    @property
    def is_waiting(self) -> bool:
        """True where no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _reads_body(self) -> bool:
        answers = self.cycle.response_started
        return self.cycle.more_body and not answers and not self.flow.read_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin. Where there are too many connections, the one that has waited longest for a
        request goes; where all others have a request, this one does."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            waiting = [each for each in self.connections - {self} if each.is_waiting]
            if waiting:
                min(waiting, key=lambda each: each.since).transport.abort()
            else:
                self.connections.discard(self)
                self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "there are too many connections")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.is_waiting and not self._head:
            self.since = time.monotonic()
        self._head += len(data)
        super().data_received(data)
        if self._head > self.limits.max_head:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        head = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._head = 0
        if head > self.limits.max_head:
            self._refuse_head()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        if not self.transport.is_closing():
            self.since = time.monotonic()
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()

    def check(self, now: float) -> None:
        """Close the connection if it is over a limit of time."""
        limits, unread, took = self.limits, self._unread_since, now - self.since
        if self.transport.is_closing():
            if took > limits.idle_timeout:
                self.transport.abort()
        elif unread is not None and now - unread > limits.idle_timeout:
            self.transport.abort()
        elif self.is_waiting:
            # After an answer, uvicorn's own timer closes a connection that sends nothing more.
            if self._head and took > limits.head_timeout:
                self.refuse(HTTPStatus.REQUEST_TIMEOUT, "the head of the request did not come")
            elif self.cycle is None and took > limits.head_timeout:
                self.transport.close()
        elif self._reads_body and took > limits.idle_timeout:
            self.refuse(HTTPStatus.REQUEST_TIMEOUT, "the body of the request did not come")

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer without asking the application, and close the connection."""
        if not self.is_waiting and self.cycle.response_started:
            return self.transport.abort()  # it would be read as a part of the answer
        body = json.dumps({"error": {"message": message, "type": "invalid_request_error"}})
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        )
        self.transport.write("\r\n".join((*lines, "", body)).encode())
        self.transport.close()

    def _refuse_head(self) -> None:
        limit = self.limits.max_head
        self.refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request line and headers have more than {limit:,} bytes",
        )

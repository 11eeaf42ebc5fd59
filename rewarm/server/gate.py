"""What every request passes first and every response last, as plain ASGI."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rewarm.options import ServerOptions

from .admin.page import FILES
from .errors import ApiError, as_api_error, error_response
from .exchange import Exchange

log = logging.getLogger("rewarm")

OPEN = ("/", "/health", *(f"/page/{name}" for name in FILES))
"""Paths that need no API key."""

LOCAL_NAME = re.compile(r"\.(localhost|local|internal|lan|home\.arpa)$")
ADDRESS = re.compile(r"[0-9.]+")
SANE_ID = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
DRAINED = 4
"""A body too large is read on, and dropped, up to this many times the limit: a client that is
still sending would not see the answer."""


class Gate:
    """Request id, API key, body limit; the log line, and errors that nobody caught."""

    def __init__(
        self, app: ASGIApp, options: ServerOptions, finished: Callable[[Exchange, int], None]
    ) -> None:
        self.app = app
        self.options = options
        self.finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        exchange = Exchange(_request_id(headers), scope["path"], self.finished)
        scope.setdefault("state", {})["exchange"] = exchange

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                out = MutableHeaders(scope=message)
                # OpenAI's client reads the first, Anthropic's the second.
                out["X-Request-ID"] = out["Request-ID"] = exchange.id
            await send(message)

        try:
            try:
                self._check_key(scope["path"], headers)
                self._check_host(headers)
                body = _Limited(receive, headers, self.options.max_body)
                await self.app(scope, body.receive, sending)
            except Exception as error:
                problem = as_api_error(error)
                if problem.status >= 500:
                    log.exception("request %s failed", exchange.id)
                if exchange.status is not None:
                    raise
                exchange.problem = problem.message
                response = error_response(problem, scope["path"], exchange.id)
                await response(scope, receive, sending)
        finally:
            exchange.close()

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self.options.api_key
        if key is None or path in OPEN:
            return
        given = headers.get("x-api-key")
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = bearer.strip() if given is None else given
        if given is None or not hmac.compare_digest(given.encode("latin-1"), key.encode()):
            what = "an API key is needed" if given is None else "this API key is wrong"
            raise ApiError(
                401,
                f"{what}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_host(self, headers: Headers) -> None:
        """Without a key only names that no public DNS server answers for: a web page whose name was
        made to point here would have the browser's trust."""
        if self.options.api_key is not None or self.options.allow_public:
            return
        host = headers.get("host", "").lower()
        name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if "." in name and not LOCAL_NAME.search(name) and not ADDRESS.fullmatch(name):
            raise ApiError(
                403,
                f"the host {name[:80]!r} is not this machine's own name: use an address, or set an "
                "API key",
            )


class _Limited:
    """A body, counted while it is read."""

    def __init__(self, receive: Receive, headers: Headers, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._read = 0
        length = headers.get("content-length", "")
        self._announced = int(length) if re.fullmatch("[0-9]{1,15}", length) else 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        self._read += len(message.get("body", b""))
        if max(self._read, self._announced) > self._limit:
            await self._drain(message)
            raise ApiError(
                413,
                f"the body has {max(self._read, self._announced):,} bytes or more; this server "
                f"takes {self._limit:,}",
                code="request_too_large",
            )
        return message

    async def _drain(self, message: Message) -> None:
        while message.get("more_body") and self._read <= DRAINED * self._limit:
            message = await self._receive()
            self._read += len(message.get("body", b""))


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex[:24]}"

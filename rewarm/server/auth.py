"""Check the API key, the host and the size of a body.

Nothing here imports a model library."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rewarm.options import ServerOptions

from .admin.page import FILES
from .errors import ApiError

OPEN = ("/", "/health", *(f"/page/{name}" for name in FILES))
"""Paths that need no API key."""

LOCAL_NAME = re.compile(r"\.(localhost|local|internal|lan|home\.arpa)$")
ADDRESS = re.compile(r"[0-9.]+")
DRAINED = 4
"""The most that is read and dropped of a body that is too large, as a multiple of the limit. A
client that is still sending would not see the answer."""


@dataclass
class Authorised:
    """Middleware that lets requests through which have the API key. Where no key is set, they need
    a local host's name."""

    app: ASGIApp
    options: ServerOptions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if self.options.api_key is None:
                if not self.options.allow_public:
                    _check_host(headers.get("host", "").lower())
            elif scope["path"] not in OPEN:
                _check_key(headers, self.options.api_key)
        await self.app(scope, receive, send)


def _check_key(headers: Headers, key: str) -> None:
    given = headers.get("x-api-key")
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if given is None and scheme.lower() == "bearer":
        given = bearer.strip()
    if given is None or not hmac.compare_digest(given.encode("latin-1"), key.encode()):
        what = "an API key is needed" if given is None else "this API key is wrong"
        message = f"{what}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        challenge = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=challenge)


def _check_host(host: str) -> None:
    """Refuse every host name that a public DNS server may answer for. Without a key, a web page
    could make its own name point to this server, and a browser would let the page use it."""
    name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if "." in name and not LOCAL_NAME.search(name) and not ADDRESS.fullmatch(name):
        advice = "use an address, or set an API key"
        raise ApiError(403, f"the host {name[:80]!r} is not this machine's own name: {advice}")


class Bodies:
    """The bodies that are being read. It belongs to the event loop."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._unfinished = 0
        """Bytes of the bodies that have not come to their end."""

    async def read(self, request: Request) -> bytes:
        """Read the body of a request. Refuse one of more bytes than are allowed, announced or
        counted, and one for which there is no memory beside others that are being read."""
        length = request.headers.get("content-length", "")
        size = int(length) if re.fullmatch("[0-9]{1,15}", length) else 0
        limit, read, body = self._options.max_body, 0, bytearray()
        try:
            async for part in request.stream():
                read += len(part)
                size = max(size, read)
                if size <= limit:
                    body += part
                    self._unfinished += len(part)
                elif read > DRAINED * limit:
                    break
                if self._unfinished > self._options.max_bodies:
                    retry = {"Retry-After": "5"}
                    raise ApiError(503, "too many bodies are being sent: try again", headers=retry)
        finally:
            self._unfinished -= len(body)
        if size > limit:
            message = f"the body has {size:,} bytes or more; this server takes {limit:,}"
            raise ApiError(413, message, code="request_too_large")
        return bytes(body)

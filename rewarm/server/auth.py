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


async def body_of(request: Request, limit: int) -> bytes:
    """Read the body of a request. Refuse one of more than so many bytes, announced or counted."""
    length = request.headers.get("content-length", "")
    size = int(length) if re.fullmatch("[0-9]{1,15}", length) else 0
    read, parts = 0, []
    async for part in request.stream():
        read += len(part)
        size = max(size, read)
        if size <= limit:
            parts.append(part)
        elif read > DRAINED * limit:
            break
    if size > limit:
        message = f"the body has {size:,} bytes or more; this server takes {limit:,}"
        raise ApiError(413, message, code="request_too_large")
    return b"".join(parts)

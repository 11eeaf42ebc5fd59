"""Who may ask, and how much: the API key, the host, the size of a body. Plain ASGI middleware."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rewarm.options import ServerOptions

from .admin.page import FILES
from .errors import ApiError
from .exchange import header

OPEN = ("/", "/health", *(f"/page/{name}" for name in FILES))
"""Paths that need no API key."""

LOCAL_NAME = re.compile(r"\.(localhost|local|internal|lan|home\.arpa)$")
ADDRESS = re.compile(r"[0-9.]+")
DRAINED = 4
"""A body too large is read on, and dropped, up to this many times the limit: a client that is
still sending would not see the answer."""


class Authorised:
    """Lets requests through that have the API key, or, where none is set, a local host's name."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self.app = app
        self.options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self.options.api_key is not None:
                self._check_key(scope, self.options.api_key)
            elif not self.options.allow_public:
                _check_host(scope)
        await self.app(scope, receive, send)

    def _check_key(self, scope: Scope, key: str) -> None:
        if scope["path"] in OPEN:
            return
        given = header(scope, b"x-api-key")
        scheme, _, bearer = (header(scope, b"authorization") or "").partition(" ")
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


def _check_host(scope: Scope) -> None:
    """Without a key only names that no public DNS server answers for: a web page whose name was
    made to point here would have the browser's trust."""
    host = (header(scope, b"host") or "").lower()
    name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if "." in name and not LOCAL_NAME.search(name) and not ADDRESS.fullmatch(name):
        raise ApiError(
            403,
            f"the host {name[:80]!r} is not this machine's own name: use an address, or set an "
            "API key",
        )


class BodyLimit:
    """Refuses bodies of more than so many bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            length = header(scope, b"content-length") or ""
            announced = int(length) if re.fullmatch("[0-9]{1,15}", length) else 0
            receive = _Counted(receive, self.limit, announced).receive
        await self.app(scope, receive, send)


@dataclass
class _Counted:
    """A body, counted while it is read."""

    from_client: Receive
    limit: int
    announced: int
    read: int = 0

    async def receive(self) -> Message:
        message = await self.from_client()
        if message["type"] != "http.request":
            return message
        self.read += len(message.get("body", b""))
        size = max(self.read, self.announced)
        if size > self.limit:
            while message.get("more_body") and self.read <= DRAINED * self.limit:
                message = await self.from_client()
                self.read += len(message.get("body", b""))
            raise ApiError(
                413,
                f"the body has {max(self.read, self.announced):,} bytes or more; this server "
                f"takes {self.limit:,}",
                code="request_too_large",
            )
        return message

"""The page at `/`: a chat, and the tree beside it. Its files are served as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

FOLDER = Path(__file__).parent
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = {file.name: file for file in sorted(FOLDER.iterdir()) if file.suffix in KINDS}

HEADERS = {
    # Nothing from elsewhere, nothing inline: text that a model wrote can do nothing here.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Asked for again at every load, and sent only where it has changed.
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    served = {name: file.read_bytes() for name, file in FILES.items()}
    tags = {name: f'"{hashlib.sha256(body).hexdigest()[:16]}"' for name, body in served.items()}

    def endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def send(request: Request) -> Response:
            headers = {**HEADERS, "ETag": tags[name]}
            if request.headers.get("if-none-match") == tags[name]:
                return Response(status_code=304, headers=headers)
            headers["Content-Type"] = KINDS[FILES[name].suffix]
            return Response(served[name], headers=headers)

        return send

    for name in FILES:
        path = "/" if name == "index.html" else f"/page/{name}"
        router.add_api_route(path, endpoint(name), methods=["GET", "HEAD"])
    return router

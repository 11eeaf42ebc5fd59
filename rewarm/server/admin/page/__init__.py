"""The page at `/`: a chat, and the tree beside it. Its files are served as they are."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = {
    file.name: file.read_bytes()
    for file in sorted(Path(__file__).parent.iterdir())
    if file.suffix in KINDS
}
TAGS = {name: f'"{hashlib.sha256(body).hexdigest()[:16]}"' for name, body in FILES.items()}

HEADERS = {
    # Nothing is loaded from elsewhere or inline, so text of a model cannot run as a script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A browser asks again at every load, and a file is sent only if it has changed.
    "Cache-Control": "no-cache",
}


async def send(request: Request) -> Response:
    """Send a file of the page."""
    name = request.url.path.rpartition("/")[2] or "index.html"
    headers = {**HEADERS, "ETag": TAGS[name]}
    if request.headers.get("if-none-match") == TAGS[name]:
        return Response(status_code=304, headers=headers)
    headers["Content-Type"] = KINDS[Path(name).suffix]
    return Response(FILES[name], headers=headers)


ROUTES = [
    Route("/" if name == "index.html" else f"/page/{name}", send, methods=["GET"]) for name in FILES
]

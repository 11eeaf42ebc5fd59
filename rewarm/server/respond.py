"""From a request's bytes to its schema, and from finished work to a response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from .errors import ApiError, as_api_error
from .exchange import CLIENT_GONE, Exchange
from .service import Service
from .sse import encoded
from .work import Work

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content).encode("utf-8", "replace")


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.state.exchange
    return exchange


async def parsed(request: Request, schema: type[B], service: Service) -> B:
    return await checked(request, schema.model_validate_json, service)


async def checked(request: Request, check: Callable[[bytes], T], service: Service) -> T:
    """A body, checked off the event loop: it may be large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page can have any browser send other types without asking the server first.
    if kind != "application/json":
        raise ApiError(
            415,
            f"the content type is {kind[:80]!r}: send JSON, with `Content-Type: application/json`",
        )
    body = await request.body()
    exchange = exchange_of(request)
    exchange.size = len(body)
    return await service.off_loop(exchange, check, body)


async def finished(work: Work, request: Request) -> Response | None:
    """Waits for the work; a response only where there is nobody to answer, or nothing to say."""
    if not await work.finished(request.receive):
        return Response(status_code=CLIENT_GONE)
    for run in work.runs:
        if run.error is not None:
            raise as_api_error(run.error)
    if any(choice.finish == "cancelled" for choice in work.choices):
        raise ApiError(503, "the server is stopping: try again later", code="not_ready")
    return None

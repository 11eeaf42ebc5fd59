"""The application: its endpoints, and the answer to a request in any API's words.

To add an API, add its dialects to `DIALECTS`; `dialect.py` says how to write one. Endpoints about
the server itself are in `admin/endpoints.py`."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rewarm.engine import Engine
from rewarm.options import ServerOptions

from .admin import endpoints as admin
from .admin import page
from .anthropic.parse import CountRequest
from .anthropic.reply import MessagesDialect
from .auth import Authorised
from .backend import Backend
from .dialect import Dialect
from .errors import CLIENT_GONE, SHOWN, ApiError
from .exchange import Exchanges, Json
from .fields import ParsedRequest, Salt
from .openai.parse import ChatRequest, CompletionRequest
from .openai.reply import ChatDialect, CompletionDialect
from .openapi import POST, schema_of

DIALECTS: tuple[type[Dialect], ...] = (ChatDialect, CompletionDialect, MessagesDialect)

UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The headers of a stream: a proxy that buffers would delay tokens."""

Salts = Annotated[list[Salt], Field(max_length=16)]
"""Other salts of the same tenant, under which the prompt may be known."""


class ExplainChat(ChatRequest):
    compare_salts: Salts | None = None


class ExplainCompletion(CompletionRequest):
    compare_salts: Salts | None = None


class ExplainMessages(CountRequest):
    model: str = ""
    cache_salt: Salt | None = None
    compare_salts: Salts | None = None


async def answer(backend: Backend, request: Request, dialect: type[Dialect]) -> Response:
    """Answer a request in the words of its API."""
    asked = await backend.read(request, dialect.schema.parse)
    work = await backend.begin(request, asked)
    reply = dialect(asked.body, work, backend.options.model_name, backend.generator.texts)
    if asked.options.stream:
        stream = reply.stream(backend.options.keep_alive)
        return StreamingResponse(stream, headers=UNBUFFERED, media_type="text/event-stream")
    if not await work.wait_for_end(request.receive):
        return Response(status_code=CLIENT_GONE)
    work.raise_error()
    return Json(reply.whole())


async def count(backend: Backend, request: Request) -> Response:
    """Count the tokens of a prompt, without answering it."""
    asked = await backend.read(request, CountRequest.parse)
    (prompt,) = await backend.off_loop(request, backend.generator.prompts, asked.prompt)
    return Json({"input_tokens": len(prompt.tokens)})


async def explain(backend: Backend, request: Request) -> Response:
    """Say what a request would reuse, and why not more, without running it."""
    parse = partial(parse_explained, anthropic="anthropic-version" in request.headers)
    asked = await backend.read(request, parse)
    await backend.wait_for_descriptions()
    salt, others = asked.body.cache_salt, asked.body.compare_salts or ()
    found = await backend.off_loop(request, backend.advisor.explain, asked.prompt, salt, others)
    return Json(found)


def parse_explained(body: bytes, server: ServerOptions, anthropic: bool) -> ParsedRequest:
    """Parse a body by the schema of the API that it belongs to."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None  # the schema then says what is wrong
    schema: type[ExplainChat | ExplainCompletion | ExplainMessages] = ExplainChat
    if isinstance(given, dict):
        if anthropic or _is_anthropic(given):
            schema = ExplainMessages
        elif "prompt" in given and "messages" not in given:
            schema = ExplainCompletion
    return schema.parse(body, server)


def _is_anthropic(given: dict[str, Any]) -> bool:
    blocks = ("tool_use", "tool_result", "thinking", "redacted_thinking")
    contents = [message.get("content") for message in _objects(given.get("messages"))]
    return (
        "system" in given
        or any("input_schema" in tool for tool in _objects(given.get("tools")))
        or any(block.get("type") in blocks for c in contents for block in _objects(c))
    )


def _objects(given: Any) -> list[dict[str, Any]]:
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []


ENDPOINTS = (
    *(
        POST(
            dialect.path,
            dialect.name,
            partial(answer, dialect=dialect),
            tag=dialect.tag,
            summary=dialect.__doc__,
            body=dialect.schema,
            replies={"application/json": dialect.reply_fields, "text/event-stream": ("data",)},
        )
        for dialect in DIALECTS
    ),
    POST(
        "/v1/messages/count_tokens",
        "count",
        count,
        tag="Anthropic",
        body=CountRequest,
        replies={"application/json": ("input_tokens",)},
    ),
    POST(
        "/v1/cache/explain",
        "explain",
        explain,
        body=ExplainChat,
        statuses=(400, 401, 403, 413, 415, 503),
    ),
    *admin.ENDPOINTS,
)
NAMES = {"/": "page", "/openapi.json": "schema", **{e.path: e.name for e in ENDPOINTS}}


def endpoint_name(path: str) -> str:
    """Give the name of a path for the log and the metrics."""
    if path.startswith("/page/"):
        return "page"
    return "models" if path.startswith("/v1/models/") else NAMES.get(path, "other")


def dialect_of(path: str) -> type[Dialect]:
    """Give the dialect that the client of a path reads errors in."""
    return next((d for d in reversed(DIALECTS) if path.startswith(d.path)), ChatDialect)


SCHEMA = schema_of(ENDPOINTS, lambda path: dialect_of(path).error_body(ApiError(400, ""), "req"))


def error_response(error: ApiError, path: str, request_id: str) -> Response:
    return Json(dialect_of(path).error_body(error, request_id), error.status, error.headers)


async def schema(request: Request) -> Response:
    return Json(SCHEMA)


async def no_endpoint(request: Request, error: Exception) -> Response:
    """Raise Starlette's own errors, of an unknown path or method, as those of the request's API."""
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path[:SHOWN], error.headers
    if allowed is None:
        raise ApiError(404, f"there is no {request.method} {path} here", code="not_found")
    message = f"{path} does not take {request.method}: use {allowed['Allow']}"
    raise ApiError(405, message, headers=dict(allowed))


def create_app(engine: Engine, options: ServerOptions | None = None) -> Starlette:
    """Make the server's application. The engine may still be loading."""
    options = options or ServerOptions()
    backend = Backend(engine, options, [dialect.name for dialect in DIALECTS])
    app = Starlette(
        routes=[
            Route("/openapi.json", schema, methods=["GET"]),
            *page.ROUTES,
            *(endpoint.route(backend) for endpoint in ENDPOINTS),
        ],
        middleware=[
            Middleware(Exchanges, endpoint_name, error_response, backend.note_end),
            Middleware(Authorised, options=options),
        ],
        exception_handlers={HTTPException: no_endpoint},
        lifespan=backend.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.backend = backend
    return app

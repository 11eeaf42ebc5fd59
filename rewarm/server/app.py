"""The application: what is served where, and what every error looks like."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rewarm.engine import Engine
from rewarm.errors import RewarmError
from rewarm.options import ServerOptions

from .admin import endpoints as admin
from .anthropic.chat import parse_count
from .anthropic.parse import CountRequest
from .anthropic.reply import MESSAGES
from .auth import Authorised, BodyLimit
from .backend import Backend, backend_of
from .dialect import Dialect
from .errors import ApiError, as_api_error, http_error
from .exchange import CLIENT_GONE, Exchanges, exchange_of
from .fields import Asked, Salt
from .openai.parse import ChatRequest, CompletionRequest, parse_chat, parse_completion
from .openai.reply import CHAT, COMPLETIONS
from .openapi import ANSWERING, Endpoint, schema_of
from .work import EventStream, Json

DIALECTS = (CHAT, COMPLETIONS, MESSAGES)
EXAMPLE = ApiError(400, "")

Salts = Annotated[list[Salt], Field(max_length=16)]
"""Other salts of the same tenant: whether the prompt is known under one of them."""


class ExplainChat(ChatRequest):
    compare_salts: Salts | None = None


class ExplainCompletion(CompletionRequest):
    compare_salts: Salts | None = None


class ExplainMessages(CountRequest):
    model: str = ""
    cache_salt: Salt | None = None
    compare_salts: Salts | None = None


async def answer(request: Request, dialect: Dialect) -> Response:
    """Answer a request in the words of its API."""
    backend, exchange = backend_of(request), exchange_of(request)
    asked = await backend.read(request, dialect.parse)
    work = await backend.begin(exchange, asked)
    reply = dialect.reply(asked, work, backend.options.model_name, backend.generator.texts)
    if asked.options.stream:
        return EventStream(work, reply, backend.options.keep_alive)
    if not await work.finished(request.receive):
        return Response(status_code=CLIENT_GONE)
    work.check()
    return Json(reply.whole())


async def count(request: Request) -> Response:
    """The tokens of a prompt, without answering it."""
    backend, exchange = backend_of(request), exchange_of(request)
    asked = await backend.read(request, parse_count)
    (prompt,) = await backend.off_loop(exchange, backend.generator.prompts, asked.prompt)
    return Json({"input_tokens": len(prompt.tokens)})


async def explain(request: Request) -> Response:
    """What a request would reuse, and why not more, without running it."""
    backend, exchange = backend_of(request), exchange_of(request)
    anthropic = "anthropic-version" in request.headers
    parse = partial(parse_explained, anthropic=anthropic)
    asked = await backend.read(request, parse)
    await backend.described_all()
    salts = asked.body.compare_salts or ()
    salt = asked.options.salt
    found = await backend.off_loop(exchange, backend.advisor.explain, asked.prompt, salt, salts)
    return Json(found)


def parse_explained(body: bytes, server: ServerOptions, anthropic: bool) -> Asked:
    """Parse a body by the schema of the API that it belongs to."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None  # the schema says what is wrong
    if isinstance(given, dict):
        if anthropic or _is_anthropic(given):
            return parse_count(body, server, ExplainMessages)
        if "prompt" in given and "messages" not in given:
            return parse_completion(body, server, ExplainCompletion)
    return parse_chat(body, server, ExplainChat)


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


async def schema(request: Request) -> Response:
    return JSONResponse(request.app.state.schema)


ENDPOINTS = (
    *(
        Endpoint(
            path=dialect.path,
            answer=partial(answer, dialect=dialect),
            tag=dialect.tag,
            method="POST",
            summary=dialect.summary,
            body=dialect.schema,
            has=dialect.has,
            error=dialect.error(EXAMPLE, "req"),
            stream=True,
            statuses=ANSWERING,
        )
        for dialect in DIALECTS
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        count,
        tag="Anthropic",
        method="POST",
        body=CountRequest,
        has=("input_tokens",),
        error=MESSAGES.error(EXAMPLE, "req"),
        statuses=ANSWERING,
    ),
    Endpoint(
        "/v1/cache/explain",
        explain,
        method="POST",
        body=ExplainChat,
        error=CHAT.error(EXAMPLE, ""),
        statuses=(400, 401, 403, 413, 415, 503),
    ),
    *(replace(e, error=e.error or CHAT.error(EXAMPLE, "")) for e in admin.ENDPOINTS),
)

NAMES = {
    **{dialect.path: dialect.name for dialect in DIALECTS},
    "/v1/messages/count_tokens": "count",
    "/v1/cache/explain": "explain",
    "/openapi.json": "schema",
    **admin.NAMES,
}
"""Names of paths for the log and the metrics."""


def endpoint_name(path: str) -> str:
    if path.startswith("/page/"):
        return "page"
    return "models" if path.startswith("/v1/models/") else NAMES.get(path, "other")


def error_response(error: ApiError, path: str, request_id: str) -> Response:
    """The path says whose shape the client reads."""
    dialect = next((d for d in reversed(DIALECTS) if path.startswith(d.path)), CHAT)
    return JSONResponse(dialect.error(error, request_id), error.status, error.headers)


async def _told(request: Request, error: Exception) -> Response:
    problem = as_api_error(error)
    if problem.status >= 500 and not isinstance(error, (RewarmError, ApiError)):
        raise error
    exchange = exchange_of(request)
    exchange.problem = problem.message
    return error_response(problem, request.url.path, exchange.id)


async def _misplaced(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow")
    return await _told(
        request, http_error(error.status_code, request.method, request.url.path, allowed)
    )


async def _left(request: Request, error: Exception) -> Response:
    exchange_of(request).problem = "the client went away while it was sending"
    return Response(status_code=CLIENT_GONE)


def create_app(engine: Engine, options: ServerOptions | None = None) -> Starlette:
    """The server's application. The engine may still be loading."""
    options = options or ServerOptions()
    backend = Backend(engine, options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        backend.close()

    app = Starlette(
        routes=[
            Route("/openapi.json", schema),
            *(endpoint.route() for endpoint in ENDPOINTS),
        ],
        middleware=[
            Middleware(
                Exchanges,
                endpoint=endpoint_name,
                response=error_response,
                finished=backend.ended,
            ),
            Middleware(Authorised, options=options),
            Middleware(BodyLimit, limit=options.max_body),
        ],
        exception_handlers={
            ApiError: _told,
            RewarmError: _told,
            ValidationError: _told,
            HTTPException: _misplaced,
            ClientDisconnect: _left,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.backend = backend
    app.state.schema = schema_of(ENDPOINTS)
    return app

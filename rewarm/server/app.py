"""The application: what is served where, and what every error looks like."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import rewarm
from rewarm.engine.engine import Engine
from rewarm.errors import RewarmError
from rewarm.options import ServerOptions

from .admin.explain import explain_router
from .admin.live import live_router
from .admin.manage import manage_router
from .admin.page import page_router
from .anthropic.routes import anthropic_router
from .errors import ApiError, as_api_error, error_response, http_error
from .exchange import CLIENT_GONE
from .gate import Gate
from .openai.routes import openai_router
from .openapi import describe
from .respond import exchange_of
from .service import Service


def create_app(engine: Engine, options: ServerOptions | None = None) -> FastAPI:
    """The server's application. The engine may still be loading."""
    options = options or ServerOptions()
    service = Service(engine, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="Rewarm",
        version=rewarm.__version__,
        # Those pages load from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service  # for whoever has to wait for what follows an answer
    app.include_router(openai_router(service))
    app.include_router(anthropic_router(service))
    app.include_router(manage_router(service))
    app.include_router(page_router())
    app.include_router(live_router(service))
    app.include_router(explain_router(service))
    describe(app)

    async def told(request: Request, error: Exception) -> Response:
        problem = as_api_error(error)
        if problem.status >= 500 and not isinstance(error, (RewarmError, ApiError)):
            raise error
        exchange = exchange_of(request)
        exchange.problem = problem.message
        return error_response(problem, request.url.path, exchange.id)

    async def misplaced(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        allowed = (error.headers or {}).get("Allow")
        return await told(
            request, http_error(error.status_code, request.method, request.url.path, allowed)
        )

    async def left(request: Request, error: Exception) -> Response:
        exchange_of(request).problem = "the client went away while it was sending"
        return Response(status_code=CLIENT_GONE)

    for expected in (ApiError, RewarmError, ValidationError):
        app.add_exception_handler(expected, told)
    app.add_exception_handler(HTTPException, misplaced)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_middleware(Gate, options=options, finished=service.ended)
    return app

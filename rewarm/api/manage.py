"""Endpoints about the server itself."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import time
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, Response

from rewarm.errors import NotReady

from .openapi import errors
from .respond import Json, exchange_of
from .service import Service

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Rewarm</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto }}
pre {{ background: #8881; padding: 1rem; overflow-x: auto; border-radius: 6px }}
:root {{ color-scheme: light dark }}
</style>
<h1>Rewarm</h1>
<p>{what}</p>
<pre>curl {base}/v1/chat/completions \\
  -H 'Content-Type: application/json' {key}\\
  -d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'</pre>
<p>OpenAI's API is at <code>/v1/chat/completions</code> and <code>/v1/completions</code>,
Anthropic's at <code>/v1/messages</code>.</p>
<p><a href="/health">health</a> · <a href="/metrics">metrics</a> ·
<a href="/v1/models">models</a> · <a href="/v1/cache">cache</a> ·
<a href="/openapi.json">openapi.json</a></p>
</html>
"""


def manage_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["Server"])
    engine, options = service.engine, service.options
    started = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": started,
            "owned_by": "rewarm",
        }
        with contextlib.suppress(NotReady):  # not known until the model is loaded
            body["context_length"] = body["max_model_len"] = engine.context
        return body

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses={503: {"description": "Loading, failing or stopped."}})
    async def health() -> Response:
        """Whether requests are answered."""
        state = engine.state
        if state == "ready":
            return Json({"status": "ready"})
        # It may name a path; whoever has no key need not know that.
        detail = engine.detail if options.api_key is None else "the server's log says more"
        return Json({"status": state, "detail": detail}, 503)

    @router.get("/metrics", responses=errors(401), response_class=Response)
    async def metrics(request: Request) -> Response:
        """For Prometheus."""
        text = await service.off_loop(exchange_of(request), service.metrics.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/v1/models", responses=errors(401))
    async def models() -> Response:
        """The model that is loaded."""
        found = entry(options.model_name)
        edges = {"first_id": found["id"], "last_id": found["id"], "has_more": False}
        return Json({"object": "list", "data": [found], **edges})

    @router.get("/v1/models/{name:path}", responses=errors(401))
    async def model(name: str) -> Response:
        """Any name is served by the model that is loaded."""
        return Json(entry(name))

    @router.get("/v1/cache", responses=errors(401, 503))
    async def cache(request: Request) -> Response:
        """What the cache holds and did."""
        stats = await service.off_loop(exchange_of(request), lambda: engine.cache.stats())
        return Json({**dataclasses.asdict(stats), "held": stats.held})

    @router.delete("/v1/cache", responses=errors(401, 503))
    async def clear(request: Request) -> Response:
        """Forget everything."""
        await service.off_loop(exchange_of(request), lambda: engine.cache.clear())
        service.activity.forget()
        service.remembered.clear()
        return Json({"cleared": True})

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        """What is served, and how to use it."""
        guarded = options.api_key is not None
        name = html.escape(options.model_name)
        what = "An API key is needed." if guarded else f"<code>{name}</code> is served here."
        key = '-H "Authorization: Bearer $REWARM_API_KEY" ' if guarded else ""
        base = html.escape(str(request.base_url).rstrip("/"))
        return HTMLResponse(
            PAGE.format(what=what, base=base, key=html.escape(key)),
            headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    return router

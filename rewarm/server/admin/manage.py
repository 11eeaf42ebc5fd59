"""Endpoints about the server itself."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from rewarm.errors import NotReady

from ..errors import bad_request
from ..openapi import errors
from ..respond import Json, exchange_of
from ..service import Service
from .live import SALT_HEADER, salt_of
from .tree_view import Wish

log = logging.getLogger("rewarm")

SPAN = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
MOST_NODES = 2000
_NUMBERS = {"depth": (1, 10_000), "limit": (1, MOST_NODES), "offset": (0, 1 << 40)}
_ASKED: dict[str, Any] = {
    "parameters": [
        {
            "name": "root",
            "in": "query",
            "description": "The id of a span: only what is below it.",
            "schema": {"type": "string", "pattern": f"^{SPAN.pattern}$"},
        },
        *(
            {
                "name": name,
                "in": "query",
                "schema": {"type": "integer", "minimum": least, "maximum": most},
            }
            for name, (least, most) in _NUMBERS.items()
        ),
        {
            "name": SALT_HEADER,
            "in": "header",
            "description": "The salt, percent-encoded, whose words are shown; none: no salt.",
            "schema": {"type": "string"},
        },
    ]
}

_CLEARED: dict[str, Any] = {
    "parameters": [
        {
            "name": "give_back",
            "in": "query",
            "description": "false: its memory stays for what comes next.",
            "schema": {"type": "string", "enum": ["true", "false"], "default": "true"},
        }
    ]
}


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

    @router.get(
        "/v1/cache",
        responses={**errors(400, 401, 404, 503), 304: {"description": "As it was."}},
        openapi_extra=_ASKED,
    )
    async def cache(request: Request) -> Response:
        """What the cache holds and did, and its tree."""
        wish = _wish(request)
        given = request.headers.get("if-none-match")

        def look() -> Response:
            view = service.tree
            view.refresh()
            stats = engine.cache.stats()
            tag = f'"{view.tag(wish)}{stats.hits:x}{stats.leases:x}"'
            if given == tag:
                return Response(status_code=304, headers={"ETag": tag})
            body = {**stats.shown(), "tree": view.reply(wish)}
            return Json(body, headers={"ETag": tag, "Cache-Control": "no-cache"})

        return await service.off_loop(exchange_of(request), look)

    @router.delete("/v1/cache", responses=errors(400, 401, 503), openapi_extra=_CLEARED)
    async def clear(request: Request) -> Response:
        """Forget everything, and give the memory back to the system."""
        give_back = request.query_params.get("give_back", "true")
        if give_back not in ("true", "false"):
            raise bad_request(f"give_back={give_back[:80]!r}: give true or false", "give_back")

        def forget() -> None:
            engine.cache.clear(give_back=give_back == "true")
            service.tree.forget()

        await service.off_loop(exchange_of(request), forget)
        service.activity.hottest.forget()
        service.remembered.clear()
        log.info("the cache was cleared")
        return Json({"cleared": True})

    return router


def _wish(request: Request) -> Wish:
    asked = request.query_params
    unknown = sorted(asked.keys() - {"root", *_NUMBERS})
    if unknown:
        raise bad_request(
            f"{unknown[0][:80]!r} is no parameter of this: give root, depth, limit or offset"
        )
    numbers: dict[str, int] = {}
    for name, (least, most) in _NUMBERS.items():
        if name in asked:
            value = asked[name]
            if not re.fullmatch("[0-9]{1,18}", value) or not least <= int(value) <= most:
                raise bad_request(
                    f"{name}={value[:80]!r}: give a number from {least} to {most}", name
                )
            numbers[name] = int(value)
    root = asked.get("root")
    if root is not None and not SPAN.fullmatch(root):
        raise bad_request(f"root={root[:80]!r}: give the id of a span of an earlier reply", "root")
    return Wish(root=root, salt=salt_of(request), **numbers)

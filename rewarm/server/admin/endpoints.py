"""Endpoints about the server itself.

`GET /v1/live` is cheap enough to be asked for every second. What it and the tree show of prompts is
the caller's own: of requests with the salt that is named in `X-Cache-Salt`, or of those without a
salt where none is named."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from typing import Any
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import rewarm
from rewarm.cache import PrefixCache
from rewarm.errors import CacheClosed, NotReady

from ..backend import Backend, backend_of
from ..errors import bad_request
from ..exchange import Exchange, exchange_of
from ..openapi import Endpoint
from ..work import Json
from . import page
from .activity import STEP, Activity, Prefix, percentile, share, stage_of
from .tree_view import Wish

log = logging.getLogger("rewarm")

SALT_HEADER = "X-Cache-Salt"
"""Percent-encoded: a header holds no other letters than ASCII's."""
SHOWN_HOTTEST = 10
MOMENT = ("at", "requests", "prompt_tokens", "cached_tokens", "generated_tokens")
SPAN = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
MOST_NODES = 2000
NUMBERS = {"depth": (1, 10_000), "limit": (1, MOST_NODES), "offset": (0, 1 << 40)}


def salt_of(request: Request) -> str | None:
    """The salt whose words are asked for."""
    return unquote(request.headers.get(SALT_HEADER, "")) or None


async def health(request: Request) -> Response:
    """Requests are answered, or why not."""
    backend = backend_of(request)
    state = backend.engine.state
    if state == "ready":
        return Json({"status": "ready"})
    # It may name a path; whoever has no key need not know that.
    hidden = backend.options.api_key is not None
    detail = "the server's log says more" if hidden else backend.engine.detail
    return Json({"status": state, "detail": detail}, 503)


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    backend = backend_of(request)
    text = await backend.off_loop(exchange_of(request), backend.metrics.text)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def models(request: Request) -> Response:
    """The model that is loaded."""
    backend = backend_of(request)
    found = _model(backend, backend.options.model_name)
    edges = {"first_id": found["id"], "last_id": found["id"], "has_more": False}
    return Json({"object": "list", "data": [found], **edges})


async def model(request: Request) -> Response:
    """Any name is served by the model that is loaded."""
    return Json(_model(backend_of(request), request.path_params["name"]))


def _model(backend: Backend, name: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": int(backend.activity.started),
        "owned_by": "rewarm",
    }
    with contextlib.suppress(NotReady):  # not known until the model is loaded
        body["context_length"] = body["max_model_len"] = backend.engine.context
    return body


async def cache(request: Request) -> Response:
    """What the cache holds and did, and its tree."""
    backend, wish = backend_of(request), _wish(request)
    given = request.headers.get("if-none-match")
    return await backend.off_loop(exchange_of(request), _look, backend, wish, given)


def _look(backend: Backend, wish: Wish, given: str | None) -> Response:
    view = backend.tree
    view.refresh()
    stats = backend.engine.cache.stats()
    tag = f'"{view.tag(wish)}{stats.hits:x}{stats.leases:x}"'
    if given == tag:
        return Response(status_code=304, headers={"ETag": tag})
    body = {**stats.shown(), "tree": view.reply(wish)}
    return Json(body, headers={"ETag": tag, "Cache-Control": "no-cache"})


async def clear(request: Request) -> Response:
    """Forget everything, and give the memory back to the system."""
    backend = backend_of(request)
    give_back = request.query_params.get("give_back", "true")
    if give_back not in ("true", "false"):
        raise bad_request(f"give_back={give_back[:80]!r}: give true or false", "give_back")
    await backend.off_loop(exchange_of(request), _forget, backend, give_back == "true")
    backend.activity.hottest.forget()
    backend.advisor.recent.clear()
    log.info("the cache was cleared")
    return Json({"cleared": True})


def _forget(backend: Backend, give_back: bool) -> None:
    backend.engine.core.clear(give_back=give_back).result()
    backend.tree.forget()


def _wish(request: Request) -> Wish:
    asked = request.query_params
    unknown = sorted(asked.keys() - {"root", *NUMBERS})
    if unknown:
        raise bad_request(
            f"{unknown[0][:80]!r} is no parameter of this: give root, depth, limit or offset"
        )
    numbers: dict[str, int] = {}
    for name, (least, most) in NUMBERS.items():
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


async def live(request: Request) -> Response:
    """Requests in flight and the last ones, hit rate, times to first token, bytes by tier."""
    backend, salt = backend_of(request), salt_of(request)
    body = _happening(backend, salt)
    # The cache's lock may be held for a while: not a wait for the event loop.
    body |= await backend.off_loop(exchange_of(request), _held, backend, salt)
    return Json(body)


def _happening(backend: Backend, salt: str | None) -> dict[str, Any]:
    """The part of the reply that the event loop knows."""
    activity, now = backend.activity, time.time()
    total = activity.total
    return {
        "model": backend.options.model_name,
        "version": rewarm.__version__,
        "now": round(now, 3),
        "uptime_s": round(now - activity.started, 1),
        "state": backend.engine.state,
        "requests": [_flight(n, e, salt) for n, e in activity.running.items()],
        "recent": [done.shown_to(salt) for done in reversed(activity.recent)],
        "hit_rate": {
            "minute": activity.hit_rate(60),
            "five_minutes": activity.hit_rate(300),
            "fifteen_minutes": activity.hit_rate(900),
            "total": share(total.cached_tokens, total.prompt_tokens),
        },
        "totals": {
            "requests": total.requests,
            "prompt_tokens": total.prompt_tokens,
            "cached_tokens": total.cached_tokens,
            "replayed_tokens": activity.replayed_tokens,
            "generated_tokens": total.generated_tokens,
        },
        "ttft_ms": {
            **{f"p{p}": percentile(activity.first_tokens, p) for p in (50, 90, 99)},
            "count": len(activity.first_tokens),
        },
        "history": {"step_s": STEP, "slots": _slots(activity)},
    }


def _slots(activity: Activity) -> list[dict[str, Any]]:
    return [
        {
            **{name: getattr(moment, name) for name in MOMENT},
            "ttft_p50_ms": percentile(moment.first_tokens, 50),
            "ttft_p99_ms": percentile(moment.first_tokens, 99),
        }
        for moment in activity.history
    ]


def _held(backend: Backend, salt: str | None) -> dict[str, Any]:
    """The part that the engine and the cache know; nulls until the model is loaded."""
    engine = backend.engine
    try:
        stats, cache = engine.stats(), engine.cache
        hottest = backend.activity.hottest.held(cache, SHOWN_HOTTEST)
        shown = ("waiting", "prefilling", "decoding", "warm_waiting", "warm_tokens", "restarts")
        return {
            "hottest": [_prefix(backend, prefix, salt) for prefix in hottest],
            "engine": {
                **{name: getattr(stats, name) for name in shown},
                "max_batch": engine.options.max_batch,
                "max_queue": engine.options.max_queue,
                "context": engine.context,
            },
            **_tiers(cache),
        }
    except (NotReady, CacheClosed):
        return {"hottest": [], "engine": None, "tiers": {}, "cache": None}


def _tiers(cache: PrefixCache) -> dict[str, Any]:
    stats = cache.stats()
    tiers: dict[str, dict[str, Any]] = {
        name: {"budget": tier.budget, "held": tier.held, "kinds": dict(tier.kinds)}
        for name, tier in stats.tiers.items()
    }
    for name, tier in stats.below.items():
        tiers[name] |= {
            "reads": tier.reads,
            "written": tier.written,
            "unwritten": tier.unwritten,
            "evictions": sum(tier.evictions.values()),
        }
    shown = ("entries", "checkpoints", "tokens", "hits", "misses", "evictions", "evicted", "leases")
    figures = {name: getattr(stats, name) for name in shown}
    return {"tiers": tiers, "cache": {"reuse": cache.reuse, **figures}}


def _flight(number: int, exchange: Exchange, salt: str | None) -> dict[str, Any]:
    runs = exchange.work.runs if exchange.work is not None else []
    own = exchange.salt == salt
    cached = sum(run.resumed or 0 for run in runs)
    return {
        "number": number,
        "own": own,
        "id": exchange.id if own else None,
        "endpoint": exchange.endpoint,
        "stage": stage_of(exchange),
        "prompt_tokens": sum(len(run.prompt.tokens) for run in runs),
        "cached_tokens": cached,
        "prefilled_tokens": sum(run.position for run in runs) - cached,
        "generated_tokens": sum(choice.tokens for run in runs for choice in run.choices),
        "age_ms": round((time.monotonic() - exchange.began) * 1e3, 1),
    }


def _prefix(backend: Backend, prefix: Prefix, salt: str | None) -> dict[str, Any]:
    own = prefix.salt == salt
    return {
        "tokens": prefix.tokens,
        "hits": prefix.hits,
        "bytes": prefix.nbytes,
        "tier": prefix.tier,
        "boundary": prefix.kind,
        "idle_s": round(time.time() - prefix.used, 1),
        "own": own,
        "label": prefix.label(backend.generator.tokenizer) if own else None,
    }


def _query(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, **more}


ENDPOINTS = (
    Endpoint("/health", health, head=True, statuses=(503,), error={"status": "", "detail": ""}),
    Endpoint("/metrics", metrics, has=None),
    Endpoint("/v1/models", models),
    Endpoint(
        "/v1/models/{name:path}",
        model,
        parameters=[{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
    ),
    Endpoint(
        "/v1/cache",
        cache,
        statuses=(304, 400, 401, 404, 503),
        parameters=[
            _query(
                "root",
                {"type": "string", "pattern": f"^{SPAN.pattern}$"},
                description="The id of a span: only what is below it.",
            ),
            *(
                _query(name, {"type": "integer", "minimum": least, "maximum": most})
                for name, (least, most) in NUMBERS.items()
            ),
            {
                "name": SALT_HEADER,
                "in": "header",
                "description": "The salt, percent-encoded, whose words are shown; none: no salt.",
                "schema": {"type": "string"},
            },
        ],
    ),
    Endpoint(
        "/v1/cache",
        clear,
        method="DELETE",
        statuses=(400, 401, 503),
        parameters=[
            _query(
                "give_back",
                {"type": "string", "enum": ["true", "false"], "default": "true"},
                description="false: its memory stays for what comes next.",
            )
        ],
    ),
    Endpoint("/v1/live", live),
    *(
        Endpoint("/" if name == "index.html" else f"/page/{name}", page.send, head=True, summary="")
        for name in page.FILES
    ),
)

NAMES = {
    "/": "page",
    "/health": "health",
    "/metrics": "metrics",
    "/v1/cache": "cache",
    "/v1/live": "live",
    "/v1/models": "models",
}

"""Endpoints about the server itself.

`GET /v1/live` is cheap enough to be asked for every second. It and the tree show words only of the
caller's own prompts: those with the salt that `X-Cache-Salt` names, or those without a salt where
it names none."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from itertools import islice
from typing import Any
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

import rewarm
from rewarm.cache import PrefixCache
from rewarm.errors import CacheClosed, NotReady

from ..backend import Backend
from ..errors import bad_request
from ..exchange import Json, Work
from ..openapi import Endpoint
from .activity import STEP, TOTALS, percentile, stage_of
from .tree_view import TreeQuery

log = logging.getLogger("rewarm")

SALT_HEADER = "X-Cache-Salt"
"""The header with the salt, percent-encoded, since a header holds ASCII only."""
SHOWN_HOTTEST = 10
SPAN = re.compile(r"[0-9]{1,19}(\.[0-9]{1,18})?")
MOST_NODES = 2000
NUMBERS = {"depth": (1, 10_000), "limit": (1, MOST_NODES), "offset": (0, 1 << 40)}
"""Parameters of the tree, with the least and the greatest value."""


def salt_of(request: Request) -> str | None:
    """Give the salt of the requests whose words the caller may see."""
    return unquote(request.headers.get(SALT_HEADER, "")) or None


async def health(backend: Backend, request: Request) -> Response:
    """The state of the server, with the reason where it does not answer requests."""
    state = backend.engine.state
    if state == "ready":
        return Json({"status": "ready"})
    # The detail may name a path, which only clients with the key may know.
    hidden = backend.options.api_key is not None
    detail = "the server's log says more" if hidden else backend.engine.detail
    return Json({"status": state, "detail": detail}, 503)


async def metrics(backend: Backend, request: Request) -> Response:
    """The metrics, for Prometheus."""
    text = await backend.off_loop(request, generate_latest, backend.metrics.registry)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def models(backend: Backend, request: Request) -> Response:
    """The model that is loaded."""
    found = _model(backend, backend.options.model_name)
    edges = {"first_id": found["id"], "last_id": found["id"], "has_more": False}
    return Json({"object": "list", "data": [found], **edges})


async def model(backend: Backend, request: Request) -> Response:
    """The model that is loaded, which serves any name."""
    return Json(_model(backend, request.path_params["name"]))


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
        body["context_length"] = body["max_model_len"] = backend.engine.core.context
    return body


async def cache(backend: Backend, request: Request) -> Response:
    """The figures of the cache, and its tree."""
    query, given = _tree_query(request), request.headers.get("if-none-match")
    return await backend.off_loop(request, _look, backend, query, given)


def _look(backend: Backend, query: TreeQuery, given: str | None) -> Response:
    view = backend.tree
    view.refresh()
    stats = backend.engine.core.cache.stats()
    tag = f'"{view.tag(query)}{stats.hits:x}{stats.leases:x}"'
    if given == tag:
        return Response(status_code=304, headers={"ETag": tag})
    body = {**stats.shown(), "tree": view.reply(query)}
    return Json(body, headers={"ETag": tag, "Cache-Control": "no-cache"})


async def clear(backend: Backend, request: Request) -> Response:
    """Forget everything, and give the memory back to the system."""
    give_back = request.query_params.get("give_back", "true")
    if give_back not in ("true", "false"):
        raise bad_request(f"give_back={give_back[:80]!r}: give true or false", "give_back")
    await backend.off_loop(request, _forget, backend, give_back == "true")
    backend.activity.hottest.forget()
    backend.advisor.recent.clear()
    log.info("the cache was cleared")
    return Json({"cleared": True})


def _forget(backend: Backend, give_back: bool) -> None:
    for deleted in backend.engine.core.clear(give_back=give_back).result():
        deleted.result()
    backend.tree.forget()


def _tree_query(request: Request) -> TreeQuery:
    """Parse the part of the tree that a request asks for."""
    asked = request.query_params
    unknown = sorted(asked.keys() - {"root", *NUMBERS})
    if unknown:
        known = "give root, depth, limit or offset"
        raise bad_request(f"{unknown[0][:80]!r} is no parameter of this: {known}")
    numbers: dict[str, int] = {}
    for name, (least, most) in NUMBERS.items():
        if (value := asked.get(name)) is None:
            continue
        if not re.fullmatch("[0-9]{1,18}", value) or not least <= int(value) <= most:
            raise bad_request(f"{name}={value[:80]!r}: give a number from {least} to {most}", name)
        numbers[name] = int(value)
    root = asked.get("root")
    if root is not None and not SPAN.fullmatch(root):
        raise bad_request(f"root={root[:80]!r}: give the id of a span of an earlier reply", "root")
    return TreeQuery(root=root, salt=salt_of(request), **numbers)


async def live(backend: Backend, request: Request) -> Response:
    """Requests in flight and the last ones, hit rate, times to first token, bytes by tier."""
    salt = salt_of(request)
    body = _happening(backend, salt)
    # The cache's lock may be held for a while, and the event loop must not wait for it.
    body |= await backend.off_loop(request, _engine, backend, salt)
    return Json(body)


def _happening(backend: Backend, salt: str | None) -> dict[str, Any]:
    """Give the part of the reply that the event loop knows."""
    activity, now = backend.activity, time.time()
    return {
        "model": backend.options.model_name,
        "version": rewarm.__version__,
        "now": round(now, 3),
        "uptime_s": round(now - activity.started, 1),
        "state": backend.engine.state,
        "requests": [_flight(work, n, salt) for work, n in activity.running.items()],
        "recent": [done.shown_to(salt) for done in reversed(activity.recent)],
        "hit_rate": activity.hit_rates(),
        "totals": {name: activity.total[name] for name in TOTALS},
        "ttft_ms": {
            **{f"p{p}": percentile(activity.first_tokens, p) for p in (50, 90, 99)},
            "count": len(activity.first_tokens),
        },
        "history": {"step_s": STEP, "slots": [slot.shown() for slot in activity.history]},
    }


def _flight(work: Work, number: int, salt: str | None) -> dict[str, Any]:
    """Describe a request in flight."""
    exchange, runs = work.exchange, work.runs
    own = work.options.salt == salt
    cached = sum(run.resumed or 0 for run in runs)
    return {
        "number": number,
        "own": own,
        "id": exchange.id if own else None,
        "endpoint": exchange.endpoint,
        "stage": stage_of(work),
        "prompt_tokens": sum(len(run.prompt.tokens) for run in runs),
        "cached_tokens": cached,
        "prefilled_tokens": sum(run.position for run in runs) - cached,
        "generated_tokens": sum(choice.tokens for choice in work.choices),
        "age_ms": round((time.monotonic() - exchange.began) * 1e3, 1),
    }


def _engine(backend: Backend, salt: str | None) -> dict[str, Any]:
    """Give the part that the engine and the cache know; nulls until the model is loaded."""
    try:
        core = backend.engine.core
        stats, cache = core.stats(), core.cache
        tokenizer = backend.generator.tokenizer
        hottest = islice(backend.activity.hottest.resumable(cache), SHOWN_HOTTEST)
        shown = ("waiting", "prefilling", "decoding", "warm_waiting", "warm_tokens", "restarts")
        return {
            "hottest": [prefix.shown_to(salt, tokenizer) for prefix in hottest],
            "engine": {
                **{name: getattr(stats, name) for name in shown},
                "max_batch": core.options.max_batch,
                "max_queue": core.options.max_queue,
                "context": core.context,
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
        more = {key: getattr(tier, key) for key in ("reads", "written", "unwritten")}
        tiers[name] |= {**more, "evictions": sum(tier.evictions.values())}
    shown = ("entries", "checkpoints", "tokens", "hits", "misses", "evictions", "evicted", "leases")
    figures = {name: getattr(stats, name) for name in shown}
    return {"tiers": tiers, "cache": {"reuse": cache.reuse, **figures}}


def _parameter(name: str, schema: dict[str, Any], place: str = "query", **more: Any) -> Any:
    return {"name": name, "in": place, "schema": schema, **more}


MODEL_NAME = _parameter("name", {"type": "string"}, "path", required=True)
TREE_PARAMETERS = [
    _parameter(
        "root",
        {"type": "string", "pattern": f"^{SPAN.pattern}$"},
        description="The id of a span: only what is below it.",
    ),
    *(
        _parameter(name, {"type": "integer", "minimum": least, "maximum": most})
        for name, (least, most) in NUMBERS.items()
    ),
    _parameter(
        SALT_HEADER,
        {"type": "string"},
        "header",
        description="The salt, percent-encoded, whose words are shown; none: no salt.",
    ),
]
GIVE_BACK = _parameter(
    "give_back",
    {"type": "string", "enum": ["true", "false"], "default": "true"},
    description="false: its memory stays for what comes next.",
)
DOWN = {"status": "", "detail": ""}

ENDPOINTS = (
    Endpoint("/health", "health", health, methods=("GET", "HEAD"), statuses=(503,), error=DOWN),
    Endpoint("/metrics", "metrics", metrics, replies={}),
    Endpoint("/v1/models", "models", models),
    Endpoint("/v1/models/{name:path}", "models", model, parameters=[MODEL_NAME]),
    Endpoint(
        "/v1/cache", "cache", cache, statuses=(304, 400, 401, 404, 503), parameters=TREE_PARAMETERS
    ),
    Endpoint(
        "/v1/cache",
        "cache",
        clear,
        methods=("DELETE",),
        statuses=(400, 401, 503),
        parameters=[GIVE_BACK],
    ),
    Endpoint("/v1/live", "live", live),
)

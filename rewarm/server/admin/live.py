"""`GET /v1/live`: the running server at a glance, cheap enough to be asked for every second.

What is shown of prompts, and of why they missed, is the caller's own: of requests with the salt
that is named in `X-Cache-Salt`, or of those without a salt where none is named."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter, Request
from starlette.responses import Response

import rewarm
from rewarm.cache import PrefixCache
from rewarm.errors import CacheClosed, NotReady

from ..exchange import Exchange
from ..openapi import errors
from ..respond import Json, exchange_of
from ..service import Service
from .activity import STEP, Activity, Finished, percentile, share, stage_of
from .hottest import Prefix

SALT_HEADER = "X-Cache-Salt"
"""Percent-encoded: a header holds no other letters than ASCII's."""
HOTTEST = 10


def live_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["Server"])

    @router.get("/v1/live", responses=errors(401))
    async def live(request: Request) -> Response:
        """Requests in flight and the last ones, hit rate, times to first token, bytes by tier."""
        salt = salt_of(request)
        body = happening(service, salt)
        # The cache's lock may be held for a while: not a wait for the event loop.
        body |= await service.off_loop(exchange_of(request), held, service, salt)
        return Json(body)

    return router


def salt_of(request: Request) -> str | None:
    """Whose words are asked for."""
    return unquote(request.headers.get(SALT_HEADER, "")) or None


def happening(service: Service, salt: str | None) -> dict[str, Any]:
    """What the event loop knows."""
    engine, activity = service.engine, service.activity
    return {
        "model": service.options.model_name,
        "version": rewarm.__version__,
        "now": round(time.time(), 3),
        "uptime_s": round(time.time() - activity.started, 1),
        "state": engine.state,
        "requests": [_flight(n, e, salt) for n, e in activity.running.items()],
        "recent": [_finished(done, salt) for done in reversed(activity.recent)],
        "hit_rate": {
            "minute": activity.hit_rate(60),
            "five_minutes": activity.hit_rate(300),
            "fifteen_minutes": activity.hit_rate(900),
            "total": share(activity.total.cached_tokens, activity.total.prompt_tokens),
        },
        "totals": {
            "requests": activity.total.requests,
            "prompt_tokens": activity.total.prompt_tokens,
            "cached_tokens": activity.total.cached_tokens,
            "replayed_tokens": activity.replayed_tokens,
            "generated_tokens": activity.total.generated_tokens,
        },
        "ttft_ms": {
            **{f"p{p}": percentile(activity.first_tokens, p) for p in (50, 90, 99)},
            "count": len(activity.first_tokens),
        },
        "history": _history(activity),
    }


def held(service: Service, salt: str | None) -> dict[str, Any]:
    """What the engine and the cache know; nulls until the model is loaded."""
    try:
        stats, cache = service.engine.stats(), service.engine.cache
        hottest = service.activity.hottest.held(cache, HOTTEST)
        return {
            "hottest": [_prefix(service, prefix, salt) for prefix in hottest],
            "engine": {
                "waiting": stats.waiting,
                "prefilling": stats.prefilling,
                "decoding": stats.decoding,
                "warm_waiting": stats.warm_waiting,
                "warm_tokens": stats.warm_tokens,
                "restarts": stats.restarts,
                "max_batch": service.engine.options.max_batch,
                "max_queue": service.engine.options.max_queue,
                "context": service.engine.context,
            },
            **_cache(cache),
        }
    except (NotReady, CacheClosed):
        return {"hottest": [], "engine": None, "tiers": {}, "cache": None}


def _cache(cache: PrefixCache) -> dict[str, Any]:
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
    return {
        "tiers": tiers,
        "cache": {
            "reuse": cache.reuse,
            "entries": stats.entries,
            "checkpoints": stats.checkpoints,
            "tokens": stats.tokens,
            "hits": stats.hits,
            "misses": stats.misses,
            "evictions": stats.evictions,
            "evicted": stats.evicted,
            "leases": stats.leases,
        },
    }


def _flight(number: int, exchange: Exchange, salt: str | None) -> dict[str, Any]:
    runs = exchange.work.runs if exchange.work is not None else []
    own = exchange.salt == salt
    cached = sum(run.collector.resumed or 0 for run in runs)
    return {
        "number": number,
        "own": own,
        "id": exchange.id if own else None,
        "endpoint": exchange.endpoint,
        "stage": stage_of(exchange),
        "prompt_tokens": sum(len(run.prompt.tokens) for run in runs),
        "cached_tokens": cached,
        "prefilled_tokens": sum(run.collector.position for run in runs) - cached,
        "generated_tokens": sum(choice.tokens for run in runs for choice in run.choices),
        "age_ms": round((time.monotonic() - exchange.began) * 1e3, 1),
    }


def _finished(done: Finished, salt: str | None) -> dict[str, Any]:
    own = done.salt == salt
    miss = done.miss
    if miss is not None and not own:
        miss = {"reason": miss["reason"]}
    return {
        "number": done.number,
        "own": own,
        "id": done.id if own else None,
        "ended": round(done.ended, 3),
        "endpoint": done.endpoint,
        "status": done.status,
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "replayed_tokens": done.replayed_tokens,
        "prefilled_tokens": done.prefilled_tokens,
        "completion_tokens": done.completion_tokens,
        "ttft_ms": None if done.ttft_ms is None else round(done.ttft_ms, 3),
        "total_ms": round(done.total_ms, 3),
        "miss": miss,
    }


def _history(activity: Activity) -> dict[str, Any]:
    return {
        "step_s": STEP,
        "slots": [
            {
                "at": slot.at,
                "requests": slot.requests,
                "prompt_tokens": slot.prompt_tokens,
                "cached_tokens": slot.cached_tokens,
                "generated_tokens": slot.generated_tokens,
                "ttft_p50_ms": percentile(slot.first_tokens, 50),
                "ttft_p99_ms": percentile(slot.first_tokens, 99),
            }
            for slot in activity.history
        ],
    }


def _prefix(service: Service, prefix: Prefix, salt: str | None) -> dict[str, Any]:
    own = prefix.salt == salt
    return {
        "tokens": prefix.tokens,
        "hits": prefix.hits,
        "bytes": prefix.nbytes,
        "tier": prefix.tier,
        "boundary": prefix.kind,
        "idle_s": round(time.time() - prefix.used, 1),
        "own": own,
        "label": prefix.label(service.tokenizer) if own else None,
    }

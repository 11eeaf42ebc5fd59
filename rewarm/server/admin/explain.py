"""`POST /v1/cache/explain`: what a request would reuse, why not more, and what to change.

The body is the one of a chat completion, a completion or an Anthropic message; nothing is run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from rewarm.generate.advice import Proposal, Told, proposals
from rewarm.generate.remembered import Asked
from rewarm.prompt.messages import normalised
from rewarm.prompt.render.renderer import Prompt
from rewarm.prompt.text import common_tokens

from ..anthropic import chat as anthropic_chat
from ..anthropic.parse import CountRequest
from ..errors import bad_request
from ..fields import Salt
from ..openai import routes as openai
from ..openai.parse import ChatRequest, CompletionRequest
from ..openapi import body_of, errors
from ..respond import Json, checked, exchange_of
from ..service import Chat, Service

LEAST = 16
"""Tokens that a pattern must cost to be worth a word."""

Salts = Annotated[list[Salt], Field(max_length=16)]

ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")

NAMES = {
    "timestamp": "A date or time that differs from request to request",
    "random_id": "An id that differs from request to request",
    "tools_order": "Tools in another order",
    "json_keys": "JSON with its keys in another order",
    "trimmed_history": "A history that was cut off at the front",
    "thinking": "Thinking that was sent back once, and once not",
    "system_prompt": "A system prompt that differs from request to request",
}


class ExplainChat(ChatRequest):
    compare_salts: Salts | None = None
    """Other salts of the same tenant: whether the prompt is known under one of them."""


class ExplainCompletion(CompletionRequest):
    compare_salts: Salts | None = None


class ExplainMessages(CountRequest):
    model: str = ""
    cache_salt: Salt | None = None
    compare_salts: Salts | None = None


Asking = ExplainChat | ExplainCompletion | ExplainMessages


@dataclass(frozen=True)
class Question:
    """A request that is asked about."""

    prompt: Prompt
    chat: Chat | None
    salt: str | None
    other_salts: list[str]


def explain_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["Server"])

    @router.post(
        "/v1/cache/explain",
        openapi_extra=body_of(ExplainChat),
        responses=errors(400, 401, 403, 413, 415, 503),
    )
    async def explain(request: Request) -> Response:
        """What a request would reuse, and why not more, without running it."""
        anthropic = "anthropic-version" in request.headers
        asking = await checked(request, lambda body: _read(body, anthropic), service)
        asked = await service.off_loop(exchange_of(request), question, service, asking)
        await service.explained()
        return Json(await service.off_loop(exchange_of(request), explained, service, asked))

    return router


def question(service: Service, asked: Asking) -> Question:
    salts = list(asked.compare_salts or ())
    if isinstance(asked, ExplainCompletion):
        if len(asked.prompts) != 1:
            raise bad_request("prompt: one at a time can be explained", "prompt")
        tokens = np.asarray(service.tokens_of(asked.prompts[0]), dtype=np.int32)
        return Question(Prompt(tokens), None, asked.cache_salt, salts)
    if isinstance(asked, ExplainChat):
        chat = openai.chat_of(asked)
    else:
        keep = service.options.keep_billing_header
        chat = anthropic_chat.chat_of(asked, keep_billing_header=keep)
    return Question(service.render(chat), chat, asked.cache_salt, salts)


def explained(service: Service, asked: Question) -> dict[str, Any]:
    cache, prompt = service.engine.cache, asked.prompt
    found = cache.miss(prompt.tokens, asked.salt, prompt.boundaries, other_salts=asked.other_salts)
    match = found.match
    body: dict[str, Any] = {
        "prompt_tokens": match.tokens,
        "cached_tokens": match.resume,
        "replayed_tokens": max(0, min(match.replay, match.tokens - match.resume)),
        "prefilled_tokens": match.tokens - match.resume,
        "resume": {"position": match.resume, "tier": match.tier} if match.resume else None,
        "miss": None,
        "compared_with": None,
        "advice": [],
    }
    if found.miss is None:
        return body
    body["miss"] = service.described(found.miss, prompt, asked.chat, asked.salt)
    if asked.chat is not None:
        told = Told(normalised(asked.chat.messages), asked.chat.tools or ())
        before = service.remembered.nearest(asked.salt, told.messages, prompt.tokens)
        if before is not None:
            body["compared_with"] = {
                "id": before.id,
                "seconds_ago": round(time.time() - before.at, 1),
                "shared_tokens": common_tokens(before.tokens, prompt.tokens),
            }
            body["advice"] = advice(service, asked.chat, asked.salt, told, before, prompt)
    return body


def advice(
    service: Service, chat: Chat, salt: str | None, told: Told, before: Asked, prompt: Prompt
) -> list[dict[str, Any]]:
    """Patterns one after the other: what one of them hides comes to light once it is gone."""

    def computed(prompt: Prompt) -> int:
        """Tokens that nothing stored, and nothing asked before, has in common with a prompt."""
        known = service.engine.cache.match(prompt.tokens, salt, prompt.boundaries).shared
        return len(prompt.tokens) - max(known, common_tokens(before.tokens, prompt.tokens))

    found: list[dict[str, Any]] = []
    cost = computed(prompt)
    seen: set[str] = set()
    while True:
        for proposal in proposals(told, before.told):
            if proposal.pattern in seen:
                continue
            fixed = proposal.fixed
            without = computed(
                service.render(
                    replace(chat, messages=list(fixed.messages), tools=list(fixed.tools) or None)
                )
            )
            if cost - without >= LEAST:
                found.append(_said(proposal, cost - without))
                seen.add(proposal.pattern)
                told, cost = fixed, without
                break
        else:
            return found


def _said(proposal: Proposal, tokens: int) -> dict[str, Any]:
    where = f" (message {proposal.message}, {proposal.role})" if proposal.role else ""
    name = NAMES[proposal.pattern]
    return {
        "pattern": proposal.pattern,
        "tokens": tokens,
        "message": proposal.message,
        "role": proposal.role,
        "field": proposal.field,
        "stored": proposal.stored,
        "sent": proposal.sent,
        "text": f"{name}{where} costs {tokens:,} tokens per request. {proposal.advice}",
    }


def _read(body: bytes, anthropic: bool) -> Asking:
    """By the schema of the API that the body belongs to."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None  # the schema says what is wrong
    if not isinstance(given, dict):
        return ExplainChat.model_validate_json(body)
    if anthropic or _is_anthropic(given):
        return ExplainMessages.model_validate_json(body)
    if "prompt" in given and "messages" not in given:
        return ExplainCompletion.model_validate_json(body)
    return ExplainChat.model_validate_json(body)


def _is_anthropic(given: dict[str, Any]) -> bool:
    tools, messages = given.get("tools"), given.get("messages")
    if "system" in given:
        return True
    if isinstance(tools, list) and any(isinstance(t, dict) and "input_schema" in t for t in tools):
        return True
    contents = [m.get("content") for m in messages or () if isinstance(m, dict)]
    blocks = [b for c in contents if isinstance(c, list) for b in c if isinstance(b, dict)]
    return any(block.get("type") in ANTHROPIC_BLOCKS for block in blocks)

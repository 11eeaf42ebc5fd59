"""Anthropic's endpoints."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from rewarm.values import Sampling

from ..openapi import body_of, replies
from ..respond import Json, exchange_of, finished, parsed
from ..service import ASKED_AGAIN, Service, Wanted
from ..sse import EventStream
from .chat import chat_of
from .parse import CountRequest, MessagesRequest
from .stream import Head, MessageStream, whole_message


def anthropic_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["Anthropic"])
    options = service.options

    @router.post(
        "/v1/messages",
        openapi_extra=body_of(MessagesRequest),
        responses=replies("message", stream=True, anthropic=True),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        asked = await parsed(request, MessagesRequest, service)
        chat = chat_of(asked, keep_billing_header=options.keep_billing_header)
        exchange = exchange_of(request)
        work = await service.answer_chat(exchange, chat, _wanted(asked))
        head = Head(f"msg_{uuid.uuid4().hex[:24]}", asked.model, exchange.id, bool(chat.marks))
        if asked.stream:
            return EventStream(work, MessageStream(head, work), options.keep_alive)
        if nothing := await finished(work, request):
            return nothing
        return Json(whole_message(head, work))

    @router.post(
        "/v1/messages/count_tokens",
        openapi_extra=body_of(CountRequest),
        responses=replies("count", anthropic=True),
    )
    async def count_tokens(request: Request) -> Response:
        """The tokens of a prompt, without answering it."""
        asked = await parsed(request, CountRequest, service)
        chat = chat_of(asked, keep_billing_header=options.keep_billing_header)
        prompt = await service.off_loop(exchange_of(request), service.render, chat)
        return Json({"input_tokens": len(prompt.tokens)})

    return router


def _wanted(asked: MessagesRequest) -> Wanted:
    choice = asked.tool_choice
    return Wanted(
        max_tokens=asked.max_tokens,
        sampling=Sampling(
            temperature=asked.temperature or 0.0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=asked.top_k or 0,
        ),
        stop=tuple(asked.stop_sequences or ()),
        one_call=bool(choice and choice.disable_parallel_tool_use),
        salt=asked.cache_salt,
        hint=ASKED_AGAIN if any(mark.ttl == "1h" for mark in asked.marks) else 1.0,
        stream=bool(asked.stream),
    )

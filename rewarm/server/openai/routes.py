"""OpenAI's endpoints."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from rewarm.generate.collect import Choice
from rewarm.values import Message

from ..errors import bad_request
from ..fields import thinking_options
from ..messages import assistant_message
from ..openapi import body_of, replies
from ..respond import Json, exchange_of, finished, parsed
from ..service import ASKED_AGAIN, Chat, Service, Wanted
from ..sse import EventStream
from .parse import ChatRequest, CompletionRequest, NamedTool, OpenAIRequest
from .reply import Head, chat_choice, text_choice, whole_reply
from .stream import ChatStream, TextStream

COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions."""


def openai_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])
    keep_alive = service.options.keep_alive

    @router.post(
        "/v1/chat/completions",
        openapi_extra=body_of(ChatRequest),
        responses=replies("chat.completion", stream=True),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        asked = await parsed(request, ChatRequest, service)
        logprobs = bool(asked.logprobs)
        wanted = _wanted(
            asked,
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            top_logprobs=(asked.top_logprobs or 0) if logprobs else None,
            one_call=asked.parallel_tool_calls is False,
        )
        work = await service.answer_chat(exchange_of(request), chat_of(asked), wanted)
        head = _head("chatcmpl", "chat.completion", asked, service)
        if wanted.stream:
            stream = ChatStream(head, work, asked.usage_in_stream, logprobs)
            return EventStream(work, stream, keep_alive)
        if nothing := await finished(work, request):
            return nothing
        choices = [
            chat_choice(head, i, choice, logprobs=logprobs) for i, choice in enumerate(work.choices)
        ]
        return Json(whole_reply(head, work, choices))

    @router.post(
        "/v1/completions",
        openapi_extra=body_of(CompletionRequest),
        responses=replies("text_completion", stream=True),
    )
    async def completions(request: Request) -> Response:
        """Continue texts or tokens, without a chat template."""
        asked = await parsed(request, CompletionRequest, service)
        wanted = _wanted(
            asked,
            max_tokens=asked.max_tokens or COMPLETION_TOKENS,
            top_logprobs=asked.logprobs,
        )
        prompts = asked.prompts
        echo = [""] * len(prompts) * wanted.n
        if asked.echo:
            texts = await service.off_loop(
                exchange_of(request), lambda: [_text(service, p) for p in prompts]
            )
            echo = [text for text in texts for _ in range(wanted.n)]
        work = await service.continue_texts(exchange_of(request), prompts, wanted)
        head = _head("cmpl", "text_completion", asked, service)
        logprobs = asked.logprobs is not None
        if wanted.stream:
            stream = TextStream(
                head, work, asked.usage_in_stream, logprobs, echo=echo if asked.echo else ()
            )
            return EventStream(work, stream, keep_alive)
        if nothing := await finished(work, request):
            return nothing
        choices = [
            text_choice(head, i, choice, logprobs=logprobs, echo=echo[i])
            for i, choice in enumerate(work.choices)
        ]
        return Json(whole_reply(head, work, choices))

    return router


def chat_of(asked: ChatRequest) -> Chat:
    tools, must_call = _tools(asked)
    return Chat(
        messages=[message.as_message() for message in asked.messages],
        delivered=delivered,
        tools=tools,
        template={
            **thinking_options(asked.reasoning_effort, asked.enable_thinking),
            **(asked.chat_template_kwargs or {}),
        },
        continue_final=asked.continues,
        must_call=must_call,
    )


def delivered(choice: Choice) -> Message:
    return assistant_message(choice.answer.text, choice.answer.reasoning, choice.calls)


def _tools(asked: ChatRequest) -> tuple[list[dict[str, Any]] | None, bool]:
    """The tools that the model is shown, and whether it has to call one."""
    if not asked.tools or asked.tool_choice == "none":
        return None, False
    if not isinstance(asked.tool_choice, NamedTool):
        return asked.tools, asked.tool_choice == "required"
    name = asked.tool_choice.function.name
    named = [tool for tool in asked.tools if tool["function"]["name"] == name]
    if not named:
        raise bad_request(f"tool_choice: there is no tool {name[:80]!r} in tools", "tool_choice")
    return named[:1], True


def _wanted(asked: OpenAIRequest, **more: Any) -> Wanted:
    return Wanted(
        sampling=asked.sampling(),
        n=asked.n or 1,
        stop=asked.stops,
        salt=asked.cache_salt,
        hint=ASKED_AGAIN if asked.prompt_cache_key else 1.0,
        stream=bool(asked.stream),
        **more,
    )


def _head(prefix: str, kind: str, asked: OpenAIRequest, service: Service) -> Head:
    model = asked.model or service.options.model_name
    return Head(f"{prefix}-{uuid.uuid4().hex}", kind, model, service.texts)


def _text(service: Service, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else str(service.tokenizer.decode(prompt))

"""Parse Anthropic's requests into chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rewarm.generate.options import RETURNING, GenerationOptions
from rewarm.options import ServerOptions
from rewarm.prompt.chat import SYSTEM_AND_TOOLS, Chat

from .. import fields
from ..errors import ApiError, bad_request
from ..fields import Body, RequestBody, Unsupported, refuse
from . import blocks

MOST_MARKS = 4
CONSTRAINED = Unsupported("answers cannot be constrained to a schema; leave it out")
UNSUPPORTED = {
    "mcp_servers": Unsupported("this server calls no tools itself; leave it out", ([],)),
    "container": Unsupported("this server runs no containers; leave it out"),
    "output_format": CONSTRAINED,
    "compaction": Unsupported("leave it out"),
    "thread": Unsupported("send the whole conversation in messages"),
    "fallbacks": Unsupported("one model is loaded; leave it out", ([],)),
}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CHOICES = {"any": "required", "tool": "required", "auto": "auto", "none": "none"}
"""The modes of `fields.chosen_tools`, by Anthropic's names."""

BILLING_HEADER = "x-anthropic-billing-header:"
"""The beginning of a coding agent's first line. The line differs in every request: no two prompts
would begin alike."""


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> AnthropicToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError('tool_choice of type "tool" needs a name')
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=fields.MOST_TOKENS)] | None = None


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _supported(self) -> OutputConfig:
        refuse(self.model_extra, {"format": CONSTRAINED})
        return self


class CountRequest(RequestBody):
    """The part of a request that makes its prompt."""

    model: str
    messages: Annotated[list[blocks.AnthropicMessage], Field(min_length=1)]
    system: str | list[blocks.TextBlock] | None = None
    tools: list[blocks.AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: blocks.CacheControl | None = None
    context_management: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _supported(self) -> CountRequest:
        refuse(self.model_extra, UNSUPPORTED)
        for edit in (self.context_management or {}).get("edits") or ():
            kind = str(edit.get("type")) if isinstance(edit, dict) else str(edit)
            # The template decides whether old thinking is kept.
            if not kind.startswith("clear_thinking"):
                wrong = f"context_management: {kind[:40]!r} is not supported; leave it out"
                raise bad_request(wrong, "context_management")
        if (count := len(self.marks)) > MOST_MARKS:
            wrong = f"cache_control is set {count} times: at most {MOST_MARKS} are allowed"
            raise bad_request(wrong, "cache_control")
        return self

    @property
    def marks(self) -> list[blocks.CacheControl]:
        marked = [self.cache_control, *(tool.cache_control for tool in self.tools or ())]
        for content in (self.system, *(message.content for message in self.messages)):
            if isinstance(content, list):
                marked += [block.cache_control for block in content]
        return [mark for mark in marked if mark is not None]

    def asked(self, server: ServerOptions) -> Chat:
        system = self._system(server.keep_billing_header)
        messages = [{"role": "system", "content": system}] if system is not None else []
        system_blocks = self.system if isinstance(self.system, list) else []
        marked = {SYSTEM_AND_TOOLS} if blocks.is_marked(self.tools, system_blocks) else set()
        called: dict[str, str] = {}
        for message in self.messages:
            for told, of_blocks in message.told(called):
                if blocks.is_marked(of_blocks):
                    marked.add(len(messages))
                messages.append(told)
        if self.cache_control is not None:
            marked.add(len(messages) - 1)
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        mode, name = CHOICES[choice.type], choice.name if choice.type == "tool" else None
        tools = fields.chosen_tools([t.as_function() for t in self.tools or ()], mode, name)
        continues = self.messages[-1].role == "assistant"
        if continues and messages[-1].get("tool_calls"):
            wrong = "the last message calls tools: send their results after it"
            raise bad_request(wrong, "messages")
        effort = self.output_config.effort if self.output_config else None
        thinks = self.thinking.type != "disabled" if self.thinking else None
        return Chat(
            messages=messages,
            returned=blocks.returned,
            tools=tools,
            template=fields.thinking_options(effort, thinks),
            continue_final=continues,
            marked=tuple(sorted(marked)),
            must_call=mode == "required",
        )

    def _system(self, keep_billing_header: bool) -> str | None:
        if self.system is None:
            return None
        given = [self.system] if isinstance(self.system, str) else [b.text for b in self.system]
        if not keep_billing_header and given and given[0].startswith(BILLING_HEADER):
            given[0] = given[0].partition("\n")[2].lstrip("\n")
        return "\n\n".join(filter(None, given)) or None


class MessagesRequest(CountRequest):
    max_tokens: fields.TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[fields.StopText], Field(max_length=16)] | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Fraction | None = None
    top_k: Annotated[int, Field(ge=0, le=fields.MOST_TOKENS)] | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: fields.Salt | None = None

    def options(self) -> GenerationOptions:
        choice = self.tool_choice
        return GenerationOptions(
            max_tokens=self.max_tokens,
            sampling=fields.sampling_of(self),
            stop=tuple(self.stop_sequences or ()),
            one_call=bool(choice and choice.disable_parallel_tool_use),
            salt=self.cache_salt,
            hint=RETURNING if any(mark.ttl == "1h" for mark in self.marks) else 1.0,
            stream=bool(self.stream),
        )


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Make the body of an error."""
    kind = ERROR_TYPES.get(error.status, "api_error")
    told = {"type": kind, "message": error.message}
    return {"type": "error", "error": told, "request_id": request_id}

"""Parse Anthropic's requests into chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rewarm.generate.options import RETURNING, GenerationOptions
from rewarm.options import ServerOptions
from rewarm.prompt.chat import SYSTEM_AND_TOOLS, Chat
from rewarm.prompt.messages import tool_message
from rewarm.values import Message

from .. import fields
from ..errors import ApiError, bad_request
from ..fields import Body, ParsedRequest, RequestBody, Unsupported, refuse
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
                raise bad_request(
                    f"context_management: {kind[:40]!r} is not supported; leave it out",
                    "context_management",
                )
        if len(self.marks) > MOST_MARKS:
            raise bad_request(
                f"cache_control is set {len(self.marks)} times: at most {MOST_MARKS} are allowed",
                "cache_control",
            )
        return self

    @property
    def marks(self) -> list[blocks.CacheControl]:
        marked = [self.cache_control, *(tool.cache_control for tool in self.tools or ())]
        for content in (self.system, *(message.content for message in self.messages)):
            if isinstance(content, list):
                marked += [block.cache_control for block in content]
        return [mark for mark in marked if mark is not None]

    def parsed(self, server: ServerOptions) -> ParsedRequest:
        return ParsedRequest(self.chat(server), GenerationOptions(), self)

    def chat(self, server: ServerOptions) -> Chat:
        """Make the canonical chat."""
        told = ChatReader()
        system = self._system(server.keep_billing_header)
        if system is not None:
            told.messages.append({"role": "system", "content": system})
        system_blocks = self.system if isinstance(self.system, list) else []
        if blocks.is_marked([*(self.tools or ()), *system_blocks]):
            told.marked.add(SYSTEM_AND_TOOLS)
        for message in self.messages:
            told.read(message.role, message.blocks)
        if self.cache_control is not None:
            told.marked.add(len(told.messages) - 1)
        functions = [tool.as_function() for tool in self.tools or ()]
        asked = self.tool_choice
        name = asked.name if asked and asked.type == "tool" else None
        choice = fields.chosen_tools(functions, CHOICES[asked.type] if asked else "auto", name)
        continues = self.messages[-1].role == "assistant"
        if continues and told.messages[-1].get("tool_calls"):
            raise bad_request(
                "the last message calls tools: send their results after it", "messages"
            )
        return Chat(
            messages=told.messages,
            returned=blocks.returned,
            tools=choice.tools,
            template=fields.thinking_options(
                self.output_config.effort if self.output_config else None,
                self.thinking.type != "disabled" if self.thinking else None,
            ),
            continue_final=continues,
            marked=tuple(sorted(told.marked)),
            must_call=choice.must_call,
        )

    def _system(self, keep_billing_header: bool) -> str | None:
        if self.system is None:
            return None
        given = [self.system] if isinstance(self.system, str) else [b.text for b in self.system]
        if not keep_billing_header and given:
            given[0] = without_billing_header(given[0])
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

    def parsed(self, server: ServerOptions) -> ParsedRequest:
        choice = self.tool_choice
        options = GenerationOptions(
            max_tokens=self.max_tokens,
            sampling=fields.sampling_of(self),
            stop=tuple(self.stop_sequences or ()),
            one_call=bool(choice and choice.disable_parallel_tool_use),
            salt=self.cache_salt,
            hint=RETURNING if any(mark.ttl == "1h" for mark in self.marks) else 1.0,
            stream=bool(self.stream),
        )
        return ParsedRequest(self.chat(server), options, self)


@dataclass
class ChatReader:
    """The canonical messages that were read from content blocks."""

    messages: list[Message] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    """Messages with a `cache_control` mark."""
    names: dict[str, str] = field(default_factory=dict)
    """The tools that were called, by the id of the call."""

    def read(self, role: str, content: Sequence[blocks.ContentBlock]) -> None:
        if role == "assistant":
            message = blocks.message_of(content)
            for call in message.get("tool_calls", ()):
                self.names[call["id"]] = call["function"]["name"]
            return self._add(message, content)
        # Tool results become messages of their own, before the user's text beside them.
        texts = []
        for block in content:
            if block.type == "tool_result":
                call_id = block.tool_use_id or ""
                self._add(tool_message(block.result, call_id, self.names.get(call_id)), [block])
            elif block.type == "text":
                texts.append(block)
            else:
                raise bad_request(
                    f"a {block.type} block belongs into an assistant message", "messages"
                )
        if texts or not content:
            text = "\n".join(block.text or "" for block in texts)
            self._add({"role": role, "content": text}, texts)

    def _add(self, message: Message, content: Sequence[blocks.ContentBlock]) -> None:
        if blocks.is_marked(content):
            self.marked.add(len(self.messages))
        self.messages.append(message)


def without_billing_header(system: str) -> str:
    """Remove a coding agent's first line from a system prompt. The line differs in every request,
    so no two prompts would begin alike."""
    if not system.startswith(BILLING_HEADER):
        return system
    return system.partition("\n")[2].lstrip("\n")


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Make the body of an error."""
    kind = ERROR_TYPES.get(error.status, "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }

"""Anthropic's requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..errors import bad_request
from ..fields import (
    MOST_TOKENS,
    Body,
    Fraction,
    Refused,
    Salt,
    StopText,
    Temperature,
    TokenCount,
    one_of,
    refuse,
)

MOST_MARKS = 4
CONSTRAINED = Refused("answers cannot be constrained to a schema; leave it out")
REFUSED = {
    "mcp_servers": Refused("this server calls no tools itself; leave it out", ([],)),
    "container": Refused("this server runs no containers; leave it out"),
    "output_format": CONSTRAINED,
    "compaction": Refused("leave it out"),
    "thread": Refused("send the whole conversation in messages"),
    "fallbacks": Refused("one model is loaded; leave it out", ([],)),
}


class CacheControl(Body):
    """A wish for a checkpoint."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class Block(Body):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: one_of("text", advice="this server reads text only")  # type: ignore[valid-type]
    text: str


class ContentBlock(Block):
    """Any block of a message; which fields it needs depends on its type."""

    type: one_of(  # type: ignore[valid-type]
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        advice="this server reads text, thinking, tool_use and tool_result blocks",
    )
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> ContentBlock:
        needed = {
            "text": ("text",),
            "thinking": ("thinking",),
            "tool_use": ("id", "name", "input"),
            "tool_result": ("tool_use_id",),
        }
        for name in needed.get(str(self.type), ()):
            if getattr(self, name) is None:
                raise ValueError(f"a {self.type} block needs {name!r}")
        return self


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]

    @property
    def blocks(self) -> list[ContentBlock]:
        if isinstance(self.content, str):
            return [ContentBlock(type="text", text=self.content)]
        return self.content


class AnthropicTool(Block):
    name: Annotated[str, Field(min_length=1)]
    type: one_of("custom", advice="this server has no tools of its own") | None = None  # type: ignore[valid-type]
    description: str | None = None
    input_schema: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _not_a_server_tool(cls, given: Any) -> Any:
        """Before a missing input_schema is complained of, which such a tool has not."""
        if isinstance(given, dict) and given.get("type") not in (None, "custom"):
            raise ValueError(
                f"tools of type {str(given['type'])[:40]!r} are not supported: this server has no "
                "tools of its own; describe yours with an input_schema"
            )
        return given


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError('tool_choice of type "tool" needs a name')
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _supported(self) -> OutputConfig:
        refuse(self.model_extra, {"format": CONSTRAINED})
        return self


class CountRequest(Body):
    """The part of a request that makes its prompt."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _supported(self) -> CountRequest:
        refuse(self.model_extra, REFUSED)
        for edit in (self.context_management or {}).get("edits") or ():
            kind = str(edit.get("type")) if isinstance(edit, dict) else str(edit)
            # Old thinking is the template's to keep or to drop.
            if not kind.startswith("clear_thinking"):
                raise bad_request(
                    f"context_management: {kind[:40]!r} is not supported; leave it out",
                    "context_management",
                )
        marks = self.marks
        if len(marks) > MOST_MARKS:
            raise bad_request(
                f"cache_control is set {len(marks)} times: at most {MOST_MARKS} are allowed",
                "cache_control",
            )
        if not self.tools and self.tool_choice and self.tool_choice.type in ("any", "tool"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return self

    @property
    def marks(self) -> list[CacheControl]:
        blocks: list[Block | CountRequest] = [self, *(self.tools or ())]
        blocks += self.system if isinstance(self.system, list) else ()
        for message in self.messages:
            blocks += message.content if isinstance(message.content, list) else ()
        return [block.cache_control for block in blocks if block.cache_control is not None]


class MessagesRequest(CountRequest):
    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: Salt | None = None

"""Anthropic's content blocks, in the requests of clients and in answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rewarm.prompt.messages import AnswerParts, Part, assistant_message, tool_message
from rewarm.values import Message

from ..errors import bad_request
from ..fields import Body, one_of

SIGNATURE = "rewarm"
"""Anthropic signs thinking. Clients require the field and send it back."""


class CacheControl(Body):
    """A wish for a checkpoint."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class Block(Body):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: one_of("text", advice="this server reads text only")  # type: ignore[valid-type]
    text: str


NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""The fields that a block needs, by its type."""


class ContentBlock(Block):
    """Any block of a message."""

    type: one_of(  # type: ignore[valid-type]
        *NEEDED, advice="this server reads text, thinking, tool_use and tool_result blocks"
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
        for name in NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"a {self.type} block needs {name!r}")
        return self

    @property
    def result(self) -> str:
        """The text of a tool's result."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ("error" if self.is_error else "")


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]

    @property
    def blocks(self) -> list[ContentBlock]:
        if isinstance(self.content, str):
            return [ContentBlock(type="text", text=self.content)]
        return self.content

    def told(self, called: dict[str, str]) -> Iterator[tuple[Message, Sequence[ContentBlock]]]:
        """Give its canonical messages, each with the blocks that it is made of. `called` has the
        names of the tools that were called so far, by the id of the call."""
        if self.role == "assistant":
            message = message_of(self.blocks)
            for call in message.get("tool_calls", ()):
                called[call["id"]] = call["function"]["name"]
            yield message, self.blocks
            return
        # Tool results become messages of their own, before the user's text beside them.
        texts = []
        for block in self.blocks:
            if block.type == "tool_result":
                call_id = block.tool_use_id or ""
                yield tool_message(block.result, call_id, called.get(call_id)), [block]
            elif block.type == "text":
                texts.append(block)
            else:
                wrong = f"a {block.type} block belongs into an assistant message"
                raise bad_request(wrong, "messages")
        if texts or not self.blocks:
            text = "\n".join(block.text or "" for block in texts)
            yield {"role": self.role, "content": text}, texts


class AnthropicTool(Block):
    name: Annotated[str, Field(min_length=1)]
    type: one_of("custom", advice="this server has no tools of its own") | None = None  # type: ignore[valid-type]
    description: str | None = None
    input_schema: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _not_a_server_tool(cls, given: Any) -> Any:
        # A server's tool has no input_schema, and the error would only name that.
        if isinstance(given, dict) and given.get("type") not in (None, "custom"):
            raise ValueError(
                f"tools of type {str(given['type'])[:40]!r} are not supported: this server has no "
                "tools of its own; describe yours with an input_schema"
            )
        return given

    def as_function(self) -> dict[str, Any]:
        """Give the tool in OpenAI's shape."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        return {"type": "function", "function": function}


def is_marked(*blocks: Sequence[Block] | None) -> bool:
    return any(block.cache_control is not None for some in blocks for block in some or ())


def message_of(blocks: Sequence[ContentBlock]) -> Message:
    """Make the assistant's message from blocks. They are parts of one answer, so nothing is put
    between them."""
    text = thought = ""
    calls = []
    for block in blocks:
        if block.type == "text":
            text += block.text or ""
        elif block.type == "thinking":
            thought += block.thinking or ""
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": block.input or {}}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "tool_result":
            raise bad_request("a tool_result belongs into a user message", "messages")
    return assistant_message(text, thought, calls)


def returned(answer: AnswerParts) -> Message:
    """Give the message that results when a client sends the blocks of an answer back."""
    return message_of([ContentBlock.model_validate(b) for b in content_blocks(answer.parts)])


def content_blocks(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Make the blocks of an answer."""
    return [block_of(part) for part in parts if is_block(part)]


def is_block(part: Part) -> bool:
    """Say whether a part is a block. Text of blanks only is none: models put it around calls."""
    return part.kind != "text" or bool(part.text.strip())


def block_of(part: Part) -> dict[str, Any]:
    """Write a part of an answer as a block."""
    if part.call is not None:
        function = part.call["function"]
        named = {"id": part.call["id"], "name": function["name"]}
        return {"type": "tool_use", **named, "input": _input(function["arguments"])}
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    return {"type": "text", "text": part.text}


def _input(arguments: str) -> dict[str, Any]:
    """Give the arguments of a call. They are empty where the model wrote no JSON object."""
    try:
        found = json.loads(arguments)
        json.dumps(found, allow_nan=False)  # Python reads NaN and infinity, which no reply can hold
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}

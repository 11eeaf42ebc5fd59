"""Anthropic's messages as a canonical chat, and the content blocks that an answer comes back as."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewarm.generate.options import RETURNING, GenerationOptions
from rewarm.options import ServerOptions
from rewarm.prompt.chat import Chat
from rewarm.prompt.messages import Part, Said, assistant_message, tool_message
from rewarm.values import Message, Sampling

from ..errors import ApiError, bad_request
from ..fields import Asked, thinking_options
from .parse import AnthropicTool, Block, ContentBlock, CountRequest, MessagesRequest

SIGNATURE = "rewarm"
"""Anthropic signs thinking; clients want the field and send it back."""

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

BILLING_HEADER = "x-anthropic-billing-header:"
SYSTEM_AND_TOOLS = -1
"""The mark after them."""


def parse_message(body: bytes, server: ServerOptions) -> Asked:
    asked = MessagesRequest.model_validate_json(body)
    choice = asked.tool_choice
    options = GenerationOptions(
        max_tokens=asked.max_tokens,
        sampling=Sampling(
            temperature=asked.temperature or 0.0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=asked.top_k or 0,
        ),
        stop=tuple(asked.stop_sequences or ()),
        one_call=bool(choice and choice.disable_parallel_tool_use),
        salt=asked.cache_salt,
        hint=RETURNING if any(mark.ttl == "1h" for mark in asked.marks) else 1.0,
        stream=bool(asked.stream),
    )
    return Asked(chat_of(asked, server), options, asked)


def parse_count(
    body: bytes, server: ServerOptions, schema: type[CountRequest] = CountRequest
) -> Asked:
    asked = schema.model_validate_json(body)
    salt = getattr(asked, "cache_salt", None)
    return Asked(chat_of(asked, server), GenerationOptions(salt=salt), asked)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def chat_of(asked: CountRequest, server: ServerOptions) -> Chat:
    reader = _Reader()
    system = _system(asked, server.keep_billing_header)
    if system is not None:
        reader.messages.append({"role": "system", "content": system})
    if _marked(asked.tools) or (isinstance(asked.system, list) and _marked(asked.system)):
        reader.marked.add(SYSTEM_AND_TOOLS)
    for message in asked.messages:
        reader.read(message.role, message.blocks)
    messages, marked = reader.messages, reader.marked
    if asked.cache_control is not None:
        marked.add(len(messages) - 1)
    tools, must_call = _tools(asked)
    thinking = None if asked.thinking is None else asked.thinking.type != "disabled"
    continues = asked.messages[-1].role == "assistant"
    if continues and messages[-1].get("tool_calls"):
        raise bad_request("the last message calls tools: send their results after it", "messages")
    return Chat(
        messages=messages,
        returned=returned,
        tools=tools,
        template=thinking_options(
            asked.output_config.effort if asked.output_config else None, thinking
        ),
        continue_final=continues,
        marked=tuple(sorted(marked)),
        must_call=must_call,
    )


def returned(answer: Said) -> Message:
    """The message that the blocks of a delivered answer are when they come back."""
    return _said([ContentBlock.model_validate(block) for block in content_blocks(answer.parts)])


def content_blocks(parts: Iterable[Part]) -> list[dict[str, Any]]:
    return [block_of(part) for part in parts if is_block(part)]


def is_block(part: Part) -> bool:
    """Text of nothing but blanks is none: models put them around calls."""
    return part.kind != "text" or bool(part.text.strip())


def block_of(part: Part) -> dict[str, Any]:
    if part.call is not None:
        function = part.call["function"]
        return {
            "type": "tool_use",
            "id": part.call["id"],
            "name": function["name"],
            "input": _input(function["arguments"]),
        }
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    return {"type": "text", "text": part.text}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; a model may have written anything."""
    try:
        found = json.loads(arguments)
        json.dumps(found, allow_nan=False)  # Python reads numbers that no reply can hold
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}


def _system(asked: CountRequest, keep_billing_header: bool) -> str | None:
    if asked.system is None:
        return None
    given = [asked.system] if isinstance(asked.system, str) else [b.text for b in asked.system]
    if not keep_billing_header and given:
        given[0] = without_billing_header(given[0])
    texts = [text for text in given if text]
    return "\n\n".join(texts) if texts else None


def without_billing_header(system: str) -> str:
    """A coding agent's first line, other in every request: with it, no two prompts begin alike."""
    if not system.startswith(BILLING_HEADER):
        return system
    return system.partition("\n")[2].lstrip("\n")


def _said(blocks: Sequence[ContentBlock]) -> Message:
    """The blocks are stretches of one answer: nothing stands between them."""
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


@dataclass
class _Reader:
    """The messages of a conversation so far."""

    messages: list[Message] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    """The tools that were called, by the id of the call."""

    def read(self, role: str, blocks: Sequence[ContentBlock]) -> None:
        if role != "assistant":
            return self._read_input(role, blocks)
        message = _said(blocks)
        for call in message.get("tool_calls", ()):
            self.names[call["id"]] = call["function"]["name"]
        self._add(message, _marked(blocks))

    def _read_input(self, role: str, blocks: Sequence[ContentBlock]) -> None:
        """Results become messages of their own, before what the user says beside them."""
        words = []
        for block in blocks:
            if block.type == "tool_result":
                call_id = block.tool_use_id or ""
                message = tool_message(_result(block), call_id, self.names.get(call_id))
                self._add(message, block.cache_control is not None)
            elif block.type == "text":
                words.append(block)
            else:
                raise bad_request(
                    f"a {block.type} block belongs into an assistant message", "messages"
                )
        if words or not blocks:
            text = "\n".join(block.text or "" for block in words)
            self._add({"role": role, "content": text}, _marked(words))

    def _add(self, message: Message, is_marked: bool) -> None:
        self.messages.append(message)
        if is_marked:
            self.marked.add(len(self.messages) - 1)


def _result(block: ContentBlock) -> str:
    if isinstance(block.content, list):
        return "\n".join(part.text for part in block.content)
    return block.content or ("error" if block.is_error else "")


def _tools(asked: CountRequest) -> tuple[list[dict[str, Any]] | None, bool]:
    """The tools that the model is shown; true where it has to call one."""
    choice = asked.tool_choice
    if not asked.tools or (choice is not None and choice.type == "none"):
        return None, False
    shown = asked.tools
    if choice is not None and choice.type == "tool":
        shown = [tool for tool in asked.tools if tool.name == choice.name][:1]
        if not shown:
            name = (choice.name or "")[:80]
            raise bad_request(f"tool_choice: there is no tool {name!r} in tools", "tool_choice")
    must_call = choice is not None and choice.type in ("any", "tool")
    return [function_tool(tool) for tool in shown], must_call


def function_tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def _marked(blocks: Sequence[Block] | None) -> bool:
    return any(block.cache_control is not None for block in blocks or ())

"""Anthropic's messages as a chat that templates know."""

from __future__ import annotations

import json
from typing import Any

from rewarm.generate.collect import Choice
from rewarm.values import Message

from ..errors import bad_request
from ..fields import thinking_options
from ..messages import assistant_message, tool_message
from ..service import Chat
from .blocks import content_blocks
from .parse import AnthropicTool, ContentBlock, CountRequest, TextBlock

BILLING_HEADER = "x-anthropic-billing-header:"
SYSTEM_AND_TOOLS = -1
"""The mark after them."""


def chat_of(asked: CountRequest, *, keep_billing_header: bool) -> Chat:
    messages: list[Message] = []
    marks: set[int] = set()
    system = _system(asked, keep_billing_header)
    if system is not None:
        messages.append({"role": "system", "content": system})
    if _marked(asked.tools) or (isinstance(asked.system, list) and _marked(asked.system)):
        marks.add(SYSTEM_AND_TOOLS)
    names: dict[str, str] = {}
    for message in asked.messages:
        if message.role == "assistant":
            _add_assistant(message.blocks, messages, marks, names)
        else:
            _add_input(message.role, message.blocks, messages, marks, names)
    if asked.cache_control is not None:
        marks.add(len(messages) - 1)
    tools, must_call = _tools(asked)
    thinking = None if asked.thinking is None else asked.thinking.type != "disabled"
    continues = asked.messages[-1].role == "assistant"
    if continues and messages[-1].get("tool_calls"):
        raise bad_request("the last message calls tools: send their results after it", "messages")
    return Chat(
        messages=messages,
        delivered=delivered,
        tools=tools,
        template=thinking_options(
            asked.output_config.effort if asked.output_config else None, thinking
        ),
        continue_final=continues,
        marks=tuple(sorted(marks)),
        must_call=must_call,
    )


def delivered(choice: Choice) -> Message:
    """As the blocks of the reply come back."""
    blocks = content_blocks(choice.parts)
    return _said([ContentBlock.model_validate(block) for block in blocks])


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


def _add_assistant(
    blocks: list[ContentBlock], messages: list[Message], marks: set[int], names: dict[str, str]
) -> None:
    message = _said(blocks)
    messages.append(message)
    names.update((call["id"], call["function"]["name"]) for call in message.get("tool_calls", ()))
    if _marked(blocks):
        marks.add(len(messages) - 1)


def _said(blocks: list[ContentBlock]) -> Message:
    """The blocks are stretches of one answer: nothing stands between them."""
    text = thought = ""
    calls = []
    for block in blocks:
        if block.type == "text":
            text += block.text or ""
        elif block.type == "thinking":
            thought += block.thinking or ""
        elif block.type == "tool_use":
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = {"name": block.name or "", "arguments": arguments}
            calls.append({"id": block.id or "", "function": function})
        elif block.type == "tool_result":
            raise bad_request("a tool_result belongs into a user message", "messages")
    return assistant_message(text, thought, calls)


def _add_input(
    role: str,
    blocks: list[ContentBlock],
    messages: list[Message],
    marks: set[int],
    names: dict[str, str],
) -> None:
    """Results become messages of their own, before what the user says beside them."""
    words = []
    for block in blocks:
        if block.type == "tool_result":
            call_id = block.tool_use_id or ""
            messages.append(tool_message(_result(block), call_id, names.get(call_id)))
            if block.cache_control is not None:
                marks.add(len(messages) - 1)
        elif block.type == "text":
            words.append(block)
        else:
            raise bad_request(f"a {block.type} block belongs into an assistant message", "messages")
    if words or not blocks:
        text = "\n".join(block.text or "" for block in words)
        messages.append({"role": role, "content": text})
        if _marked(words):
            marks.add(len(messages) - 1)


def _result(block: ContentBlock) -> str:
    if isinstance(block.content, list):
        return "\n".join(part.text for part in block.content)
    return block.content or ("error" if block.is_error else "")


def _tools(asked: CountRequest) -> tuple[list[dict[str, Any]] | None, bool]:
    """The tools that the model is shown, and whether it has to call one."""
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


def _marked(blocks: list[ContentBlock] | list[TextBlock] | list[AnthropicTool] | None) -> bool:
    return any(block.cache_control is not None for block in blocks or ())

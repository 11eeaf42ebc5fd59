"""Requests of all dialects become chats that templates can render."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from rewarm.errors import ContextExceeded, InvalidOption, NotReady, QueueFull
from rewarm.options import ServerOptions
from rewarm.prompt.chat import Chat
from rewarm.prompt.messages import Part
from rewarm.server.anthropic import parse as anthropic
from rewarm.server.anthropic.blocks import content_blocks
from rewarm.server.anthropic.parse import MessagesRequest
from rewarm.server.anthropic.reply import usage as anthropic_usage
from rewarm.server.errors import ApiError, as_api_error
from rewarm.server.openai import parse as openai
from rewarm.server.openai.parse import UNSUPPORTED, ChatRequest, CompletionRequest

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
MARK = {"type": "ephemeral"}


def openai_chat(**body: Any) -> Chat:
    asked = ChatRequest.parse(json.dumps({"messages": [USER], **body}).encode(), ServerOptions())
    assert isinstance(asked.prompt, Chat)
    return asked.prompt


def anthropic_chat(keep_billing_header: bool = False, **body: Any) -> Chat:
    whole = {"model": "m", "max_tokens": 5, "messages": [USER], **body}
    server = ServerOptions(keep_billing_header=keep_billing_header)
    asked = MessagesRequest.parse(json.dumps(whole).encode(), server)
    assert isinstance(asked.prompt, Chat)
    return asked.prompt


def problem(schema: Any, **body: Any) -> ApiError:
    with pytest.raises((ValidationError, ApiError)) as found:
        schema.parse(json.dumps(body).encode(), ServerOptions())
    return as_api_error(found.value)


def test_parts_are_joined_and_both_names_of_thinking_are_read() -> None:
    said = {"role": "assistant", "content": None, "reasoning": "Hm."}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = openai_chat(messages=[{"role": "user", "content": parts}, said, USER])
    assert [m["content"] for m in chat.messages] == ["ab", "", "Hello"]
    assert chat.messages[1]["reasoning_content"] == "Hm."


def test_an_image_is_refused_by_name() -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:"}}]
    error = problem(ChatRequest, messages=[{"role": "user", "content": content}])
    assert error.status == 400
    assert "'image_url' is not supported" in error.message
    assert error.param == "messages.0.content.0.type"


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_a_field_that_would_change_the_answer_is_refused(field: str) -> None:
    error = problem(ChatRequest, messages=[USER], **{field: {"type": "something"}})
    assert (error.status, error.param) == (400, field)
    assert field in error.message
    openai_chat(**{field: None})
    for harmless in UNSUPPORTED[field].harmless:
        openai_chat(**{field: harmless})


def test_fields_that_change_nothing_are_accepted() -> None:
    plain = openai_chat()
    same = openai_chat(user="u", metadata={"a": "b"}, store=True, service_tier="auto", unknown=1)
    assert (same.messages, same.template, same.tools) == (plain.messages, plain.template, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0"),
        ("temperature", -1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("n", 17),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 1000}),
        ("top_logprobs", 21),
        ("seed", 1.5),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("stream", "yes"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    error = problem(ChatRequest, messages=[USER], **{field: value})
    assert error.status == 400
    assert error.message.startswith(field), error.message
    assert error.param is not None
    assert error.param.startswith(field)


def test_tool_choice_says_what_the_model_is_shown() -> None:
    other = {"type": "function", "function": {"name": "wind"}}
    both = [TOOL, other]
    assert openai_chat(tools=both).tools == both
    assert openai_chat(tools=both, tool_choice="none").tools is None
    assert openai_chat(tools=both, tool_choice="required").must_call
    named = {"type": "function", "function": {"name": "wind"}}
    chat = openai_chat(tools=both, tool_choice=named)
    assert (chat.tools, chat.must_call) == ([other], True)
    with pytest.raises(ApiError, match="no tool 'nope'"):
        openai_chat(tools=both, tool_choice={"type": "function", "function": {"name": "nope"}})


def test_a_tool_is_shown_as_it_was_sent() -> None:
    odd = {
        "function": {"strict": True, "parameters": {"b": 1, "a": 2}, "name": "x"},
        "type": "function",
    }
    assert json.dumps(openai_chat(tools=[odd]).tools) == json.dumps([odd])


def test_effort_and_thinking_go_to_the_template() -> None:
    assert openai_chat(reasoning_effort="low").template == {"reasoning_effort": "low"}
    assert openai_chat(reasoning_effort="none").template == {"enable_thinking": False}
    chat = openai_chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    assert chat.template == {"enable_thinking": False}
    assert anthropic_chat(thinking={"type": "disabled"}).template == {"enable_thinking": False}
    assert anthropic_chat().template == {}


def test_a_last_assistant_message_is_continued_where_it_says_so() -> None:
    begun = {"role": "assistant", "content": "Well"}
    assert not openai_chat(messages=[USER, begun]).continue_final
    assert openai_chat(messages=[USER, {**begun, "prefix": True}]).continue_final
    assert openai_chat(messages=[USER, begun], continue_final_message=True).continue_final
    assert anthropic_chat(messages=[USER, begun]).continue_final
    error = problem(ChatRequest, messages=[USER], continue_final_message=True)
    assert error.status == 400


def test_prompts_of_every_form() -> None:
    def prompts(prompt: Any) -> Any:
        return CompletionRequest.model_validate_json(json.dumps({"prompt": prompt})).prompts

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1], [2]]) == [[1], [2]]
    for wrong in (None, [], [[]], ["a", 1], [-1], {"a": 1}):
        assert problem(CompletionRequest, prompt=wrong).status == 400


def test_results_and_words_of_a_user_message_are_taken_apart() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "tide", "input": {"at": "noon"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "3"}],
    }
    chat = anthropic_chat(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
        messages=[
            USER,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Look"}, call]},
            {"role": "user", "content": [{"type": "text", "text": "And?"}, result]},
        ],
    )
    system, _, said, tool, user = chat.messages
    assert system == {"role": "system", "content": "Be\n\nbrief"}
    assert said["content"] == "Look"
    assert said["reasoning_content"] == "Hm."
    assert said["tool_calls"][0]["function"] == {"name": "tide", "arguments": {"at": "noon"}}
    assert tool == {"role": "tool", "content": "3", "tool_call_id": "t1", "name": "tide"}
    assert user == {"role": "user", "content": "And?"}


def test_nothing_is_put_between_the_blocks_of_an_answer() -> None:
    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    def thought(said: str) -> dict[str, str]:
        return {"type": "thinking", "thinking": said, "signature": "s"}

    call = {"type": "tool_use", "id": "t1", "name": "tide", "input": {}}
    content = [thought("Hm"), text("I look"), call, thought("."), text(", again.")]
    chat = anthropic_chat(messages=[USER, {"role": "assistant", "content": content}, USER])
    said = chat.messages[1]
    assert (said["content"], said["reasoning_content"]) == ("I look, again.", "Hm.")


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"at": NaN}', '{"at": 1e999}', "[" * 10**5])
def test_a_call_is_a_block_whatever_a_model_wrote(arguments: str) -> None:
    call = {"id": "t1", "function": {"name": "tide", "arguments": arguments}}
    (block,) = content_blocks([Part("call", call=call), Part("text", " \n")])
    assert block == {"type": "tool_use", "id": "t1", "name": "tide", "input": {}}


def test_tools_become_functions() -> None:
    chat = anthropic_chat(
        tools=[{"name": "tide", "description": "When", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any"},
    )
    function = {"name": "tide", "description": "When", "parameters": {"type": "object"}}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.must_call


def test_a_server_tool_is_refused_by_name() -> None:
    error = problem(
        MessagesRequest,
        model="m",
        max_tokens=1,
        messages=[USER],
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    )
    assert "web_search_20250305" in error.message


@pytest.mark.parametrize("kind", ["image", "document", "server_tool_use"])
def test_blocks_that_cannot_be_read_are_refused(kind: str) -> None:
    content = [{"type": kind, "source": {}}]
    error = problem(
        MessagesRequest, model="m", max_tokens=1, messages=[{"role": "user", "content": content}]
    )
    assert error.status == 400
    assert repr(kind) in error.message


def test_marks_are_the_messages_they_stand_in() -> None:
    marked = {"type": "text", "text": "b", "cache_control": MARK}
    chat = anthropic_chat(
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[
            USER,
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": [marked]},
        ],
    )
    assert chat.marked == (-1, 3)
    assert anthropic_chat(cache_control=MARK).marked == (0,)
    assert anthropic_chat().marked == ()


def test_five_marks_are_too_many() -> None:
    marked = [{"type": "text", "text": "b", "cache_control": MARK}] * 5
    error = problem(
        MessagesRequest, model="m", max_tokens=1, messages=[{"role": "user", "content": marked}]
    )
    assert "5 times: at most 4" in error.message


def test_the_billing_header_is_left_out_unless_it_is_wanted() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"
    block = {"type": "text", "text": header}
    rest = {"type": "text", "text": "You code."}
    for system in ([block, rest], f"{header}\n\nYou code."):
        assert anthropic_chat(system=system).messages[0]["content"] == "You code."
        kept = anthropic_chat(keep_billing_header=True, system=system).messages[0]["content"]
        assert kept == f"{header}\n\nYou code."
    assert anthropic_chat(system=[block]).messages == [USER]
    later = "a x-anthropic-billing-header: b"
    assert anthropic_chat(system=later).messages[0]["content"] == later


def test_anthropic_usage_counts_every_prompt_token_once() -> None:
    cold = anthropic_usage(prompt=100, resume=0, last_mark=80)
    assert (cold["cache_read_input_tokens"], cold["cache_creation_input_tokens"]) == (0, 80)
    warm = anthropic_usage(prompt=100, resume=90, last_mark=80)
    assert (warm["cache_read_input_tokens"], warm["cache_creation_input_tokens"]) == (90, 0)
    plain = anthropic_usage(prompt=100, resume=30, last_mark=0)
    assert plain["cache_creation_input_tokens"] == 0
    for usage in (cold, warm, plain):
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[part] for part in parts) == 100


def test_errors_have_each_apis_status_and_shape() -> None:
    full = as_api_error(QueueFull("256 wait", retry_after=3))
    assert (full.status, full.headers) == (429, {"Retry-After": "3"})
    assert as_api_error(NotReady("loading")).status == 503
    assert as_api_error(ContextExceeded("9 of 8")).code == "context_length_exceeded"
    fault = as_api_error(RuntimeError("secret /path"))
    assert fault.status == 500
    assert "secret" not in fault.message
    assert openai.error_body(full, "req_1")["error"]["type"] == "rate_limit_error"
    body = anthropic.error_body(full, "req_1")
    assert (body["error"]["type"], body["request_id"]) == ("rate_limit_error", "req_1")


def test_a_public_address_needs_a_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        ServerOptions(host=host).check_bind()
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(InvalidOption, match="other machines"):
            ServerOptions(host=host).check_bind()
        ServerOptions(host=host, api_key="k").check_bind()
        ServerOptions(host=host, allow_public=True).check_bind()

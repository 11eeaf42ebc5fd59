"""The Anthropic API, through Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.server.servers import Running, running
from tests.tiny import END

SYSTEM = "You keep the harbour. " * 6
TOOLS: Any = [
    {
        "name": "tide",
        "description": "When the tide is high",
        "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
    }
]
CALL = '<tool_call>{"name": "tide", "arguments": {"at": "noon"}}</tool_call>'
EPHEMERAL: Any = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(api_key="secret") as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as found:
        yield found


def ask(client: anthropic.Anthropic, *said: Any, **options: Any) -> Any:
    return client.messages.create(**request(*said, **options))


def request(*said: Any, **options: Any) -> Any:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return {
        "model": "claude-any",
        "max_tokens": 200,
        "system": SYSTEM,
        "messages": messages,
        **options,
    }


def prompt_tokens(usage: Any) -> int:
    return int(
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


def test_thinking_and_text_are_blocks(server: Running, client: anthropic.Anthropic) -> None:
    with server.says(f"Let me see.</think>\n\nThree boats.{END}"):
        reply = ask(client, "Which boats?")
    thinking, text = reply.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me see.")
    assert (text.type, text.text.strip()) == ("text", "Three boats.")
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.model == "claude-any"
    assert reply.usage.output_tokens > 20
    assert reply.rewarm["prefilled_tokens"] > 0


def test_a_stream_adds_up_to_the_whole_reply(server: Running, client: anthropic.Anthropic) -> None:
    with server.says(f"I ask.</think>Wait.{CALL}{END}"):
        whole = ask(client, "When is high tide?", tools=TOOLS)
        with client.messages.stream(**request("When is high tide?", tools=TOOLS)) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert [b.type for b in final.content] == ["thinking", "text", "tool_use"]
    assert final.stop_reason == whole.stop_reason == "tool_use"
    for streamed, given in zip(final.content, whole.content, strict=True):
        one, other = streamed.model_dump(), given.model_dump()
        one.pop("id", None), other.pop("id", None)
        assert {k: one[k] for k in other if other[k] is not None} == {
            k: v for k, v in other.items() if v is not None
        }
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_stream_knows_at_its_start_what_the_cache_gave(
    server: Running, client: anthropic.Anthropic
) -> None:
    body = request("What did you say of the lighthouse?")
    client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        start = next(event for event in stream if event.type == "message_start")
        final = stream.get_final_message()
    assert start.message.usage.cache_read_input_tokens > 100
    assert final.usage.cache_read_input_tokens == start.message.usage.cache_read_input_tokens
    assert final.usage.input_tokens == start.message.usage.input_tokens


def test_a_tool_loop(server: Running, client: anthropic.Anthropic) -> None:
    with server.says(f"I ask.</think>{CALL}{END}"):
        first = ask(client, "When is the tide high?", tools=TOOLS)
    server.settle()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.name, call.input) == ("tide", {"at": "noon"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "at 14:10"}
    with server.says(f"</think>Ten past two.{END}"):
        final = ask(
            client,
            "When is the tide high?",
            [block.model_dump(exclude_none=True) for block in first.content],
            [result],
            tools=TOOLS,
        )
    assert final.content[-1].text == "Ten past two."
    # Warm-ahead computed the call as it comes back.
    assert final.rewarm["prefilled_tokens"] <= len("at 14:10") + 40


def test_blanks_before_a_call_are_no_text_block(
    server: Running, client: anthropic.Anthropic
) -> None:
    with server.says(f"Hm.</think>\n\n{CALL}{END}"):
        whole = ask(client, "Tide?", tools=TOOLS)
        with client.messages.stream(**request("Tide?", tools=TOOLS)) as stream:
            final = stream.get_final_message()
    assert [b.type for b in whole.content] == ["thinking", "tool_use"]
    assert [b.type for b in final.content] == ["thinking", "tool_use"]


def answered(client: anthropic.Anthropic, stream: bool, **body: Any) -> Any:
    if not stream:
        return client.messages.create(**body)
    with client.messages.stream(**body) as events:
        return events.get_final_message()


OTHER = CALL.replace("noon", "dusk")
ANSWERS = {
    "plain": "Hm.</think>\n\nNo boats.",
    "one call": f"Hm.</think>\n\nI look.\n{CALL}",
    "nothing but a call": f"Hm.</think>\n\n{CALL}\n",
    "two calls": f"Hm.</think>\n\nI look.\n{CALL}\n{OTHER}",
    "text between calls": f"Hm.</think>I look.{CALL}\nAnd again: {OTHER} There.",
    "thinking between calls": f"Hm.</think>{CALL}\n<think>More?</think>\nYes. {OTHER}",
    "thinking after blanks": f"Hm.</think>\n<think>Hm!</think>\n{CALL}\n{OTHER}",
}
BLOCKS = {
    "plain": ["Hm.", "No boats."],
    "one call": ["Hm.", "I look.\n", "noon"],
    "nothing but a call": ["Hm.", "noon"],
    "two calls": ["Hm.", "I look.\n", "noon", "dusk"],
    "text between calls": ["Hm.", "I look.", "noon", "\nAnd again: ", "dusk", " There."],
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_warm_when_its_blocks_come_back(
    server: Running, client: anthropic.Anthropic, name: str, stream: bool
) -> None:
    asked = f"Of {name}, {stream}: what do you see out there, beyond the light?"
    with server.says(ANSWERS[name] + END):
        first = answered(client, stream, **request(asked, tools=TOOLS))
    server.settle()
    blocks = [block.model_dump(exclude_none=True) for block in first.content]
    shown = [b.get("thinking") or b.get("text") or b["input"]["at"] for b in blocks]
    assert shown == BLOCKS.get(name, shown)
    results: Any = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "14:10"}
        for b in blocks
        if b["type"] == "tool_use"
    ]
    back = results or [{"type": "text", "text": "More"}]
    with server.says(f"</think>Good.{END}"):
        reply = ask(client, asked, blocks, back, tools=TOOLS)
    words = "".join(b.get("content") or b.get("text") for b in back)
    assert reply.rewarm["prefilled_tokens"] <= len(words) + 40


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_has_the_blocks_of_the_whole(
    server: Running, client: anthropic.Anthropic, name: str
) -> None:
    with server.says(ANSWERS[name] + END):
        whole, streamed = (
            [
                block.model_dump(include={"type", "text", "thinking", "signature", "name", "input"})
                for block in answered(client, stream, **request("See?", tools=TOOLS)).content
            ]
            for stream in (False, True)
        )
    assert streamed == whole


def test_a_stop_sequence_is_named(server: Running, client: anthropic.Anthropic) -> None:
    with server.says(f"</think>One. Two. Three.{END}"):
        reply = ask(client, "Count", stop_sequences=["Two"])
        with client.messages.stream(**request("Count", stop_sequences=["Two"])) as stream:
            final = stream.get_final_message()
    for message in (reply, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Two")
        assert message.content[-1].text == "One. "
    assert ask(client, "Count", max_tokens=3).stop_reason == "max_tokens"


def test_thinking_can_be_turned_off(server: Running, client: anthropic.Anthropic) -> None:
    with server.says(f"Plainly.{END}"):
        reply = ask(client, "Answer", thinking={"type": "disabled"})
        thought = ask(client, "Answer", thinking={"type": "enabled", "budget_tokens": 1024})
    assert [b.type for b in reply.content] == ["text"]
    assert [b.type for b in thought.content] == ["thinking"]


def test_marks_say_what_was_written_and_what_was_read(
    server: Running, client: anthropic.Anthropic
) -> None:
    block: Any = {"type": "text", "text": "A long book. " * 40, "cache_control": EPHEMERAL}
    options = {"system": [block], "max_tokens": 2}
    first = ask(client, "Who wrote it?", **options).usage
    second = ask(client, "What is it about?", **options).usage
    assert first.cache_creation_input_tokens > 400
    assert second.cache_read_input_tokens > 400
    assert second.cache_creation_input_tokens == 0
    assert second.input_tokens < 60
    plain = ask(client, "No mark", system="Some other words", max_tokens=2).usage
    assert plain.cache_creation_input_tokens == 0


def test_a_billing_header_costs_no_hit(server: Running, client: anthropic.Anthropic) -> None:
    def asked(code: str) -> Any:
        header: Any = {"type": "text", "text": f"x-anthropic-billing-header: cch={code};"}
        book: Any = {"type": "text", "text": "You are a coding agent. " * 20}
        return ask(client, "Fix it", system=[header, book], max_tokens=2).usage

    asked("a1")
    assert asked("b2").cache_read_input_tokens > 400


def test_counting_is_what_a_request_is_charged(
    server: Running, client: anthropic.Anthropic
) -> None:
    body = request("How many?", tools=TOOLS)
    body.pop("max_tokens")
    counted = client.messages.count_tokens(**body).input_tokens
    usage = client.messages.create(**body, max_tokens=1).usage
    assert counted == prompt_tokens(usage)


def test_a_begun_answer_is_continued(server: Running, client: anthropic.Anthropic) -> None:
    with server.says(f" no.{END}"):
        reply = ask(client, "What?", "The answer is")
    assert [b.text for b in reply.content] == [" no."]


def test_betas_are_accepted(server: Running, client: anthropic.Anthropic) -> None:
    reply = client.beta.messages.create(
        **request("Hello", max_tokens=2), betas=["interleaved-thinking-2025-05-14"]
    )
    assert reply.role == "assistant"


def test_errors_are_the_clients_own_exceptions(
    server: Running, client: anthropic.Anthropic
) -> None:
    image: Any = [{"type": "image", "source": {"type": "url", "url": "http://x"}}]
    with pytest.raises(anthropic.BadRequestError, match="'image' is not supported") as found:
        ask(client, image)
    body: Any = found.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == found.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.BadRequestError, match=r"max_tokens: field required"):
        client.post(
            "/v1/messages",
            body={"model": "m", "messages": [{"role": "user", "content": "x"}]},
            cast_to=object,
        )
    wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError, match="this API key is wrong"):
        ask(wrong, "Hello")
    with pytest.raises(anthropic.BadRequestError, match=r"context is 32,768"):
        ask(client, "x " * 17_000)


def test_a_client_that_goes_away_stops_its_work(
    server: Running, client: anthropic.Anthropic
) -> None:
    with client.messages.stream(**request("On and on", max_tokens=5000)) as stream:
        for i, _ in enumerate(stream):
            if i == 6:
                break
    server.settle()
    choice = server.engine.requests[-1].sink.choices[0]  # type: ignore[attr-defined]
    assert choice.finish == "cancelled"
    assert choice.tokens < 5000


def test_a_stream_begins_with_what_came_from_below_memory(tmp_path: Path) -> None:
    body = {
        "model": "tiny",
        "max_tokens": 4,
        "stream": True,
        "messages": [{"role": "user", "content": "Where is the boat? " * 20}],
    }
    for comes_from_disk in (False, True):
        options = {"cache_options": {"disk": str(tmp_path)}}
        with running(engine_options=options) as server, server.client() as client:
            text = client.post("/v1/messages", json=body).text
            events = [json.loads(line[6:]) for line in text.splitlines() if line[:6] == "data: "]
            (start,) = (event for event in events if event["type"] == "message_start")
            (end,) = (event for event in events if event["type"] == "message_delta")
            known = end["usage"]["cache_read_input_tokens"]
            assert start["message"]["usage"]["cache_read_input_tokens"] == known
            assert (known > 0) is comes_from_disk
        server.engine.core.cache.close()

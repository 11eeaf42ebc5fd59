"""The OpenAI API, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.servers import Running, running
from tests.tiny import END

SYSTEM = {"role": "system", "content": "You keep the harbour. " * 6}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "When the tide is high",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>{"name": "tide", "arguments": {"at": "noon"}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, *said: str, **options: Any) -> Any:
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return client.chat.completions.create(
        model="any", messages=[SYSTEM, *chat], **{"max_tokens": 200, **options}
    )


def test_an_answer_with_its_thinking_and_its_usage(server: Running, client: openai.OpenAI) -> None:
    with server.says(f"Let me see.</think>Three boats.{END}"):
        reply = ask(client, "Which boats are in?")
    (choice,) = reply.choices
    assert choice.message.content == "Three boats."
    assert choice.message.reasoning_content == choice.message.reasoning == "Let me see."
    assert choice.finish_reason == "stop"
    assert reply.model == "any"
    assert reply.usage.completion_tokens == len("Let me see.") + 1 + len("Three boats.") + 1
    assert reply.usage.completion_tokens_details.reasoning_tokens == len("Let me see.")
    assert reply._request_id.startswith("req_")


def test_a_stream_says_the_same_as_a_whole_reply(server: Running, client: openai.OpenAI) -> None:
    with server.says(f"Hm.</think>A café.{END}"):
        whole = ask(client, "Where?", logprobs=True, top_logprobs=2)
        chunks = list(
            ask(
                client,
                "Where?",
                stream=True,
                stream_options={"include_usage": True},
                logprobs=True,
                top_logprobs=2,
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content == "A café."
    assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == "Hm."
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [f for f in finishes if f] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].rewarm["prefilled_tokens"] >= 1
    streamed = [
        entry
        for c in chunks
        if c.choices and c.choices[0].logprobs
        for entry in c.choices[0].logprobs.content
    ]
    said = whole.choices[0].logprobs.content
    assert [e.token for e in streamed] == [e.token for e in said]
    assert bytes(b for e in streamed for b in e.bytes).decode() == "Hm.</think>A café."
    # The script gives every other token the probability 0.
    assert all(e.logprob == 0 for e in said)
    assert all([t.logprob for t in e.top_logprobs] == [0, -9999] for e in said)


def test_without_asking_for_usage_every_chunk_has_a_choice(
    server: Running, client: openai.OpenAI
) -> None:
    with server.says(f"</think>Yes.{END}"):
        chunks = list(ask(client, "Is it?", stream=True))
    assert all(len(c.choices) == 1 for c in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].rewarm["cached_tokens"] >= 0
    assert "timings" in chunks[-1].rewarm


def test_usage_is_what_was_counted_at_the_model_call(
    server: Running, client: openai.OpenAI
) -> None:
    server.settle()
    before = server.model.computed
    with server.says(f"</think>{'long ' * 3}"):
        reply = ask(client, "Something that was never asked before", max_tokens=12)
    server.settle()
    usage = reply.usage
    cached = usage.prompt_tokens_details.cached_tokens
    prefilled = reply.rewarm["prefilled_tokens"]
    assert cached + prefilled == usage.prompt_tokens
    assert usage.completion_tokens == 12
    assert reply.choices[0].finish_reason == "length"
    # The answer is cut by its limit, so there is no warm-ahead: the usage has all that was
    # computed. The engine runs its decode steps one ahead.
    computed = server.model.computed - before
    assert prefilled + 11 <= computed <= prefilled + 13


def test_a_conversation_computes_its_new_message_only(
    server: Running, client: openai.OpenAI
) -> None:
    said: list[str] = []
    costs = []
    for turn in range(4):
        said.append(f"Question {turn} about the boats in the harbour?")
        with server.says(f"Thinking about {turn}.</think>Answer {turn}.{END}"):
            reply = ask(client, *said)
        server.settle()
        costs.append(reply.rewarm["prefilled_tokens"])
        said.append(reply.choices[0].message.content)
    # The message, and what the template puts around it.
    assert max(costs[1:]) <= len(said[0]) + 40, costs
    assert reply.rewarm["resume"]["tier"] == "memory"


def test_a_tool_call_and_its_result(server: Running, client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "When is the tide high?"}
    with server.says(f"I ask.</think>{CALL}{END}"):
        reply = ask(client, question["content"], tools=TOOLS)
        chunks = list(ask(client, question["content"], tools=TOOLS, stream=True))
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "tide")
    assert json.loads(call.function.arguments) == {"at": "noon"}
    (streamed,) = [t for c in chunks for t in c.choices[0].delta.tool_calls or ()]
    assert (streamed.index, streamed.function.name) == (0, "tide")
    assert json.loads(streamed.function.arguments) == {"at": "noon"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    server.settle()
    result = {"role": "tool", "tool_call_id": call.id, "content": "at 14:10"}
    with server.says(f"</think>At ten past two.{END}"):
        final = client.chat.completions.create(
            model="any",
            messages=[SYSTEM, question, choice.message.model_dump(), result],
            tools=TOOLS,
            max_tokens=100,
        )
    assert final.choices[0].message.content == "At ten past two."
    # Warm-ahead computed the call as it comes back, with its thinking.
    assert final.rewarm["prefilled_tokens"] <= len("at 14:10") + 40


def test_two_calls_or_only_one(server: Running, client: openai.OpenAI) -> None:
    with server.says(f"</think>{CALL}{CALL}{END}"):
        both = ask(client, "Tides?", tools=TOOLS)
        one = ask(client, "Tides?", tools=TOOLS, parallel_tool_calls=False)
        chunks = list(ask(client, "Tides?", tools=TOOLS, stream=True))
    assert len(both.choices[0].message.tool_calls) == 2
    assert len(one.choices[0].message.tool_calls) == 1
    assert one.choices[0].finish_reason == "tool_calls"
    assert one.usage.completion_tokens < both.usage.completion_tokens
    indices = [t.index for c in chunks for t in c.choices[0].delta.tool_calls or ()]
    assert indices == [0, 1]


def test_a_required_call_is_opened_after_the_thinking(
    server: Running, client: openai.OpenAI
) -> None:
    named: Any = {"type": "function", "function": {"name": "tide"}}
    for choice in ("required", named):
        ask(client, "Tide?", tools=TOOLS, tool_choice=choice, max_tokens=3)
        request = server.engine.requests[-1]
        tokenizer = server.engine.core.tokenizer
        assert request.opening == tokenizer.tool_call_start_tokens
        assert request.opens_after == tokenizer.think_end_tokens
    reply = ask(
        client,
        "Tide?",
        tools=TOOLS,
        tool_choice="required",
        max_tokens=16,
        extra_body={"enable_thinking": False},
    )
    assert server.engine.requests[-1].opens_after == ()
    # Random words after the opening are not a call, and are returned as text.
    assert reply.choices[0].finish_reason == "length"


def test_a_stop_text_ends_the_answer_before_it(server: Running, client: openai.OpenAI) -> None:
    with server.says(f"</think>One. Two. Three.{END}"):
        reply = ask(client, "Count", stop=["Two", "never"])
        chunks = list(ask(client, "Count", stop="Two", stream=True))
    assert reply.choices[0].message.content == "One. "
    assert reply.choices[0].finish_reason == "stop"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "One. "
    assert reply.usage.completion_tokens == len("One. Two") + 1


def test_several_answers_to_one_prompt(server: Running, client: openai.OpenAI) -> None:
    options: Any = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 8}
    reply = ask(client, "Say anything", **options)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    again = ask(client, "Say anything", **options)
    assert [c.message for c in again.choices] == [c.message for c in reply.choices]
    assert reply.usage.completion_tokens <= 24
    chunks = list(ask(client, "Say anything", stream=True, **options))
    ended = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert sorted(ended) == [0, 1, 2]


def test_a_begun_answer_is_continued(server: Running, client: openai.OpenAI) -> None:
    begun: Any = {"role": "assistant", "content": "The answer is", "prefix": True}
    question: Any = {"role": "user", "content": "What?"}
    with server.says(f" no.{END}"):
        reply = client.chat.completions.create(
            model="any", messages=[question, begun], max_tokens=20
        )
    assert reply.choices[0].message.content == " no."


def test_completions_of_texts_and_tokens(server: Running, client: openai.OpenAI) -> None:
    tokens = server.engine.core.tokenizer.encode("Hi")
    with server.says("lo <think> world"):
        reply = client.completions.create(
            model="any", prompt=["Hel", "Jel"], max_tokens=10, logprobs=1, n=2
        )
        echoed = client.completions.create(
            model="any", prompt=tokens, max_tokens=2, echo=True, stream=True
        )
        text = "".join(chunk.choices[0].text for chunk in echoed)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert {c.text for c in reply.choices} == {"lo <think> world"}
    assert reply.choices[0].finish_reason == "length"
    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert logprobs.text_offset[:3] == [0, 1, 2]
    assert text == "Hilo"
    assert reply.usage.prompt_tokens == 6


def test_errors_are_the_clients_own_exceptions(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format is not supported") as found:
        ask(client, "x", response_format={"type": "json_object"})
    assert found.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match=r"99999999.*outside the vocabulary"):
        ask(client, "x", logit_bias={"99999999": 1})
    with pytest.raises(openai.BadRequestError, match=r"[0-9,]+ tokens.*context is 32,768") as found:
        ask(client, "x " * 17_000)
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"empty|at least"):
        client.completions.create(model="any", prompt="")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="x")


def test_salts_share_nothing(server: Running, client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        reply = ask(client, "The same words", max_tokens=2, extra_body={"cache_salt": salt})
        return int(reply.usage.prompt_tokens_details.cached_tokens)

    assert cached("alice") == 0
    assert cached("alice") > 100
    assert cached("bob") == 0


def test_a_client_that_goes_away_stops_its_work(server: Running, client: openai.OpenAI) -> None:
    before = server.engine.core.stats()
    stream = ask(client, "Go on and on", stream=True, max_tokens=5000)
    for i, _ in enumerate(stream):
        if i == 5:
            break
    stream.close()
    server.settle()
    with pytest.raises(openai.APITimeoutError):
        ask(client, "Go on and on, silently", max_tokens=5000, timeout=0.5)
    server.settle()
    for request in server.engine.requests[-2:]:
        assert 0 < request.sink.choices[0].tokens < 5000  # type: ignore[attr-defined]
        assert request.sink.choices[0].finish == "cancelled"  # type: ignore[attr-defined]
    assert before.restarts == server.engine.core.stats().restarts


def test_many_clients_at_once_get_their_own_answers(server: Running, client: openai.OpenAI) -> None:
    def answer(i: int) -> str:
        reply = ask(client, f"Question number {i}", max_tokens=10)
        message = reply.choices[0].message
        return f"{message.content}{getattr(message, 'reasoning', '')}"

    alone = [answer(i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(answer, range(6)))
    assert together == alone


def test_models_are_listed_and_any_name_is_served(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert listed.id == "tiny"
    found = client.models.retrieve("org/any-name")
    assert found.id == "org/any-name"
    assert found.context_length == 32768  # type: ignore[attr-defined]

"""Advice names a pattern that prevents reuse, with its cost and a remedy."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from rewarm.generate.why import advisor
from rewarm.generate.why.advisor import RecentChat, RecentChats
from rewarm.prompt.chat import Chat
from tests.server.servers import running
from tests.tiny import END

from . import bodies
from .explaining import ask, explain

pytestmark = pytest.mark.corpus

MONDAY, FRIDAY = "2024-05-13 09:12:44", "2024-05-17 18:03:01"


def with_system(body: dict[str, Any], text: str) -> dict[str, Any]:
    system, *rest = body["messages"]
    return {**body, "messages": [{**system, "content": text + system["content"]}, *rest]}


def next_turn(body: dict[str, Any], answer: str = "Very well.") -> dict[str, Any]:
    more = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    return {**body, "messages": [*body["messages"], *more]}


def only_advice(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Return the only advice, and check that the cost it names is true."""
    explained = explain(client, body)
    (advice,) = explained["advice"]
    assert advice["tokens"] <= explained["prompt_tokens"] - explained["miss"]["shared"]
    assert f"{advice['tokens']:,} tokens per request" in advice["text"]
    found: dict[str, Any] = advice
    return found


def saved(client: httpx.Client, sent: dict[str, Any], fixed: dict[str, Any]) -> int:
    """Count the tokens that need not be computed when the pattern is left out."""

    def new(body: dict[str, Any]) -> int:
        explained = explain(client, body)
        shared = explained["cached_tokens"] + explained["replayed_tokens"]
        return int(explained["prompt_tokens"]) - int(shared)

    return new(sent) - new(fixed)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"Now: {MONDAY}. ", f"Now: {FRIDAY}. "),
        ("Today is Monday, May 13, 2024. ", "Today is Friday, May 17, 2024. "),
        ("[1715591564] ", "[1715968981] "),
        ("It is 9:12 AM. ", "It is 6:03 PM. "),
        ("13.05.2024: ", "17.05.2024: "),
    ],
)
def test_a_timestamp_early_in_the_prompt(client: httpx.Client, first: str, second: str) -> None:
    body = bodies.request()
    ask(client, with_system(body, first))
    sent = with_system(next_turn(body), second)
    advice = only_advice(client, sent)
    assert (advice["pattern"], advice["message"], advice["role"]) == ("timestamp", 0, "system")
    assert advice["stored"] in first
    assert advice["sent"] in second
    assert advice["tokens"] == saved(client, sent, with_system(next_turn(body), first))
    assert "end of the prompt" in advice["text"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("3f2b8a52-1c1d-4e9f-8d3a-0a1b2c3d4e5f", "a91c77e0-55d2-4b0c-9a77-cc01de23f456"),
        ("req_8f3kq0zm1x", "req_p02hd81kqa"),
        ("session 88120931", "session 10293847"),
    ],
)
def test_a_random_id_early_in_the_prompt(client: httpx.Client, first: str, second: str) -> None:
    body = bodies.request()
    ask(client, with_system(body, f"<{first}> "))
    sent = with_system(body, f"<{second}> ")
    advice = only_advice(client, sent)
    assert (advice["pattern"], advice["message"]) == ("random_id", 0)
    assert (advice["stored"], advice["sent"]) == (first.split()[-1], second.split()[-1])
    assert advice["tokens"] == saved(client, sent, with_system(body, f"<{first}> "))


def test_tools_in_another_order(client: httpx.Client) -> None:
    tools = bodies.tools()
    ask(client, bodies.request(tools=tools))
    sent = bodies.request(tools=tools[::-1])
    advice = only_advice(client, sent)
    assert (advice["pattern"], advice["field"]) == ("tools_order", "tools")
    assert advice["sent"] == tools[-1]["function"]["name"]
    assert advice["tokens"] == saved(client, sent, bodies.request(tools=tools))
    assert "sort them" in advice["text"]


def test_json_keys_in_another_order_in_the_tools(client: httpx.Client) -> None:
    tools = bodies.tools()
    ask(client, bodies.request(tools=tools))
    turned = json.loads(json.dumps(tools, sort_keys=True))
    assert json.dumps(turned) != json.dumps(tools)
    advice = only_advice(client, bodies.request(tools=turned))
    assert (advice["pattern"], advice["field"]) == ("json_keys", "tools")


def test_json_keys_in_another_order_in_a_call(client: httpx.Client) -> None:
    body = bodies.request()
    call = body["messages"][6]["tool_calls"][0]["function"]
    call["arguments"] = '{"user_id": "mia_li_3668", "full": true}'
    ask(client, body)
    sent = json.loads(json.dumps(next_turn(body)))
    call = sent["messages"][6]["tool_calls"][0]["function"]
    call["arguments"] = '{"full": true, "user_id": "mia_li_3668"}'
    advice = only_advice(client, sent)
    assert (advice["pattern"], advice["message"]) == ("json_keys", 6)
    assert advice["field"] == "tool_calls"


def test_json_keys_in_another_order_in_a_result(client: httpx.Client) -> None:
    body = bodies.request()
    result = {"name": "Mia", "email": "mia@example.com", "gold": False, "bags": [1, 2]}
    body["messages"][7]["content"] = json.dumps(result)
    ask(client, body)
    sent = json.loads(json.dumps(next_turn(body)))
    sent["messages"][7]["content"] = json.dumps(result, sort_keys=True)
    advice = only_advice(client, sent)
    assert (advice["pattern"], advice["message"], advice["role"]) == ("json_keys", 7, "tool")


def test_a_history_that_was_trimmed_at_the_front(client: httpx.Client) -> None:
    body = bodies.request()
    ask(client, body)
    whole = next_turn(body)["messages"]
    sent = {**body, "messages": [whole[0], *whole[3:]]}
    advice = only_advice(client, sent)
    assert (advice["pattern"], advice["message"]) == ("trimmed_history", 1)
    # The kept part of the history was known, and the dropped part need not be computed either.
    kept = sum(len(m["content"]) for m in whole[3:8])
    assert kept <= advice["tokens"] < 2 * kept
    assert "beginning of the history" in advice["text"]


def test_thinking_that_is_not_sent_back_in_a_tool_loop() -> None:
    """Warm-ahead computed the next step of the loop with the thinking."""
    thought = "The user wants a flight, so I look up who that is before anything else is done."
    call = '<tool_call>{"name": "get_user_details", "arguments": {"user_id": "mia"}}</tool_call>'
    body = bodies.request(messages=6, max_tokens=500, tools=bodies.tools())
    with running() as server, server.client() as client:
        with server.says(f"{thought}</think>{call}{END}"):
            answer = ask(client, body)["choices"][0]["message"]
        server.settle()
        assert answer["reasoning_content"] == thought
        calls = answer["tool_calls"]
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "Mia Li, gold."}
        bare = {"role": "assistant", "content": answer["content"], "tool_calls": calls}
        sent = {**body, "messages": [*body["messages"], bare, result]}
        advice = only_advice(client, sent)
        assert (advice["pattern"], advice["message"]) == ("thinking", 6)
        assert (advice["field"], advice["sent"]) == ("reasoning_content", "")
        assert thought.startswith(advice["stored"])
        back = {**bare, "reasoning_content": thought}
        fixed = {**body, "messages": [*body["messages"], back, result]}
        assert advice["tokens"] == saved(client, sent, fixed) >= len(call)
        assert explain(client, fixed)["advice"] == []


@pytest.mark.parametrize("first", ["with", "without"])
def test_thinking_that_one_request_has_and_another_has_not(
    client: httpx.Client, first: str
) -> None:
    bare = bodies.request(messages=8)  # within a tool loop, where it counts
    call = len(bare["messages"]) - 2
    thinks = json.loads(json.dumps(bare))
    thinks["messages"][call]["reasoning_content"] = "First I look up who that is."
    before, sent = (thinks, bare) if first == "with" else (bare, thinks)
    ask(client, before)
    advice = only_advice(client, sent)
    assert (advice["pattern"], advice["message"]) == ("thinking", call)
    assert advice["field"] == "reasoning_content"
    assert advice["tokens"] == saved(client, sent, before)


def test_a_system_prompt_that_differs_per_request(client: httpx.Client) -> None:
    body = bodies.request(messages=2)
    ask(client, with_system(body, "You speak with Mia Li, a gold member. "))
    sent = with_system(bodies.request(1, messages=2), "You speak with Raj Rossi, who is new. ")
    advice = only_advice(client, sent)
    assert (advice["pattern"], advice["message"], advice["role"]) == ("system_prompt", 0, "system")
    assert "Raj Rossi" in advice["sent"]
    assert "Mia Li" in advice["stored"]
    assert advice["tokens"] >= bodies.SYSTEM - 100


def test_one_pattern_behind_another_is_found_too(client: httpx.Client) -> None:
    tools = bodies.tools()
    body = bodies.request(tools=tools)
    ask(client, with_system(body, f"Now: {MONDAY}. "))
    sent = with_system({**body, "tools": tools[::-1]}, f"Now: {FRIDAY}. ")
    explained = explain(client, sent)
    assert [a["pattern"] for a in explained["advice"]] == ["tools_order", "timestamp"]
    together = sum(a["tokens"] for a in explained["advice"])
    assert together <= explained["prompt_tokens"] - explained["miss"]["shared"]


def test_no_advice_where_nothing_is_wrong(client: httpx.Client) -> None:
    body = bodies.request()
    ask(client, body)
    assert explain(client, body)["advice"] == []
    assert explain(client, next_turn(body))["advice"] == []
    # Another conversation of the same application, and another application.
    assert explain(client, bodies.request(1))["advice"] == []
    other = {"messages": [{"role": "user", "content": "Write a poem about the sea. " * 20}]}
    assert explain(client, other)["advice"] == []


@pytest.mark.parametrize(("mine", "yours"), [(None, "yours"), ("mine", "yours"), ("mine", None)])
def test_another_tenants_words_are_never_shown(
    client: httpx.Client, mine: str | None, yours: str | None
) -> None:
    body = bodies.request()
    secret = with_system(body, f"Now: {MONDAY}. The word is ZIRKONIUM. ")
    ask(client, secret | ({"cache_salt": mine} if mine else {}))
    prying = with_system(body, f"Now: {FRIDAY}. The word is ")
    asked = prying | ({"cache_salt": yours} if yours else {})
    explained = client.post("/v1/cache/explain", json=asked)
    reply = client.post("/v1/chat/completions", json=asked)
    for answer in (explained, reply):
        for word in ("ZIRKON", MONDAY, "2024-05-13"):
            assert word not in answer.text
    assert explained.json()["advice"] == []
    assert explained.json()["compared_with"] is None
    # The tenant is shown its own words.
    own = with_system(body, f"Now: {FRIDAY}. The word is ")
    shown = client.post(
        "/v1/cache/explain", json=own | ({"cache_salt": mine} if mine else {})
    ).json()
    assert shown["advice"][0]["stored"] == MONDAY


def test_what_is_remembered_of_chats_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisor, "MOST", 5)
    monkeypatch.setattr(advisor, "MOST_TOKENS", 1000)
    recent, chats = RecentChats(), list[RecentChat]()

    def remembered(*sizes: int) -> int:
        """Count the chats of tenants of their own that are still known."""
        for size in sizes:
            asked = Chat([{"role": "user", "content": "Hello?"}])
            salt, tokens = str(len(chats)), np.zeros(size, np.int32)
            chats.append(RecentChat(f"request {salt}", salt, asked, tokens, size))
            recent.add(chats[-1])
        known = [recent.nearest(chat.salt, chat.chat, chat.tokens) for chat in chats]
        return len(known) - known.count(None)

    assert remembered(*[10] * 20) == 5
    assert remembered(970) == 4
    assert remembered(5000) == 0

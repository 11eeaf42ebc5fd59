"""The reason of each miss is told in the reply, and by explain without running the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from rewarm.prompt.text import common_tokens
from tests import zoo
from tests.cache.inside import evict, evict_all
from tests.server.servers import Running, running
from tests.tiny import END, tiny_model

from . import bodies
from .explaining import ask, both, explain

pytestmark = pytest.mark.corpus


def edited(body: dict[str, Any], message: int, content: str) -> dict[str, Any]:
    messages = [dict(m) for m in body["messages"]]
    messages[message]["content"] = content
    return {**body, "messages": messages}


def test_cold(client: httpx.Client) -> None:
    miss = both(client, bodies.request())
    assert (miss["reason"], miss["shared"], miss["resume"]) == ("cold", 0, 0)


def test_nothing_was_missed_where_all_that_is_known_was_reused(client: httpx.Client) -> None:
    body = bodies.request()
    ask(client, body)
    assert explain(client, body)["miss"] is None
    again = ask(client, body)
    assert again["rewarm"]["miss"] is None
    assert again["rewarm"]["prefilled_tokens"] == 1


@pytest.mark.parametrize(
    ("message", "content", "field"),
    [
        (1, "Hi! I am looking to cancel a flight.", "content"),
        (4, "Thank you, Mia. Let us begin.", "content"),
        (7, '{"name": "somebody else"}', "content"),
    ],
)
def test_diverged_names_the_message_and_the_true_first_difference(
    server: Running, client: httpx.Client, message: int, content: str, field: str
) -> None:
    body = bodies.request()
    for earlier in (bodies.request(1), bodies.request(2), body):
        ask(client, earlier)
    # Long enough for the difference to cost more than what is replayed.
    changed = edited(body, message, content)
    changed["messages"].append({"role": "user", "content": "And what else? " * 150})
    sent = [r.tokens for r in server.engine.requests]
    miss = both(client, changed)
    mine = server.engine.requests[-1].tokens
    truth = max(common_tokens(mine, tokens) for tokens in sent)
    assert (miss["reason"], miss["position"]) == ("diverged", truth)
    assert (miss["message"], miss["field"]) == (message, field)
    assert miss["role"] == body["messages"][message]["role"]
    old = body["messages"][message]["content"]
    at = len(_common(old, content))
    assert miss["before"].endswith(content[:at][-20:])
    assert miss["sent"].startswith(content[at : at + 10])
    assert miss["stored"].startswith(old[at : at + 10])


def test_diverged_in_the_tools(client: httpx.Client) -> None:
    tools = bodies.tools()
    ask(client, bodies.request(tools=tools))
    tools[1]["function"]["description"] = "Something else altogether."
    miss = both(client, bodies.request(tools=tools))
    assert (miss["reason"], miss["field"], miss["message"]) == ("diverged", "tools", None)
    assert miss["sent"].startswith("Something else")


def test_diverged_in_a_tool_call(client: httpx.Client) -> None:
    body = bodies.request()
    ask(client, body)
    call = body["messages"][6]["tool_calls"][0]["function"]
    call["arguments"] = call["arguments"].replace(bodies.user_id(body), "olivia_g_2305")
    body["messages"].append({"role": "user", "content": "Go on. " * 300})
    miss = both(client, body)
    assert (miss["message"], miss["role"], miss["field"]) == (6, "assistant", "tool_calls")
    assert miss["sent"].startswith("olivia")


def test_diverged_in_the_thinking(server: Running, client: httpx.Client) -> None:
    """The next prompt leaves the stored one at the answer's thinking, which it does not contain."""
    body = bodies.request(messages=2, max_tokens=400)
    with server.says(f"A long thought about flights.</think>Of course.{END}"):
        reply = ask(client, body)
    answer = reply["choices"][0]["message"]
    assert answer["content"] == "Of course."
    plain = {"role": "assistant", "content": "Of course."}
    asked = {"role": "user", "content": "From New York. " * 60}
    miss = both(client, {**body, "messages": [*body["messages"], plain, asked]})
    assert (miss["reason"], miss["message"], miss["field"]) == ("diverged", 2, "reasoning_content")


def test_diverged_plain_text(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "The tide is high at noon.", "max_tokens": 1})
    body = {"prompt": "The tide is low" + " again" * 20, "max_tokens": 1}
    miss = client.post("/v1/cache/explain", json=body).json()["miss"]
    assert (miss["reason"], miss["position"], miss["message"]) == ("diverged", 12, None)
    assert (miss["before"], miss["stored"][:4], miss["sent"][:3]) == ("The tide is ", "high", "low")
    assert client.post("/v1/completions", json=body).json()["rewarm"]["miss"] == miss


def test_no_checkpoint_was_taken(client: httpx.Client) -> None:
    body = bodies.request()
    ask(client, body)
    # The new prompt leaves the stored one in the middle of a message, where no checkpoint was due.
    half = body["messages"][7]["content"][:120]
    miss = both(client, edited(body, 7, half))
    assert (miss["reason"], miss["why"]) == ("no_checkpoint", "never_taken")
    assert miss["tokens"] == miss["shared"] - miss["resume"] > 0


def test_no_checkpoint_because_it_was_evicted(server: Running, client: httpx.Client) -> None:
    body = bodies.request(messages=4)
    ask(client, body)
    ask(client, edited(body, 3, "Another question."))
    third = edited(body, 3, "And a third.")
    resume = explain(client, third)["resume"]["position"]
    for at in (resume, *_checkpoints(server, below=resume)):
        evict(server.engine.core.cache, "checkpoint", at)
    miss = both(client, third)
    assert (miss["reason"], miss["why"], miss["resume"]) == ("no_checkpoint", "evicted", 0)


def test_no_checkpoint_inside_an_answer(server: Running, client: httpx.Client) -> None:
    answer = "The first of many words about a flight to Seattle. " * 6
    with server.says(answer):
        body = {"prompt": "Tell me more." * 4, "max_tokens": len(answer)}
        client.post("/v1/completions", json=body).raise_for_status()
    half = {"prompt": body["prompt"] + answer[:240] + "What?", "max_tokens": 1}
    miss = explain(client, half)["miss"]
    assert (miss["reason"], miss["why"]) == ("no_checkpoint", "other_origin")
    assert miss["tokens"] == miss["shared"] - miss["resume"] > 200
    assert client.post("/v1/completions", json=half).json()["rewarm"]["miss"] == miss


def test_evicted(server: Running, client: httpx.Client) -> None:
    body = bodies.request()
    size = ask(client, body)["usage"]["prompt_tokens"]
    evict_all(server.engine.core.cache)
    miss = both(client, body)
    assert miss["reason"] == "evicted"
    assert miss["held"] == miss["tokens"] == size - 1


def test_salt(client: httpx.Client) -> None:
    body = bodies.request()
    size = ask(client, body)["usage"]["prompt_tokens"]
    # A request with a salt is told nothing of prompts without one, and the other way round.
    mine = {**body, "cache_salt": "mine"}
    assert both(client, mine)["reason"] == "cold"
    assert both(client, mine) is None
    client.delete("/v1/cache")
    ask(client, mine)
    for salt in ({}, {"cache_salt": "yours"}):
        assert explain(client, {**body, **salt})["miss"]["reason"] == "cold"
    named = {**body, "cache_salt": "yours", "compare_salts": ["mine"]}
    miss = explain(client, named)["miss"]
    assert (miss["reason"], miss["held"]) == ("salt", size - 1)


def test_other_model(tmp_path: Path) -> None:
    body = bodies.request(messages=4)
    for seed, salt in ((1, None), (1, "mine")):
        options = {"model": tiny_model(seed), "cache_options": {"disk": str(tmp_path)}}
        with running(engine_options=options) as server, server.client() as client:
            ask(client, {**body, **({"cache_salt": salt} if salt else {})})
        server.engine.core.cache.close()
    options = {"model": tiny_model(2), "cache_options": {"disk": str(tmp_path)}}
    with running(engine_options=options) as server, server.client() as client:
        miss = explain(client, body)["miss"]
        assert miss["reason"] == "other_model"
        assert miss["held"] >= 64  # at least: the first span is compared
        assert ask(client, body)["rewarm"]["miss"] == miss
        # Another tenant's prompts are not mentioned, whatever model they were for.
        theirs = {**bodies.request(3), "cache_salt": "nobody"}
        assert explain(client, theirs)["miss"]["reason"] == "cold"
    server.engine.core.cache.close()


def test_exact_mode() -> None:
    body = bodies.request(messages=4)
    options = {"reuse": "exact"}
    with running(engine_options=options, warm_ahead=False) as server, server.client() as client:
        ask(client, body)
        miss = both(client, edited(body, 3, body["messages"][3]["content"][:20]))
        assert (miss["reason"], miss["tokens"]) == ("exact_mode", miss["shared"] - miss["resume"])


def test_exact_mode_names_the_true_first_difference_too() -> None:
    body = bodies.request()
    options = {"reuse": "exact"}
    with running(engine_options=options, warm_ahead=False) as server, server.client() as client:
        ask(client, body)
        first = server.engine.requests[-1].tokens
        # The prompt has another boundary before the difference, so the grid differs from there on.
        messages = [*body["messages"][:4], {"role": "user", "content": "x" * 400}]
        miss = both(client, {**body, "messages": messages})
        second = server.engine.requests[-1].tokens
        assert miss["reason"] == "diverged"
        assert miss["position"] == common_tokens(first, second)


class Sealed:
    """A cache class that delegates to a real cache, and cannot be made from what it shows."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_disabled() -> None:
    model = zoo.tiny("llama")
    caches = {"make_cache": lambda: [Sealed(KVCache()) for _ in model.layers]}
    options = {"model": model, "cache_options": caches}
    with running(engine_options=options) as server, server.client() as client:
        body = bodies.request(messages=2)
        for _ in range(2):
            miss = both(client, body)
            assert (miss["reason"], miss["resume"]) == ("disabled", 0)


def test_anthropics_body_is_explained_like_its_reply(client: httpx.Client) -> None:
    chat = bodies.conversation()
    body = {
        "model": "any",
        "max_tokens": 2,
        "system": chat[0]["content"],
        "messages": [{"role": "user", "content": chat[1]["content"]}],
    }
    client.post("/v1/messages", json=body).raise_for_status()
    body["messages"] = [{"role": "user", "content": "Something else. " * 40}]
    explained = explain(client, body)
    reply = client.post("/v1/messages", json=body).json()
    assert reply["rewarm"]["miss"] == explained["miss"]
    assert (explained["miss"]["message"], explained["miss"]["role"]) == (1, "user")
    usage = reply["usage"]
    assert explained["cached_tokens"] == usage["cache_read_input_tokens"]


def test_a_stream_says_it_in_its_last_chunk(client: httpx.Client) -> None:
    ask(client, bodies.request())
    body = {**bodies.request(1), "stream": True}
    explained = explain(client, body)
    text = client.post("/v1/chat/completions", json=body).text
    assert f'"miss":{{"reason":"{explained["miss"]["reason"]}"' in text


def test_explaining_changes_and_runs_nothing(server: Running, client: httpx.Client) -> None:
    ask(client, bodies.request())
    before, computed = server.engine.core.cache.stats(), server.model.computed
    for body in (bodies.request(), bodies.request(1), bodies.request(2, tools=[])):
        explain(client, body)
    assert server.engine.core.cache.stats() == before
    assert server.model.computed == computed


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "messages"),
        ([], "object"),
        ({"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "x"}}, "re"),
        ({"prompt": ["a", "b"]}, "one at a time"),
        ({"messages": [{"role": "user", "content": "hi"}], "compare_salts": "a"}, "compare_salts"),
    ],
)
def test_a_body_that_is_wrong_is_a_400_that_says_so(
    client: httpx.Client, body: Any, says: str
) -> None:
    answer = client.post("/v1/cache/explain", json=body)
    assert answer.status_code == 400
    assert says in answer.text


def test_the_live_view_shows_the_reason_to_its_own_tenant(client: httpx.Client) -> None:
    ask(client, {**bodies.request(), "cache_salt": "a"})
    told = ask(client, {**bodies.request(1), "cache_salt": "a"})["rewarm"]["miss"]
    assert told["reason"] == "diverged"
    own = client.get("/v1/live", headers={"X-Cache-Salt": "a"}).json()["recent"][0]
    assert own["miss"] == told
    assert client.get("/v1/live").json()["recent"][0]["miss"] == {"reason": "diverged"}


def _common(a: str, b: str) -> str:
    n = int(np.argmin([x == y for x, y in zip(a, b, strict=False)] + [False]))
    return a[:n]


def _checkpoints(server: Running, below: int) -> list[int]:
    nodes = server.engine.core.cache.nodes()
    return sorted({n.end for n in nodes if n.checkpoint and n.end < below}, reverse=True)


@pytest.mark.parametrize("body", [{"messages": 3}, {"tools": 3, "messages": [1]}, {"prompt": {}}])
def test_what_is_no_request_is_not_explained(client: httpx.Client, body: dict[str, Any]) -> None:
    answer = client.post("/v1/cache/explain", json=body)
    assert answer.status_code == 400, answer.text

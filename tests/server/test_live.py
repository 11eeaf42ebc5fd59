"""`GET /v1/live` shows what runs and what ran, with each tenant's own words only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rewarm.cli.remote import Remote
from rewarm.server.admin.activity import RECENT, percentile
from tests.cache.inside import evict, evict_all
from tests.server.servers import Running, running

SYSTEM = "You keep the harbour. " * 8


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(api_key="key") as started:
        yield started


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    server.engine.core.cache.clear()
    with server.client() as client:
        yield client


def ask(client: httpx.Client, question: str, **more: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "max_tokens": 4,
        **more,
    }
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def live(client: httpx.Client, salt: str | None = None) -> dict[str, Any]:
    headers = {"X-Cache-Salt": salt} if salt else {}
    seen: dict[str, Any] = client.get("/v1/live", headers=headers).raise_for_status().json()
    return seen


def test_it_needs_the_key_like_the_rest(server: Running) -> None:
    assert httpx.get(f"{server.url}/v1/live").status_code == 401


def test_a_finished_request_is_listed_with_what_its_reply_said(client: httpx.Client) -> None:
    ask(client, "Which boats are in?")
    reply = ask(client, "Which boats are in?")
    last = live(client)["recent"][0]
    usage, told = reply["usage"], reply["rewarm"]
    assert last["prompt_tokens"] == usage["prompt_tokens"]
    assert last["completion_tokens"] == usage["completion_tokens"]
    for name in ("cached_tokens", "replayed_tokens", "prefilled_tokens", "miss"):
        assert last[name] == told[name]
    assert last["ttft_ms"] == told["timings"]["ttft_ms"]
    assert (last["status"], last["endpoint"], last["own"]) == (200, "chat", True)
    assert last["total_ms"] >= last["ttft_ms"]


def test_a_request_in_flight_shows_how_far_it_is(server: Running, client: httpx.Client) -> None:
    ask(client, "first")
    stages: list[dict[str, Any]] = []
    over = threading.Event()

    def watch() -> None:
        with server.client() as other:
            while not over.is_set():
                stages.extend(live(other)["requests"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with server.says("so " * 200):
            reply = ask(client, "long " * 800, max_tokens=300)
    finally:
        over.set()
        watcher.join()
    seen = {s["stage"] for s in stages}
    assert {"prefilling", "decoding"} <= seen
    told = reply["rewarm"]
    moving = [s["prefilled_tokens"] for s in stages if s["stage"] == "prefilling"]
    assert moving == sorted(moving)
    assert max(moving) <= told["prefilled_tokens"]
    assert len(set(moving)) > 2
    decoding = [s for s in stages if s["stage"] == "decoding"]
    assert {s["cached_tokens"] for s in decoding} == {told["cached_tokens"]}
    assert {s["prompt_tokens"] for s in decoding} == {reply["usage"]["prompt_tokens"]}
    assert decoding[-1]["generated_tokens"] > decoding[0]["generated_tokens"]
    assert live(client)["requests"] == []


def test_the_figures_agree_with_the_cache(server: Running, client: httpx.Client) -> None:
    ask(client, "one")
    ask(client, "two")
    server.settle()
    seen, stats = live(client), server.engine.core.cache.stats()
    assert seen["tiers"]["memory"]["kinds"] == stats.bytes["memory"]
    assert seen["tiers"]["memory"]["budget"] == stats.budget
    assert seen["cache"]["entries"] == stats.entries
    nodes = server.engine.core.cache.nodes()
    assert seen["cache"]["tokens"] == sum(n.length for n in nodes)
    assert seen["state"] == "ready"
    assert 0 < seen["hit_rate"]["total"] < 1
    assert seen["ttft_ms"]["p50"] <= seen["ttft_ms"]["p99"]
    assert sum(slot["requests"] for slot in seen["history"]["slots"]) == seen["totals"]["requests"]


def test_the_hottest_prefix_has_its_words_and_bytes(client: httpx.Client) -> None:
    for question in ("a", "b", "c", "d"):
        ask(client, f"{question} question of its own", cache_salt="hot")
    hottest = [p for p in live(client, "hot")["hottest"] if p["own"]]
    assert "You keep the harbour" in hottest[0]["label"]
    assert hottest[0]["hits"] >= 2
    assert 0 < hottest[0]["bytes"] <= live(client)["tiers"]["memory"]["held"]


def test_another_tenants_words_are_not_shown(client: httpx.Client) -> None:
    for _ in range(2):
        ask(client, "my secret wish", cache_salt="mine")
    ask(client, "my secret rest", cache_salt="mine")
    for salt in (None, "other"):
        answer = client.get("/v1/live", headers={"X-Cache-Salt": salt} if salt else {})
        assert "secret" not in answer.text
        first = answer.json()["recent"][0]
        assert not first["own"]
        assert first["id"] is None
        assert first["miss"] is None or list(first["miss"]) == ["reason"]
    assert live(client, "mine")["recent"][0]["own"]
    assert "secret" in client.get("/v1/live", headers={"X-Cache-Salt": "mine"}).text


def test_a_salt_in_any_script_can_be_named(server: Running, client: httpx.Client) -> None:
    ask(client, "which tide?", cache_salt="港 50%")
    assert not live(client)["recent"][0]["own"]
    seen = Remote(server.url, "key", "港 50%").ask("/v1/live")
    assert seen["recent"][0]["own"]


def test_a_cleared_cache_has_no_hot_prefix(client: httpx.Client) -> None:
    for _ in range(2):
        ask(client, "again")
    assert live(client)["hottest"]
    client.delete("/v1/cache")
    assert live(client)["hottest"] == []


def test_an_evicted_prefix_is_not_hot(server: Running, client: httpx.Client) -> None:
    for question in ("one of many words", "one of many words", "another"):
        ask(client, question)
    server.settle()

    def hot() -> set[int]:
        return {p["tokens"] for p in live(client)["hottest"]}

    before = hot()
    assert len(before) > 1
    evict(server.engine.core.cache, "checkpoint", max(before))
    assert hot() == before - {max(before)}
    evict_all(server.engine.core.cache)
    assert hot() == set()


@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_a_prefix_that_the_disk_still_has_is_hot(tmp_path: Path, reuse: str) -> None:
    options = {"reuse": reuse, "cache_options": {"disk": str(tmp_path)}}
    with running(engine_options=options) as server, server.client() as client:
        for question in ("one", "two", "three"):
            ask(client, question)
        server.settle()
        server.engine.core.cache.flush()
        hot = live(client)["hottest"][0]
        assert (hot["tier"], hot["hits"] > 0) == ("memory", True)
        evict_all(server.engine.core.cache)
        cold = live(client)["hottest"][0]
        assert (cold["tier"], cold["tokens"]) == ("disk", hot["tokens"])
    server.engine.core.cache.close()


def test_what_is_remembered_is_bounded(client: httpx.Client) -> None:
    for i in range(RECENT + 3):
        client.post("/v1/completions", json={"prompt": f"{i}", "max_tokens": 1})
    seen = live(client)
    assert len(seen["recent"]) == RECENT
    numbers = [r["number"] for r in seen["recent"]]
    assert numbers == sorted(numbers, reverse=True)


def test_it_answers_while_the_model_is_loading() -> None:
    from starlette.testclient import TestClient

    from rewarm.engine.engine import Engine
    from rewarm.server.app import create_app

    hold = threading.Event()

    def load() -> Any:
        hold.wait()
        raise RuntimeError("not today")

    engine = Engine(load)
    engine.start()
    try:
        with TestClient(create_app(engine), base_url="http://localhost") as client:
            seen = client.get("/v1/live").json()
        assert (seen["state"], seen["engine"], seen["cache"]) == ("loading", None, None)
    finally:
        hold.set()
        engine.wait(10)


def test_a_request_that_is_refused_as_a_whole_does_not_stay_in_flight(
    client: httpx.Client,
) -> None:
    many = {"prompt": ["x"] * 64, "n": 16, "max_tokens": 1}
    refused = client.post("/v1/completions", json=many)
    assert refused.status_code == 400
    assert "the queue takes" in refused.json()["error"]["message"]
    assert live(client)["requests"] == []


def test_percentiles_are_of_times_that_were_measured() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile(list(range(1, 101)), 50) == 50
    assert percentile(list(range(1, 101)), 99) == 99

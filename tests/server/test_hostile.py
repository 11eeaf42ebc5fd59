"""Many clients, cancels at any moment and odd requests break nothing and leave nothing behind.

By default the run is short and seeded. With REWARM_SOAK=1 it has 64 clients for two minutes and 500
cancels.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import mlx.core as mx
import pytest

from tests.engine.inside import is_idle
from tests.server.servers import Running, running
from tests.sets import SOAK

CLIENTS, SECONDS = (64, 120.0) if SOAK else (16, 3.0)
CANCELS = 500 if SOAK else 60
SYSTEMS = ["You keep the harbour. " * 12, "You mend the nets. " * 9, ""]


def chat(chance: random.Random) -> dict[str, Any]:
    """Draw a chat with a shared beginning, its own question, and options of all kinds."""
    system = chance.choice(SYSTEMS)
    first = [{"role": "system", "content": system}] if system else []
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": f"turn {i} of {chance.randrange(4)}"}
        for i in range(chance.choice([1, 1, 3, 5]))
    ]
    body: dict[str, Any] = {"messages": first + turns, "max_tokens": chance.randrange(1, 24)}
    body["stream"] = chance.random() < 0.5
    if chance.random() < 0.3:
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": chance.randrange(9)}
    if chance.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3}
    if chance.random() < 0.2:
        body["n"] = 2
    if chance.random() < 0.2:
        body["cache_salt"] = chance.choice("ab")
    return body


ODD: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "x" * 50_000}], "max_tokens": 1},
    {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"999999": 1}},
    {"messages": [{"role": "user", "content": "x"}], "temperature": -3},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
    {"messages": [{"role": "user", "content": "x"}], "n": 10_000},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"prompt": []},
    {"prompt": [-1]},
    {"prompt": [2**40]},
    {"prompt": ""},
    {"prompt": [65], "max_tokens": 1},
]


def send(client: httpx.Client, chance: random.Random, statuses: Counter[int]) -> None:
    kind = chance.random()
    if kind < 0.12:
        body = chance.choice(ODD)
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        try:
            statuses[client.post(path, json=body).status_code] += 1
        except UnicodeEncodeError:  # a lone surrogate that the client will not send
            raw = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
            headers = {"Content-Type": "application/json"}
            statuses[client.post(path, content=raw, headers=headers).status_code] += 1
        return
    limit = chance.uniform(0.001, 0.4) if kind < 0.3 else 60.0
    try:
        with client.stream(
            "POST", "/v1/chat/completions", json=chat(chance), timeout=limit
        ) as reply:
            statuses[reply.status_code] += 1
            for _ in reply.iter_bytes():
                if kind < 0.3 and chance.random() < 0.2:
                    return
    except httpx.TimeoutException:
        statuses[499] += 1


QUESTION = {
    "messages": [
        {"role": "system", "content": SYSTEMS[0]},
        {"role": "user", "content": "Which boats are in today?"},
    ],
    "max_tokens": 24,
}


def answer(http: httpx.Client) -> dict[str, Any]:
    reply = http.post("/v1/chat/completions", json=QUESTION)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def check_quiet(server: Running, http: httpx.Client, expected: dict[str, Any]) -> None:
    """Check that the server is healthy, answers right, and has no lease or request left."""
    server.settle()
    assert http.get("/health").status_code == 200
    assert answer(http) == expected
    server.settle()
    cache = server.engine.core.cache
    cache.verify()
    assert cache.stats().leases == 0
    assert is_idle(server.engine)
    assert server.engine.core.stats().restarts == 0


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    with running() as fresh, fresh.client() as http:
        return answer(http)


def test_many_clients_at_once(expected: dict[str, Any]) -> None:
    statuses: Counter[int] = Counter()
    with running() as server, server.client() as http:
        answer(http)
        server.settle()
        http.delete("/v1/cache")
        before = _active()
        threads = threading.active_count()
        until = time.monotonic() + SECONDS

        def client(number: int) -> None:
            chance = random.Random(number)
            with server.client() as own:
                while time.monotonic() < until:
                    send(own, chance, statuses)

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(CLIENTS)))
        check_quiet(server, http, expected)
        assert set(statuses) <= {200, 400, 429, 499}, statuses
        assert statuses[200] > CLIENTS
        http.delete("/v1/cache")
        assert _active() <= before + (1 << 20), "memory did not come back"
        assert threading.active_count() <= threads + 8


def test_cancels_at_random_moments(expected: dict[str, Any]) -> None:
    with running() as server, server.client() as http:

        def leave(number: int) -> None:
            chance = random.Random(number)
            body = {**chat(chance), "max_tokens": 400}
            limit = httpx.Timeout(60, read=chance.uniform(0.001, 0.5))
            with server.client() as own:
                try:
                    with own.stream(
                        "POST", "/v1/chat/completions", json=body, timeout=limit
                    ) as reply:
                        for _ in reply.iter_bytes():
                            if chance.random() < 0.1:
                                return
                except httpx.TimeoutException:
                    pass

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(leave, range(CANCELS)))
        check_quiet(server, http, expected)


def _active() -> int:
    gc.collect()
    time.sleep(0.3)
    return mx.get_active_memory()

"""Send requests to a server, and ask it to explain them."""

from __future__ import annotations

from typing import Any

import httpx

Reply = dict[str, Any]


def ask(client: httpx.Client, body: dict[str, Any]) -> Reply:
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    reply: Reply = answer.json()
    return reply


def explain(client: httpx.Client, body: dict[str, Any]) -> Reply:
    answer = client.post("/v1/cache/explain", json=body)
    assert answer.status_code == 200, answer.text
    explained: Reply = answer.json()
    return explained


def both(client: httpx.Client, body: dict[str, Any]) -> Any:
    """Return explain's reason of a request, and check that the reply gives the same one."""
    explained = explain(client, body)
    told = ask(client, body)["rewarm"]
    assert told["miss"] == explained["miss"]
    for name in ("cached_tokens", "replayed_tokens", "prefilled_tokens"):
        assert told[name] == explained[name]
    return explained["miss"]

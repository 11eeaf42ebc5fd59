"""`GET /v1/cache` shows the tree, whole and bounded, with each tenant's own words only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from rewarm.accel import heap
from rewarm.cache.tree import WIDTH, Node, Tree, encode
from rewarm.cache.views.survey import Surveyor
from rewarm.generate.why.labels import Labels
from rewarm.prompt.render.renderer import ChatRenderer
from rewarm.server.admin import tree_view
from tests.cache.test_tree import Span
from tests.server.servers import Running, running
from tests.tiny import tool_tokenizer

SYSTEM = {"role": "system", "content": "The harbour master is Ingrid. The tide is at noon. " * 3}


def ask(http: httpx.Client, question: str, **more: Any) -> dict[str, Any]:
    chat = [SYSTEM, {"role": "user", "content": question}]
    reply = http.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 4, **more})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def look(http: httpx.Client, salt: str | None = None, **asked: Any) -> dict[str, Any]:
    headers = {"X-Cache-Salt": salt} if salt else {}
    reply = http.get("/v1/cache", params=asked, headers=headers)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(tree_view, "SHORT", 60.0)  # every survey counts as short
    with running(warm_ahead=False) as server:
        yield server


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_the_tree_is_what_the_cache_holds(server: Running, http: httpx.Client) -> None:
    for question in ("Where is the boat?", "Where is the crane?", "Where is the boat?"):
        ask(http, question)
    body = look(http)
    tree = body["tree"]
    spans = [node for node in tree["nodes"] if node["tokens"]]
    assert len(spans) == body["entries"]
    assert sum(node["tokens"] for node in spans) == body["tokens"]
    assert sum(node["checkpoint"] is not None for node in spans) == body["checkpoints"]
    for kind in ("rows", "checkpoint"):
        held = sum(node["bytes"]["memory"].get(kind, 0) for node in spans)
        assert held == body["bytes"]["memory"][kind]
    assert tree["root"]["with_below"]["tokens"] == body["tokens"]
    assert tree["merged"] == []
    by_id = {node["id"]: node for node in [tree["root"], *tree["nodes"]]}
    for node in spans:
        above = by_id[node["parent"]]
        assert node["start"] == above["start"] + above["tokens"]


def test_what_the_last_request_reused_is_marked(server: Running, http: httpx.Client) -> None:
    ask(http, "Where is the boat?")
    assert not any(node.get("used_last") for node in look(http)["tree"]["nodes"])
    for _ in range(2):
        ask(http, "Where is the crane?")  # reused as well, but not by the last request
    cached = ask(http, "Where is the boat?")["rewarm"]["cached_tokens"]
    lit = [node for node in look(http)["tree"]["nodes"] if node.get("used_last")]
    assert sum(node["tokens"] for node in lit) == cached
    assert all(node["hits"] for node in lit)


def test_a_span_says_which_message_it_is(server: Running, http: httpx.Client) -> None:
    ask(http, "Where is the boat?")
    ask(http, "Has the boat come in?")
    labels = [n["label"] for n in look(http)["tree"]["nodes"] if n.get("label", {}).get("text")]
    said = {(label["role"], label["text"][:20]) for label in labels}
    assert any(r == "system" and t.startswith("The harbour master") for r, t in said)
    assert ("user", "Where is the boat?") in said
    assert ("user", "Has the boat come in") in said


def test_words_are_for_the_tenant_that_sent_them(server: Running, http: httpx.Client) -> None:
    ask(http, "Where is the boat?")
    ask(http, "Where is the crane?", cache_salt="secret")
    ours, theirs, nobody = look(http), look(http, "secret"), look(http, "other")

    def words(body: dict[str, Any]) -> str:
        return json.dumps([node.get("label") for node in body["tree"]["nodes"]])

    assert "boat" in words(ours)
    assert "crane" not in json.dumps(ours)
    assert "crane" in words(theirs)
    assert "boat" not in json.dumps(theirs)
    assert "secret" not in json.dumps([ours, theirs])
    assert "harbour" not in json.dumps(nobody)
    assert [n["tokens"] for n in ours["tree"]["nodes"]] == [
        n["tokens"] for n in nobody["tree"]["nodes"]
    ]
    # A look at a single span of the other tenant shows none of its words, either.
    top = next(n for n in ours["tree"]["nodes"] if n.get("yours") is False)
    inside = look(http, root=top["id"])
    assert inside["tree"]["nodes"]
    assert "label" not in json.dumps(inside)
    assert "used_last" not in json.dumps(inside)


def test_a_salt_in_any_script_can_be_named(server: Running, http: httpx.Client) -> None:
    ask(http, "Where is the crane?", cache_salt="港 50%")
    assert "crane" in json.dumps(look(http, quote("港 50%")))


def test_a_tenants_words_are_nowhere_else(server: Running, http: httpx.Client) -> None:
    for _ in range(2):
        ask(http, "Where is the zirconium crane?", cache_salt="theirs")
    prying = {"messages": [SYSTEM, {"role": "user", "content": "Where is the zirconium "}]}
    for salt in (None, "other", "theirs%20", "their", "*", "%00"):
        headers = {"X-Cache-Salt": salt} if salt else {}
        seen = [http.get(path, headers=headers) for path in ("/v1/live", "/v1/cache", "/metrics")]
        spans = [node["id"] for node in seen[1].json()["tree"]["nodes"]]
        seen += [http.get(f"/v1/cache?root={span}", headers=headers) for span in spans]
        body = prying | ({"cache_salt": salt} if salt else {})
        seen.append(http.post("/v1/cache/explain", json=body))
        for reply in seen:
            assert reply.status_code == 200, reply.text
            assert "crane" not in reply.text
            assert "theirs" not in reply.text.replace("theirs%20", "")
        assert seen[-1].json()["miss"]["reason"] == "cold"
    assert "crane" in http.get("/v1/live", headers={"X-Cache-Salt": "theirs"}).text
    assert "crane" in http.get("/v1/cache", headers={"X-Cache-Salt": "theirs"}).text


def test_a_reply_is_bounded_and_the_rest_is_counted(server: Running, http: httpx.Client) -> None:
    for i in range(12):
        ask(http, f"{i} boats?")
    whole = look(http)["tree"]["root"]["with_below"]
    for asked in ({"limit": 1}, {"limit": 5}, {"depth": 2}, {"limit": 9, "depth": 4}):
        tree = look(http, **asked)["tree"]
        assert len(tree["nodes"]) <= asked.get("limit", 256)
        shown = sum(node["tokens"] for node in tree["nodes"])
        assert shown + sum(rest["tokens"] for rest in tree["merged"]) == whole["tokens"]


def test_merged_branches_are_found_by_paging(server: Running, http: httpx.Client) -> None:
    for i in range(12):
        ask(http, f"{i} boats?")
    everything = {n["id"] for n in look(http, limit=2000)["tree"]["nodes"]}
    seen: set[str] = set()
    todo: list[dict[str, Any]] = [{}]
    for _ in range(len(everything)):  # each page has something new
        if not todo:
            break
        tree = look(http, limit=3, **todo.pop())["tree"]
        seen.update(node["id"] for node in tree["nodes"])
        todo += [{"root": m["parent"], "offset": m["offset"]} for m in tree["merged"]]
    assert seen == everything


def test_nothing_is_looked_at_again_until_something_changes(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    take = Surveyor.take
    monkeypatch.setattr(Surveyor, "take", lambda *a: taken.append(1) or take(*a))
    ask(http, "Where is the boat?")
    first = http.get("/v1/cache")
    tag = first.headers["etag"]
    for _ in range(5):
        again = http.get("/v1/cache", headers={"If-None-Match": tag})
        assert (again.status_code, again.content) == (304, b"")
    assert http.get("/v1/cache", headers={"If-None-Match": tag, "X-Cache-Salt": "x"}).is_success
    assert len(taken) == 1
    ask(http, "Where is the crane?")
    assert http.get("/v1/cache", headers={"If-None-Match": tag}).status_code == 200
    assert len(taken) == 2


def test_a_long_survey_is_not_taken_again_soon(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_view, "SHORT", 0.0)
    monkeypatch.setattr(tree_view, "SHARE", 1e-9)
    ask(http, "Where is the boat?")
    before = look(http)["tree"]
    ask(http, "Where is the crane?")
    body = look(http)
    assert body["tree"] == before
    assert body["tokens"] > before["root"]["with_below"]["tokens"]  # the figures are of now


def test_clearing_forgets_the_words_too(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_view, "SHORT", 0.0)  # even if the next survey comes late
    monkeypatch.setattr(tree_view, "SHARE", 1e-9)
    ask(http, "Where is the boat?")
    look(http)
    assert http.delete("/v1/cache").json() == {"cleared": True}
    body = look(http)
    assert body["tree"]["nodes"] == []
    assert "boat" not in json.dumps(body)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("limit=0", 400),
        ("limit=2001", 400),
        ("limit=x", 400),
        ("depth=-1", 400),
        ("offset=1e3", 400),
        ("root=../x", 400),
        ("root=999999", 404),
        ("width=3", 400),
    ],
)
def test_what_cannot_be_shown_is_refused(http: httpx.Client, asked: str, status: int) -> None:
    reply = http.get(f"/v1/cache?{asked}")
    assert reply.status_code == status
    assert asked.split("=")[0] in reply.json()["error"]["message"]


def grow(tree: Tree, nodes: int) -> None:
    """Make a tree wide and deep: a system prompt with thousands of users, and a few long chats."""
    draw = np.random.default_rng(0)
    made: list[Node] = [tree.add(tree.root, encode(np.arange(500, dtype=np.int32)), "prefill")]
    while len(made) < nodes:
        parent = (
            made[0] if draw.random() < 0.3 else made[-1 - int(draw.exponential(20)) % len(made)]
        )
        tokens = draw.integers(0, 250, int(draw.integers(8, 60)))
        tokens[0] = len(made)
        node = tree.add(parent, encode(tokens.astype(np.int32)), "prefill")
        node.rows = Span(node.start, node.end, nbytes=100)
        made.append(node)


def fill(server: Running, nodes: int) -> None:
    """Make the tree of the tenant who names no salt a large one."""
    cache = server.engine.core.cache
    tree = cache.memory.tree(cache.namespace())
    grow(tree, nodes)
    for node in tree.nodes():
        cache.memory.ledger.count(node)


def test_a_hundred_thousand_nodes_are_a_small_reply(server: Running, http: httpx.Client) -> None:
    fill(server, 100_000)
    reply = http.get("/v1/cache?limit=400", timeout=120)
    found = reply.json()["tree"]
    assert len(found["nodes"]) == 400
    assert len(reply.content) < 400_000
    assert found["root"]["with_below"]["nodes"] == 100_000
    shown = sum(1 for node in found["nodes"] if node["tokens"])
    assert shown + sum(rest["nodes"] for rest in found["merged"]) == 100_000
    assert sum("label" in node for node in found["nodes"]) == tree_view.LABELS
    http.delete("/v1/cache")


def test_roles_are_learned_from_the_template() -> None:
    labels = Labels(ChatRenderer(tool_tokenizer()))
    assert set(labels.heads) == {"system", "user", "assistant", "tool"}
    chat = [SYSTEM, {"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Yes."}]
    rendered = labels.renderer.render([*chat, {"role": "user", "content": "Oh."}])
    data = encode(rendered.tokens)
    starts = labels.starts(data)
    assert [m.role for m in starts] == ["system", "user", "assistant", "user", "assistant"]
    user = starts[1]
    # A span that begins with the text, such as one after a system prompt's checkpoint.
    cut = user.text * WIDTH
    behind = labels.starts(data[cut:], data[:cut])
    assert behind[0] == (0, user.head - user.text, "user")
    assert labels.label(data[cut:], behind, "system").text == "Hm?"


def test_what_is_on_disk_is_in_the_tree_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_view, "SHORT", 60.0)
    options = {"cache_options": {"disk": str(tmp_path)}}
    with running(warm_ahead=False, engine_options=options) as server, server.client() as http:
        ask(http, "Where is the boat?")
        server.engine.core.cache.flush()
        nodes = [n for n in look(http)["tree"]["nodes"] if n["tokens"]]
        kept = [n for n in nodes if "disk" in n["bytes"]]
        assert kept
        assert all("memory" in n["bytes"] for n in kept)
    server.engine.core.cache.close()
    with running(warm_ahead=False, engine_options=options) as server, server.client() as http:
        # After a restart only the disk has the tree. Spans that a request uses come back to memory.
        ask(http, "Where is the crane?")
        nodes = [n for n in look(http)["tree"]["nodes"] if n["tokens"]]
        tiers = {tuple(n["bytes"]) for n in nodes}
        assert {("disk",), ("memory", "disk")} <= tiers
        only = [n for n in nodes if tuple(n["bytes"]) == ("disk",)]
        assert any("boat" in n["label"]["text"] for n in only)
    server.engine.core.cache.close()


def test_a_cleared_cache_may_keep_its_memory(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(heap, "give_back", lambda: given_back.append(True))
    assert client.delete("/v1/cache?give_back=false").json() == {"cleared": True}
    assert not given_back
    assert client.delete("/v1/cache").json() == {"cleared": True}
    assert given_back == [True]
    refused = client.delete("/v1/cache?give_back=perhaps")
    assert refused.status_code == 400
    assert "give_back" in refused.json()["error"]["message"]

"""The server as a whole handles keys, limits, odd input, failures and its end."""

from __future__ import annotations

import json
import logging
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from rewarm.engine.engine import Engine
from rewarm.engine.request import Request
from rewarm.errors import NotReady, QueueFull
from rewarm.options import ServerOptions
from rewarm.server.serve import Server
from tests.engines import started_engine
from tests.leaks import COMPILED
from tests.server.servers import Running, running
from tests.sets import SOAK
from tests.tiny import END

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
MESSAGE: dict[str, Any] = {"model": "m", **CHAT}
JSON = {"Content-Type": "application/json"}
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(max_body=LIMIT, keep_alive=0.05) as found:
        yield found


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as found:
        yield found


def healthy(http: httpx.Client) -> bool:
    return http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'"text"',
        b'{"messages": ' + b"[" * 100_000,
        b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "max_tokens": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "max_tokens": 1, "temperature": Infinity, "messages": [], "prompt": "x"}',
        b'{"model": "m", "max_tokens": 1e400, "messages": [], "prompt": "x"}',
        b'{"model": "m", "max_tokens": ' + b"9" * 5000 + b', "messages": [], "prompt": "x"}',
        b'{"model": "m", "max_tokens": 1, "messages": {"role": "user"}, "prompt": {}}',
        b'{"model": "m", "max_tokens": 1, "messages": [{"role": "function"}], "prompt": [[]]}',
    ],
)
def test_what_is_no_request_is_a_400(http: httpx.Client, path: str, body: bytes) -> None:
    reply = http.post(path, content=body, headers=JSON)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert healthy(http)


def test_odd_but_valid_text_is_answered(http: httpx.Client) -> None:
    for text in ("", "\x00", "\u2028\x85\ufeff", "<|start|><|end|></think>", "\U0001f600" * 50):
        chat = {**CHAT, "messages": [{"role": "user", "content": text}]}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_large_body_is_answered_and_a_larger_one_refused(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "x" * (LIMIT - 1000)}]}
    reply = http.post("/v1/chat/completions", json=chat)
    assert reply.status_code == 400
    assert "context is 32,768" in reply.json()["error"]["message"]

    def parts() -> Iterator[bytes]:
        for _ in range(3 * LIMIT // 65536):
            yield b" " * 65536

    for content in (b" " * (LIMIT + 1), parts()):
        reply = http.post("/v1/messages", content=content, headers=JSON)
        assert reply.status_code == 413
        assert reply.json()["error"]["type"] == "request_too_large"
    assert healthy(http)


def test_other_content_types_paths_and_methods(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", content=json.dumps(CHAT)).status_code == 415
    missing = http.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"
    wrong = http.get("/v1/messages")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["type"] == "error"


def test_request_ids_are_echoed_where_they_are_sane(http: httpx.Client) -> None:
    sane = http.get("/health", headers={"X-Request-ID": "abc-1.2:3"})
    assert sane.headers["x-request-id"] == "abc-1.2:3"
    for odd in ("a b", "x" * 200, "<script>"):
        found = http.get("/health", headers={"X-Request-ID": odd}).headers["x-request-id"]
        assert re.fullmatch("req_[0-9a-f]{24}", found)


def test_no_cors_and_no_outside_hosts(http: httpx.Client) -> None:
    page = http.get("/", headers={"Origin": "http://evil"})
    assert "access-control-allow-origin" not in page.headers
    assert not re.findall("https?://[^/\"']+", page.text)
    assert http.get("/docs").status_code == 404


def test_without_a_key_a_name_from_elsewhere_is_refused(http: httpx.Client) -> None:
    for host in ("localhost:1", "127.0.0.1", "[::1]:80", "mac.local", "host.docker.internal:8"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example:8080", "local.evil.example"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 403


def test_a_key_is_asked_for() -> None:
    with running(api_key="geheim-ß") as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == 200
        assert "tiny" not in http.get("/").text
        for path in ("/v1/models", "/metrics", "/v1/cache", "/openapi.json"):
            assert http.get(path).status_code == 401
        assert http.delete("/v1/cache").status_code == 401
        for path in ("/v1/chat/completions", "/v1/messages"):
            reply = http.post(path, json=MESSAGE)
            assert reply.status_code == 401
            assert "API key" in reply.json()["error"]["message"]
        for given in ("geheim", "geheim-s", "x"):
            wrong = {"Authorization": f"Bearer {given}"}
            assert http.get("/v1/models", headers=wrong).status_code == 401
        right = "geheim-ß".encode()
        for name, value in ((b"x-api-key", right), (b"authorization", b"Bearer " + right)):
            assert http.get("/v1/models", headers=[(name, value)]).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_full_queue_and_a_loading_model(
    server: Running, http: httpx.Client, path: str, stream: bool
) -> None:
    def refusing(error: Exception) -> Any:
        def fault(request: Request) -> None:
            raise error

        return fault

    try:
        server.engine.faulty = refusing(QueueFull("256 requests wait", retry_after=7))
        reply = http.post(path, json={**MESSAGE, "stream": stream})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
        server.engine.faulty = refusing(NotReady("the model is being loaded"))
        assert http.post(path, json={**MESSAGE, "stream": stream}).status_code == 503
        server.engine.faulty = refusing(RuntimeError("a secret path"))
        reply = http.post(path, json={**MESSAGE, "stream": stream})
        assert reply.status_code == 500
        assert "secret" not in reply.text
    finally:
        server.engine.faulty = None
    assert http.post(path, json=MESSAGE).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_error_within_a_stream_is_told_in_it(
    server: Running, http: httpx.Client, path: str
) -> None:
    def broken(request: Request) -> None:
        def fail(token: int) -> None:
            raise ValueError("cannot be read")

        request.sink.choices[0].answer.add = fail  # type: ignore[attr-defined]

    server.engine.faulty = broken
    try:
        stream = http.post(path, json={**MESSAGE, "stream": True})
        whole = http.post(path, json=MESSAGE)
    finally:
        server.engine.faulty = None
    assert stream.status_code == 200
    events = [line for line in stream.text.splitlines() if line.startswith("data: {")]
    assert (
        "its log has the reason"
        in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    )
    assert whole.status_code == 500
    assert "cannot be read" not in stream.text + whole.text
    assert healthy(http)


def test_a_stream_gives_signs_of_life_during_a_long_prefill(http: httpx.Client) -> None:
    chat = {**CHAT, "messages": [{"role": "user", "content": "word " * 200}], "stream": True}
    text = http.post("/v1/chat/completions", json=chat).text
    steps = [tuple(map(int, s)) for s in re.findall(r"^: prefill (\d+)/(\d+)$", text, re.M)]
    assert len(steps) > 10
    assert steps == sorted(steps)
    assert steps[-1][0] < steps[-1][1]
    assert text.rstrip().endswith("data: [DONE]")


def test_metrics_count_what_replies_say(server: Running, http: httpx.Client) -> None:
    def metric(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", http.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    names = {
        "cached": 'rewarm_prompt_tokens_total{endpoint="chat",kind="cached"}',
        "prefilled": 'rewarm_prompt_tokens_total{endpoint="chat",kind="prefilled"}',
        "generated": 'rewarm_generated_tokens_total{endpoint="chat"}',
        "requests": 'rewarm_requests_total{endpoint="chat",status="200"}',
        "first": 'rewarm_time_to_first_token_seconds_count{endpoint="chat"}',
    }
    before = {key: metric(name) for key, name in names.items()}
    replies = [http.post("/v1/chat/completions", json=CHAT).json() for _ in range(2)]
    after = {key: metric(name) - before[key] for key, name in names.items()}
    assert after["requests"] == after["first"] == 2
    assert after["cached"] == sum(r["rewarm"]["cached_tokens"] for r in replies)
    assert after["prefilled"] == sum(r["rewarm"]["prefilled_tokens"] for r in replies)
    assert after["generated"] == sum(r["usage"]["completion_tokens"] for r in replies)
    assert metric('rewarm_cache_bytes{kind="rows",tier="memory"}') > 0
    assert metric("rewarm_ready") == 1


def test_the_cache_is_shown_and_cleared(server: Running, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json=CHAT)
    server.settle()
    assert http.get("/v1/cache").json()["tokens"] > 0
    assert http.delete("/v1/cache").json() == {"cleared": True}
    assert http.get("/v1/cache").json()["tokens"] == 0
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_line_per_request(
    server: Running, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.settle()
    http.delete("/v1/cache")
    with caplog.at_level(logging.INFO, "rewarm.requests"):
        http.post("/v1/chat/completions", json=CHAT)
        http.post("/v1/chat/completions", json=CHAT)
        http.post("/v1/messages", json={"model": "m"})
        http.get("/health")
        server.settle()
    cold, warm, wrong = [r.message for r in caplog.records if r.name == "rewarm.requests"]
    assert re.fullmatch(
        r"200 chat  \d+ tokens: 0 cached, 0 again, \d+ new"
        r" · first token [\d,]+ ms · 4 tokens at [\d,]+/s",
        cold,
    )
    assert re.search(r"\d+ cached \(end\), 1 again, 0 new", warm)
    assert wrong.startswith("400 messages  max_tokens: field required") or "required" in wrong


def test_cancels_at_random_moments_leave_nothing_behind(
    server: Running, http: httpx.Client
) -> None:
    chance = random.Random(0)

    def leave(i: int) -> None:
        stream = bool(i % 2)
        body = {**CHAT, "max_tokens": 400, "stream": stream}
        body["messages"] = [{"role": "user", "content": f"{i % 5} " * 200}]
        limit = httpx.Timeout(30, read=chance.uniform(0.001, 0.3))
        with httpx.Client(base_url=server.url, timeout=limit) as client:
            try:
                with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    for _ in reply.iter_bytes():
                        if chance.random() < 0.1:
                            return
            except httpx.TimeoutException:
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(40)))
    server.settle()
    assert healthy(http)
    assert server.engine.core.cache.stats().leases == 0
    server.engine.core.cache.verify()
    with server.says(f"</think>Still here.{END}"):
        reply = http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 40}).json()
    assert reply["choices"][0]["message"]["content"] == "Still here."


def test_a_server_that_still_loads_says_so() -> None:
    from starlette.testclient import TestClient

    from rewarm.server.app import create_app

    def never() -> Any:
        raise AssertionError("not started")

    engine = Engine(never)
    with TestClient(create_app(engine)) as http:
        reply = http.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (503, "loading")
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
            assert http.post(path, json={**MESSAGE, "prompt": "x"}).status_code == 503
        assert http.get("/v1/cache").status_code == 503
        assert http.get("/v1/models").status_code == 200
        assert "rewarm_ready 0.0" in http.get("/metrics").text


@pytest.mark.long
def test_the_schema_is_true(tmp_path: Path) -> None:
    """Requests made from the schema, right and wrong, give no 500 and only declared replies."""
    pytest.importorskip("schemathesis")
    with running(engine_options={"context": 300}) as server:
        options = {
            "--seed": "1",
            "--max-examples": "200" if SOAK else "4",
            "--phases": "coverage,fuzzing" if SOAK else "fuzzing",
            "--checks": "not_a_server_error,status_code_conformance,content_type_conformance,"
            "response_schema_conformance,negative_data_rejection,unsupported_method",
        }
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
                *(part for option in options.items() for part in option),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_second_ctrl_c_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = started_engine()
    server = Server(engine, ServerOptions(port=0, grace=1.0))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert server.listens()
    for _ in range(2):
        server.handle_exit(signal.SIGINT, None)
    thread.join(20)
    assert not thread.is_alive()
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
    engine.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, *[signal.SIGINT] * SOAK])
def test_a_signal_ends_streams_properly_and_exits_with_0(number: signal.Signals) -> None:
    process = subprocess.Popen(
        # Import rewarm first: it puts a fast BLAS under mlx.
        [sys.executable, "-c", "import rewarm; from tests.server import servers as s; s.main()"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = {**CHAT, "max_tokens": 30_000, "stream": True, "logit_bias": {"257": -100}}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            while "reasoning" not in next(lines):
                pass
            process.send_signal(number)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert len(rest) < 20_000, "it was not stopped, but came to its own end"
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("uncollected")
def test_delete_gives_the_memory_of_the_tree_back_at_once() -> None:
    with running(warm_ahead=False) as server, server.client() as client:
        body = {"messages": [{"role": "user", "content": "Hello " * 50}], "max_tokens": 4}

        def ask_and_clear() -> int:
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            server.settle()
            assert client.delete("/v1/cache").status_code == 200
            return mx.get_active_memory()

        ask_and_clear()  # whatever is compiled and kept once
        body["messages"][0]["content"] += " again"  # type: ignore[index]
        before = ask_and_clear()
        for _ in range(3):
            body["messages"][0]["content"] += " again"  # type: ignore[index]
            assert ask_and_clear() - before <= COMPILED

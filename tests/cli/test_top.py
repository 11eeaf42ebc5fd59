"""`rewarm top` and `rewarm explain` as programs of their own, against a real server."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rewarm.cli.top import frame
from tests.cli.test_chat import _take_terminal
from tests.cli.test_cli import rewarm_cli
from tests.server.servers import Running, running

SYSTEM = {
    "role": "system",
    "content": "You keep the harbour of Ullapool, and its three boats. " * 4,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(api_key="key", warm_ahead=False) as started:
        with started.client() as client:
            for question in ("Which boats are in?", "Which boats are in?", "And the tide?"):
                body = {"messages": [SYSTEM, {"role": "user", "content": question}]}
                client.post("/v1/chat/completions", json={**body, "max_tokens": 3})
        yield started


def top(server: Running, *more: str) -> subprocess.CompletedProcess[str]:
    return rewarm_cli("top", "--once", "--url", server.url, "--api-key", "key", *more)


def drawn(seen: dict[str, Any], note: str = "", width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(seen, note))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_one_picture_shows_it_all(server: Running) -> None:
    done = top(server)
    assert done.returncode == 0, done.stderr
    for what in (
        r"tiny\s+ready\s+up \d+ s",
        r"hit rate\s+\d+% last minute.*\d+% in all",
        r"first token\s+[\d,]+ ms p50\s+[\d,]+ ms p90",
        r"0 waiting \(of 256\)",
        r"memory\s+[\d.]+ \wB\s+64.0 MB",
        r"0 evictions",
        r"nothing in flight",
        r"hottest\s+hits\s+tokens",
        r"You keep the harb",
    ):
        assert re.search(what, done.stdout), f"{what}\n{done.stdout}"
    assert "\x1b" not in done.stdout  # for scripts


def test_requests_in_flight_show_their_prefill(server: Running) -> None:
    with server.client() as client:
        seen = client.get("/v1/live").json()
    flight = {
        "number": 9,
        "own": True,
        "id": "x",
        "endpoint": "chat",
        "stage": "prefilling",
        "prompt_tokens": 1000,
        "cached_tokens": 250,
        "prefilled_tokens": 500,
        "generated_tokens": 0,
        "age_ms": 3000.0,
    }
    shown = drawn({**seen, "requests": [flight]})
    row = next(line for line in shown.splitlines() if line.startswith("prefilling"))
    assert row.count("█") == 9  # three quarters of 12
    assert re.search(r"1,000 .*250\s+500\s+0\s+3 s", row)
    many = drawn({**seen, "requests": [flight] * 300})
    assert "and 288 more" in many
    assert drawn(seen, "no server answers").count("no server answers") == 1
    assert all(len(line) <= 60 for line in drawn(seen, width=60).splitlines())


def test_a_server_that_is_loading_can_be_watched(server: Running) -> None:
    with server.client() as client:
        seen = client.get("/v1/live").json()
    nothing = {"p50": None, "p90": None, "p99": None, "count": 0}
    rates = dict.fromkeys(seen["hit_rate"])
    loading = {
        **seen,
        "state": "loading",
        "engine": None,
        "tiers": {},
        "cache": None,
        "recent": [],
        "hottest": [],
        "ttft_ms": nothing,
        "hit_rate": rates,
    }
    assert "loading" in drawn(loading)


def test_where_no_server_is_the_way_out_is_named() -> None:
    for command in (("top", "--once"), ("explain", "-")):
        done = subprocess.run(
            [sys.executable, "-m", "rewarm", *command, "--url", "http://127.0.0.1:9"],
            input='{"messages": []}',
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "http://127.0.0.1:9" in done.stderr
        assert "rewarm serve" in done.stderr
        assert "Traceback" not in done.stderr
    wrong = rewarm_cli("top", "--once", "--url", "localhost")
    assert (wrong.returncode, "http://127.0.0.1:8080" in wrong.stderr) == (2, True)


def test_a_missing_or_wrong_key_is_named(server: Running) -> None:
    for key, says in ((), "needed"), (("--api-key", "no"), "wrong"):
        done = rewarm_cli("top", "--once", "--url", server.url, *key)
        assert done.returncode == 2
        assert says in done.stderr
        assert "REWARM_API_KEY" in done.stderr


def test_it_goes_on_in_a_terminal_until_ctrl_c(server: Running) -> None:
    near, far = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rewarm", "top", "--url", server.url, "--interval", "0.1"],
        stdin=far,
        stdout=far,
        stderr=far,
        env={**os.environ, "REWARM_API_KEY": "key", "TERM": "xterm", "COLUMNS": "120"},
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(far)
    shown = b""
    try:
        deadline = time.monotonic() + 60
        while shown.count(b"hit rate") < 3:
            assert time.monotonic() < deadline, shown
            if select.select([near], [], [], 1)[0]:
                shown += os.read(near, 65536)
        os.write(near, b"\x03")
        while process.poll() is None:
            assert time.monotonic() < deadline, shown
            if select.select([near], [], [], 0.1)[0]:
                try:
                    shown += os.read(near, 65536)
                except OSError:  # the other end is closed
                    break
        assert process.wait(30) == 0
        assert b"Traceback" not in shown
        assert b"\x1b[?1049l" in shown  # the screen is restored
    finally:
        process.kill()
        process.wait()
        os.close(near)


def test_explain_says_what_the_server_says(server: Running, tmp_path: Path) -> None:
    asked = tmp_path / "request.json"
    body = {"messages": [SYSTEM, {"role": "user", "content": "Something quite different. " * 20}]}
    asked.write_text(json.dumps(body))
    options = ("--url", server.url, "--api-key", "key")
    done = rewarm_cli("explain", str(asked), *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"[\d,]+ tokens: [1-9]\d* cached, \d+ again, \d+ new", done.stdout)
    assert "diverged" in done.stdout
    assert "message 1 (user)" in " ".join(done.stdout.split())
    assert "Something" in done.stdout
    raw = rewarm_cli("explain", str(asked), *options, "--json")
    with server.client() as client:
        told = client.post("/v1/cache/explain", json=body).json()
    said = json.loads(raw.stdout)
    for each in (told, said):
        each["compared_with"].pop("seconds_ago")
    assert said == told


def test_explain_gives_advice(server: Running, tmp_path: Path) -> None:
    def body(now: str) -> dict[str, Any]:
        system = {"role": "system", "content": f"It is {now}. {SYSTEM['content']}"}
        return {"messages": [system, {"role": "user", "content": "Hello!"}], "max_tokens": 2}

    with server.client() as client:
        client.post("/v1/chat/completions", json=body("2024-05-13 09:12:44"))
    asked = tmp_path / "request.json"
    asked.write_text(json.dumps(body("2024-05-17 18:03:01")))
    done = rewarm_cli("explain", str(asked), "--url", server.url, "--api-key", "key")
    text = " ".join(done.stdout.split())
    assert "timestamp" in text
    assert "tokens per request" in text
    assert "'2024-05-17 18:03:01'" in text


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), ("{", "not JSON"), ("{}", "messages")]
)
def test_a_request_that_cannot_be_explained_is_named(
    server: Running, tmp_path: Path, content: str | None, says: str
) -> None:
    asked = tmp_path / "request.json"
    if content is not None:
        asked.write_text(content)
    done = rewarm_cli("explain", str(asked), "--url", server.url, "--api-key", "key")
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr

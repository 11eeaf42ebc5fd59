"""A connection has limits before anything of a request is known."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from rewarm.options import ServerOptions
from rewarm.server.connections import LimitedProtocol, watch
from tests.server.servers import Running, running

QUICK = ServerOptions(max_connections=8, max_head=2000, head_timeout=0.5, idle_timeout=0.5)


async def echo(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def endless(request: Request) -> Response:
    async def parts() -> Any:
        try:
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            request.app.state.ended.set()

    return StreamingResponse(parts())


@contextmanager
def listening(limits: ServerOptions = QUICK) -> Iterator[tuple[int, Any]]:
    @contextmanager
    def closing(server: uvicorn.Server) -> Iterator[None]:
        try:
            yield
        finally:
            server.should_exit = True

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)

    app = Starlette(routes=[Route("/", echo, methods=["POST", "GET"]), Route("/endless", endless)])
    app.state.ended = threading.Event()
    protocol: Any = partial(LimitedProtocol, limits)
    config = uvicorn.Config(watched, http=protocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    connections: Any = server.server_state.connections
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        watcher = asyncio.create_task(watch(connections))
        try:
            await server.serve([listener])
        finally:
            watcher.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    with closing(server):
        yield listener.getsockname()[1], app
    thread.join(20)
    assert not connections


def connected(port: int, receives: int | None = None) -> socket.socket:
    """Connect, with a buffer of so many bytes for what is received."""
    found = socket.socket()
    found.settimeout(20)
    if receives is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    found.connect(("127.0.0.1", port))
    return found


def answer(connection: socket.socket) -> bytes:
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_a_request_is_answered_and_the_next_one_too() -> None:
    with listening() as (port, _), connected(port) as connection:
        for length in (0, 100_000):
            body = b"x" * length
            connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % length + body)
            expected, found = b"\r\n\r\n%d" % length, b""
            while not found.endswith(expected):
                found += connection.recv(4096)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_long_head_is_refused(at_once: bool, nth: int) -> None:
    with listening() as (port, _), connected(port) as connection:
        for _ in range(nth - 1):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        head = b"GET / HTTP/1.1\r\nX: " + b"y" * 3000
        for part in [head + b"\r\n\r\n"] if at_once else [head[:1500], head[1500:]]:
            connection.sendall(part)
            time.sleep(0.05)
        assert b"431 Request Header Fields Too Large" in answer(connection)


def test_a_long_trailer_is_refused() -> None:
    with listening() as (port, _), connected(port) as connection:
        head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"2\r\nxx\r\n" * 1000)
        time.sleep(0.1)
        connection.sendall(b"0\r\nX: ")
        time.sleep(0.1)
        connection.sendall(b"y" * 3000)
        assert b" 431 " in answer(connection)


def test_many_small_parts_of_a_body_are_read() -> None:
    with listening() as (port, _), connected(port) as connection:
        head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        connection.sendall(head + b"2\r\nxx\r\n" * 20_000 + b"0\r\n\r\n")
        assert answer(connection).endswith(b"\r\n\r\n40000")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(sent: bytes) -> None:
    with listening() as (port, _), connected(port) as connection:
        connection.sendall(sent)
        found = answer(connection)
        assert b" 408 " in found if sent else not found


def test_a_head_that_comes_byte_by_byte_is_not_waited_for() -> None:
    with listening() as (port, _), connected(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        for _ in range(20):  # each byte comes sooner than a head may take
            with suppress(OSError):
                connection.sendall(b"y")
            time.sleep(0.1)
        assert b" 408 " in answer(connection)


def test_a_body_without_progress_is_not_waited_for() -> None:
    with listening() as (port, _), connected(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\nsome")
        assert b" 408 " in answer(connection)


def test_a_slow_body_is_read_to_its_end() -> None:
    with listening() as (port, _), connected(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 8\r\nConnection: close\r\n\r\n")
        for _ in range(8):
            time.sleep(0.25)
            connection.sendall(b"x")
        assert answer(connection).endswith(b"\r\n\r\n8")


def test_a_stream_that_is_not_read_ends() -> None:
    with listening() as (port, app), connected(port) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        assert app.state.ended.wait(20)


def test_a_silent_connection_makes_place_for_another() -> None:
    with listening(ServerOptions(max_connections=4)) as (port, _):
        silent = [connected(port) for _ in range(10)]
        with connected(port) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert answer(connection).startswith(b"HTTP/1.1 200")
        for each in silent:
            each.close()


# The real server

CHAT = {"messages": [{"role": "user", "content": "Hm?"}], "max_tokens": 4}


def opened(server: Running, body: bytes, length: int) -> socket.socket:
    """Begin to send the body of a chat."""
    connection = connected(int(server.url.rsplit(":", 1)[1]), receives=4096)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return connection


def test_silent_clients_and_endless_heads_stop_nobody() -> None:
    with running(max_connections=16, head_timeout=1.0) as server:
        port = int(server.url.rsplit(":", 1)[1])
        silent = [connected(port) for _ in range(100)]
        with server.client() as http, connected(port) as endless:
            with suppress(OSError):
                for _ in range(2000):  # 100 MB
                    endless.sendall(b"y" * 50_000)
            assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        for each in silent:
            each.close()


def test_bodies_that_do_not_end_take_bounded_memory() -> None:
    with running(max_bodies=100_000) as server, server.client() as http:
        half = [opened(server, b"x" * 60_000, 70_000) for _ in range(2)]
        assert b" 503 " in half[1].recv(4096)
        for each in half:
            each.close()
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert server.backend.bodies._unfinished == 0


def test_the_work_of_a_stream_that_nobody_reads_ends() -> None:
    with running(idle_timeout=1.0) as server:
        body = json.dumps({**CHAT, "max_tokens": 30_000, "stream": True, "logprobs": True})
        sent = body.replace('"logprobs"', '"top_logprobs": 20, "logprobs"').encode()
        with opened(server, sent, len(sent)), server.client() as http:
            deadline = time.monotonic() + 60
            while not http.get("/v1/live").json()["recent"]:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            done = http.get("/v1/live").json()["recent"][0]
        assert done["status"] == 499
        assert done["completion_tokens"] < 30_000

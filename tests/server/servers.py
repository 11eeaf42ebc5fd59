"""A server with a tiny model on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from rewarm.options import ServerOptions
from rewarm.server.backend import Backend
from rewarm.server.serve import Server, serve
from tests.engines import ScriptedEngine, started_engine
from tests.runs import Counted


@dataclass
class Running:
    url: str
    engine: ScriptedEngine
    model: Counted
    backend: Backend
    headers: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def says(self, script: str) -> Iterator[None]:
        """Make every answer in this block this text."""
        self.engine.script = script
        try:
            yield
        finally:
            self.engine.script = None

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=30, **options)

    def settle(self) -> None:
        """Wait until the engine and warm-ahead have nothing to do. Warm-ahead is rendered before
        the engine gets it."""
        deadline = time.monotonic() + 60
        quiet = 0
        while quiet < 3:
            for pool in (self.backend._pool, self.backend._large):
                caught_up(pool)
            stats = self.engine.core.stats()
            busy = stats.waiting or stats.prefilling or stats.decoding or stats.warm_waiting
            quiet = 0 if busy else quiet + 1
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)


def caught_up(pool: ThreadPoolExecutor) -> None:
    """Wait until a pool has done all its tasks: only then can all its threads meet."""
    together = threading.Barrier(pool._max_workers)
    for met in [pool.submit(together.wait, 60) for _ in range(pool._max_workers)]:
        met.result()


@contextmanager
def running(
    tokenizer: Any = None, engine_options: dict[str, Any] | None = None, **options: Any
) -> Iterator[Running]:
    """Run a real server in a thread."""
    engine, model = started_engine(tokenizer, **(engine_options or {}))
    assert engine.wait(60) == "ready", engine.detail
    server = Server(engine, ServerOptions(port=0, **{"model_name": "tiny", **options}))
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        key = options.get("api_key")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        yield Running(server.url, engine, model, server.config.app.state.backend, headers)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


def main(context: int = 32768) -> None:
    """Run a server as a program, for tests that stop it with a signal."""
    engine, _ = started_engine(context=context)
    serve(engine, ServerOptions(port=0, grace=1.0), lambda url: print(url, flush=True))

"""Engines for tests, and a sink that collects their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rewarm.cache import PrefixCache
from rewarm.cache.identity import evaluate
from rewarm.engine import Core, Engine, EngineParts, Request, Sink
from rewarm.options import EngineOptions
from rewarm.values import Cost, Finish, Sampled

from .runs import Counted
from .tiny import tiny_model, tool_tokenizer

PATIENCE = 120.0


class Collected(Sink):
    """A sink that keeps all results of one request."""

    def __init__(self, on_token: Callable[[Sampled], bool] | None = None) -> None:
        self.sampled: dict[int, list[Sampled]] = {}
        self.times: list[float] = []
        self.progress: list[tuple[int, int]] = []
        self.fetch_progress: list[tuple[int, int]] = []
        self.reasons: dict[int, Finish] = {}
        self.report: Cost | None = None
        self.error: Exception | None = None
        self.calls_after_end = 0
        self._on_token = on_token
        self._over = threading.Event()
        self._begun = threading.Event()

    def fetched(self, done: int, total: int) -> None:
        self.fetch_progress.append((done, total))

    def prefilled(self, done: int, total: int) -> None:
        self.progress.append((done, total))
        self._begun.set()

    def token(self, choice: int, sampled: Sampled) -> bool:
        self.calls_after_end += choice in self.reasons or self._over.is_set()
        self.sampled.setdefault(choice, []).append(sampled)
        self.times.append(time.perf_counter())
        return self._on_token(sampled) if self._on_token else False

    def ended(self, choice: int, reason: Finish) -> None:
        self.calls_after_end += choice in self.reasons
        self.reasons[choice] = reason

    def done(self, report: Cost) -> None:
        self.calls_after_end += self._over.is_set()
        self.report = report
        self._over.set()

    def failed(self, error: Exception) -> None:
        self.calls_after_end += self._over.is_set()
        self.error = error
        self._over.set()

    def begun(self) -> None:
        assert self._begun.wait(PATIENCE), "its prefill never began"

    def over(self) -> Collected:
        assert self._over.wait(PATIENCE), "no answer"
        return self

    @property
    def tokens(self) -> list[int]:
        return self.tokens_of(0)

    def tokens_of(self, choice: int) -> list[int]:
        return [s.token for s in self.sampled.get(choice, [])]

    @property
    def prefilled_tokens(self) -> int:
        assert self.report is not None
        return self.report.prefilled


@contextmanager
def engine(
    model: Any,
    tokenizer: Any = None,
    *,
    memory: str = "256MB",
    chunk: int = 32,
    reuse: Any = "fast",
    cache: Any = None,
    **options: Any,
) -> Iterator[Engine]:
    def load() -> EngineParts:
        made = cache or PrefixCache(model, memory=memory, chunk=chunk, reuse=reuse)
        return EngineParts(model, tokenizer, made)

    evaluate(model)  # made in this thread, run in another
    running = Engine(load, EngineOptions(**({"rehearse": False} | options)))
    running.start()
    try:
        assert running.wait(PATIENCE) == "ready", running.detail
        yield running
    finally:
        running.stop()
        if running.state == "stopped":
            running.core.cache.verify()
            assert running.core.cache.stats().leases == 0


def ask(server: Engine, tokens: Any, max_tokens: int = 12, **options: Any) -> Collected:
    """Submit a request, and return at once."""
    sink = options.pop("sink", None) or Collected()
    server.core.submit(Request(tokens, sink, max_tokens, **options))
    return sink  # type: ignore[no-any-return]


def answer(server: Engine, tokens: Any, max_tokens: int = 12, **options: Any) -> Collected:
    """Submit a request, and wait for the answer."""
    collected = ask(server, tokens, max_tokens, **options).over()
    assert collected.error is None, collected.error
    return collected


def burst(server: Engine, prompts: list[Any], **options: Any) -> list[Collected]:
    """Submit all prompts, then wait for every answer."""
    asked = [ask(server, p, **options) for p in prompts]
    return [a.over() for a in asked]


def settled(server: Engine) -> None:
    """Wait until warm-ahead is done."""
    until = time.monotonic() + PATIENCE
    while server.core.stats().warm_waiting:
        assert time.monotonic() < until, "warm-ahead never ended"
        time.sleep(0.002)


class ScriptedEngine(Engine):
    """The real engine with the real model. Where there is a `script`, it is the answer."""

    script: str | None = None
    requests: list[Request]
    faulty: Callable[[Request], None] | None = None

    @property
    def core(self) -> Core:
        core = super().core
        core.submit = partial(self._submit, core)  # type: ignore[method-assign]
        return core

    def _submit(self, core: Core, request: Request) -> None:
        if self.faulty is not None:
            self.faulty(request)
        if self.script is not None and not request.opening:
            request.opening = tuple(core.tokenizer.encode(self.script, add_special_tokens=False))
        Core.submit(core, request)
        self.requests.append(request)


def started_engine(
    tokenizer: Any = None,
    *,
    model: Any = None,
    reuse: Any = "fast",
    memory: str = "64MB",
    cache_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[ScriptedEngine, Counted]:
    model = Counted(model or tiny_model())

    def load() -> EngineParts:
        given = {"memory": memory, "chunk": 64, "reuse": reuse, **(cache_options or {})}
        cache = PrefixCache(model, **given)
        return EngineParts(model, tokenizer or tool_tokenizer(), cache)

    engine = ScriptedEngine(load, EngineOptions(**({"rehearse": False} | options)))
    engine.requests = []
    engine.start()
    return engine, model

"""A server with a tiny model on a free port, and answers that a test can choose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from rewarm import PrefixCache
from rewarm.engine import Engine, Loaded
from rewarm.engine.request import Request
from rewarm.options import EngineOptions, ServerOptions
from rewarm.server.backend import Backend
from rewarm.server.serve import Server, serve

from .runs import Counted
from .tiny import byte_tokenizer, tiny_model

END = "<|end|>"

# Like the templates of thinking models that call tools.
TEMPLATE = """\
{%- if tools -%}<|start|>tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor -%}<|end|>{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
<|start|>{{ m.role }}
{%- if m.reasoning_content and loop.index0 > last.user %}
<think>{{ m.reasoning_content }}</think>{%- endif %}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant
<think>{%- if enable_thinking is defined and not enable_thinking -%}</think>{%- endif -%}
{%- endif -%}"""


def tool_tokenizer() -> TokenizerWrapper:
    """One byte is one token; thinks, and calls tools in JSON."""
    fast = byte_tokenizer()
    fast.chat_template = TEMPLATE
    return TokenizerWrapper(
        fast,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )


class ScriptedEngine(Engine):
    """The real engine with the real model; where there is a script, its tokens are forced."""

    script: str | None = None
    requests: list[Request]
    faulty: Callable[[Request], None] | None = None

    def submit(self, request: Request) -> None:
        if self.faulty is not None:
            self.faulty(request)
        if self.script is not None and not request.opening:
            request.opening = tuple(self.tokenizer.encode(self.script, add_special_tokens=False))
        super().submit(request)
        self.requests.append(request)


@dataclass
class Running:
    url: str
    engine: ScriptedEngine
    model: Counted
    backend: Backend
    headers: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def says(self, script: str) -> Iterator[None]:
        """Every answer in here is this text."""
        self.engine.script = script
        try:
            yield
        finally:
            self.engine.script = None

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=30, **options)

    def settle(self) -> None:
        """Until the engine has nothing to do, warm-ahead included, which is rendered before the
        engine hears of it."""
        deadline = time.monotonic() + 60
        quiet = 0
        while quiet < 3:
            for pool in (self.backend._pool, self.backend._large):
                caught_up(pool)
            stats = self.engine.stats()
            busy = stats.waiting or stats.prefilling or stats.decoding or stats.warm_waiting
            quiet = 0 if busy else quiet + 1
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)


def caught_up(pool: ThreadPoolExecutor) -> None:
    """Until all that a pool was given so far is done: then all its threads can meet."""
    together = threading.Barrier(pool._max_workers)
    for met in [pool.submit(together.wait, 60) for _ in range(pool._max_workers)]:
        met.result()


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

    def load() -> Loaded:
        given = {"memory": memory, "chunk": 64, "reuse": reuse, **(cache_options or {})}
        cache = PrefixCache(model, **given)
        return Loaded(model, tokenizer or tool_tokenizer(), cache)

    engine = ScriptedEngine(load, EngineOptions(**({"rehearse": False} | options)))
    engine.requests = []
    engine.start()
    return engine, model


@contextmanager
def running(
    tokenizer: Any = None, engine_options: dict[str, Any] | None = None, **options: Any
) -> Iterator[Running]:
    """A real server in a thread."""
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
    """A server of its own, for tests that stop it with a signal."""
    engine, _ = started_engine(context=context)
    serve(engine, ServerOptions(port=0, grace=1.0), lambda url: print(url, flush=True))

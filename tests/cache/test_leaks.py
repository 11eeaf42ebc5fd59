"""No array outlives its use, with the garbage collector switched off."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from rewarm import Session
from rewarm.cache import PrefixCache
from rewarm.engine import Engine
from tests import zoo
from tests.engines import Collected, answer, ask, engine, settled
from tests.runs import CHUNK, Counted, Prompt, joined, prompt, run
from tests.servers import running
from tests.sets import SOAK
from tests.tiny import tiny_tokenizer

COMPILED = 4096
"""Bytes of the constants that mlx-lm's compiled functions keep for the shapes that they met."""

SAMPLE = ["llama", "qwen3_5", "gpt_oss", "nemotron_h", "rwkv7", "deepseek_v41"]


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    """No collector that would hide a cycle, and no freed buffer that counts as active."""
    gc.collect()
    limit = mx.set_cache_limit(0)
    gc.disable()
    logging.disable()  # pytest keeps the records, and with them the frames of every exception
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
        gc.collect()
        mx.set_cache_limit(limit)


def payload_bytes(cache: PrefixCache) -> int:
    """The bytes of the arrays that the tree holds."""
    held = cache.stats().bytes["memory"]
    return held["rows"] + held["window"] + held["checkpoint"]


class Ledger:
    """Active memory beyond what the tree holds, since this was made."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._before = mx.get_active_memory() - payload_bytes(cache)

    def left_over(self) -> int:
        return mx.get_active_memory() - payload_bytes(self._cache) - self._before

    def left_over_after_its_turn(self) -> int:
        """A sink hears of the end of a request before the engine's last turn has returned."""
        deadline = time.monotonic() + 5
        while self.left_over() > COMPILED and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.left_over()


@pytest.mark.parametrize("name", sorted(zoo.ARCHITECTURES))
def test_after_a_prompt_only_the_tree_is_left(name: str) -> None:
    model, vocabulary = zoo.tiny(name), zoo.vocabulary(name)
    cache = PrefixCache(model, memory="1500KB", chunk=CHUNK)
    head = prompt(40, 1, vocabulary)
    run(model, cache, head, decode=2)
    run(model, cache, joined(head, prompt(40, 1, vocabulary)), decode=2)
    ledger = Ledger(cache)
    for seed in range(2, 8 if SOAK else 5):
        run(model, cache, joined(head, prompt(40, seed, vocabulary)), decode=2)
        assert ledger.left_over() <= COMPILED, seed


class Breaking(Counted):
    """A model that fails once, in a chunk or a step of so many tokens."""

    breaks_at = 0

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        out = super().__call__(tokens, **options)
        if tokens.size == self.breaks_at:
            self.breaks_at = 0
            raise RuntimeError("injected")
        return out


def hit(server: Engine, head: Prompt, tail: Prompt) -> None:
    answer(server, joined(head, tail), max_tokens=3)


def several_answers(server: Engine, head: Prompt, tail: Prompt) -> None:
    answer(server, joined(head, tail), max_tokens=3, n=3)


def burst(server: Engine, head: Prompt, tail: Prompt) -> None:
    asked = [ask(server, joined(head, tail[i:]), max_tokens=3 + i) for i in range(4)]
    for each in asked:
        each.over()


def cancelled_in_prefill(server: Engine, head: Prompt, tail: Prompt) -> None:
    asked = ask(server, joined(head, *[tail] * 12))
    asked.begun()
    server.cancel(server_request(server))
    asked.over()


def cancelled_while_decoding(server: Engine, head: Prompt, tail: Prompt) -> None:
    asked = ask(server, joined(head, tail), max_tokens=400)
    while not asked.tokens:
        pass
    server.cancel(server_request(server))
    asked.over()


def broken_in_prefill(server: Engine, head: Prompt, tail: Prompt) -> None:
    server.model.breaks_at = len(tail) - 1
    ask(server, joined(head, tail)).over()


def broken_while_decoding(server: Engine, head: Prompt, tail: Prompt) -> None:
    def break_next(_: Any) -> bool:
        server.model.breaks_at = 1
        return False

    ask(server, joined(head, tail), max_tokens=4, sink=Collected(break_next)).over()


def server_request(server: Engine) -> Any:
    return next(s.request for s in server.core._loop.running.values() if s.request is not None)


ENDINGS = [
    hit,
    several_answers,
    burst,
    cancelled_in_prefill,
    cancelled_while_decoding,
    broken_in_prefill,
    broken_while_decoding,
]


@pytest.mark.parametrize("name", sorted(zoo.ARCHITECTURES) if SOAK else SAMPLE)
def test_however_a_request_ends_only_the_tree_is_left(name: str) -> None:
    model, vocabulary = Breaking(zoo.tiny(name)), zoo.vocabulary(name)
    cache = PrefixCache(model, memory="2MB", chunk=CHUNK)
    head = prompt(40, 1, vocabulary)
    with engine(model, cache=cache) as server:
        for ending in ENDINGS:  # whatever is compiled and kept once
            ending(server, head, prompt(33, 1, vocabulary))
            settled(server)
        ledger = Ledger(cache)
        for seed in range(2, 4):
            for ending in ENDINGS:
                ending(server, head, prompt(33, seed, vocabulary))
                settled(server)
                assert ledger.left_over_after_its_turn() <= COMPILED, ending.__name__


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_a_cleared_cache_holds_nothing(name: str, reuse: Any) -> None:
    model = zoo.tiny(name)
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK, reuse=reuse)
    run(model, cache, prompt(100))
    cache.clear()
    before = mx.get_active_memory()
    for seed in range(3):
        run(model, cache, joined(prompt(70), prompt(60, seed)))
    assert mx.get_active_memory() > before
    cache.clear()
    assert mx.get_active_memory() - before <= COMPILED
    cache.verify()


def test_a_cleared_cache_with_a_disk_holds_nothing(tmp_path: Any) -> None:
    model = zoo.tiny("qwen3_5")
    cache = PrefixCache(model, memory="1MB", chunk=CHUNK, disk=str(tmp_path))
    run(model, cache, prompt(100))
    cache.clear()
    before = mx.get_active_memory()
    for seed in range(8):
        run(model, cache, joined(prompt(70), prompt(60, seed)))
    cache.flush()
    run(model, cache, joined(prompt(70), prompt(60, 0)))
    cache.clear()
    assert mx.get_active_memory() - before <= COMPILED
    cache.close()


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
def test_a_cache_that_is_dropped_holds_nothing(name: str) -> None:
    model = zoo.tiny(name)
    run(model, PrefixCache(model, memory="64MB", chunk=CHUNK), prompt(100))
    before = mx.get_active_memory()
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK)
    run(model, cache, prompt(100, 1))
    session = Session(model, tiny_tokenizer(), cache)
    session.generate(list(range(50)), max_tokens=4)
    assert mx.get_active_memory() > before
    del cache, session
    assert mx.get_active_memory() - before <= COMPILED


def test_a_running_request_goes_on_over_a_clear_and_leaves_nothing() -> None:
    model = zoo.tiny("qwen3_5")
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK)
    expected = run(model, cache, prompt(100))
    before = mx.get_active_memory() - payload_bytes(cache)
    lease = cache.acquire(prompt(100))
    cache.clear()
    logits = model(mx.array(lease.tokens[lease.position :])[None], cache=lease.caches)[0, -1]
    assert int(logits.argmax()) == int(expected.logits.argmax())
    lease.release()
    del lease, logits
    assert mx.get_active_memory() - before <= COMPILED
    assert cache.match(prompt(100)).shared == 0


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

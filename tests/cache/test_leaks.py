"""No array outlives its use, with the garbage collector switched off."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from rewarm.cache import PrefixCache
from tests import zoo
from tests.leaks import COMPILED, Surplus, payload_bytes
from tests.runs import CHUNK, joined, prompt, run
from tests.sets import SOAK

pytestmark = pytest.mark.usefixtures("uncollected")


@pytest.mark.parametrize("name", zoo.SAMPLE)
def test_after_a_prompt_only_the_tree_is_left(name: str) -> None:
    model, vocabulary = zoo.tiny(name), zoo.vocabulary(name)
    cache = PrefixCache(model, memory="1500KB", chunk=CHUNK)
    head = prompt(40, 1, vocabulary)
    run(model, cache, head, decode=2)
    run(model, cache, joined(head, prompt(40, 1, vocabulary)), decode=2)
    surplus = Surplus(cache)
    for seed in range(2, 8 if SOAK else 4):
        run(model, cache, joined(head, prompt(40, seed, vocabulary)), decode=2)
        assert surplus.left_over() <= COMPILED, seed


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
    assert mx.get_active_memory() > before
    del cache
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

"""The thread that writes to the disk retries, ends, and gives way to requests."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rewarm.cache import PrefixCache
from rewarm.cache.tiers.disk import writer
from tests import zoo
from tests.cache.disk.caches import disk_of
from tests.cache.lanes import handed_over
from tests.runs import joined, prompt, run

from .caches import Failing, cache_on


def test_what_memory_lets_go_of_is_not_held_for_the_disk(tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny("llama"), zoo.vocabulary("llama")
    cache = cache_on(tmp_path, model, memory="1MB")
    for seed in range(12):
        run(model, cache, prompt(200, seed, vocabulary))
    assert cache.stats().evictions
    assert len(cache._lower.lanes[0].fresh) <= cache.stats().entries
    cache.close()


@pytest.mark.parametrize("what", ["write", "commit"])
def test_what_the_disk_refused_is_written_another_time(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PAUSE", 0.05)
    model, vocabulary = zoo.tiny("qwen3_5"), zoo.vocabulary("qwen3_5")
    first = prompt(120, 1, vocabulary)
    second = joined(first[:70], prompt(40, 2, vocabulary))
    cache = cache_on(tmp_path, model)
    run(model, cache, first)
    cache.flush()
    run(model, cache, second)
    store = disk_of(cache).store
    monkeypatch.setattr(store, what, Failing(getattr(store, what), times=2))
    tries = 0
    while not cache.flush():
        tries += 1
        assert tries < 200, "the writer never tried again"
        time.sleep(0.05)
    cache.close()
    cache = cache_on(tmp_path, model)
    assert cache.match(first).resume == len(first) - 1
    assert cache.match(second).resume == len(second) - 1
    cache.close()


def test_a_disk_that_never_takes_anything_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, vocabulary = zoo.tiny("llama"), zoo.vocabulary("llama")
    first = prompt(120, 1, vocabulary)
    cache = cache_on(tmp_path, model)
    run(model, cache, first)
    cache.flush()
    store = disk_of(cache).store
    monkeypatch.setattr(store, "commit", Failing(store.commit, times=1_000_000))
    run(model, cache, joined(first[:70], prompt(40, 2, vocabulary)))  # splits what is on disk
    ended = threading.Thread(target=cache.close, daemon=True)
    ended.start()
    ended.join(20)
    assert not ended.is_alive()
    cache = cache_on(tmp_path, model)
    assert cache.match(first).resume == len(first) - 1
    cache.close()


def test_a_flush_ends_though_others_go_on(tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny("llama"), zoo.vocabulary("llama")
    cache = cache_on(tmp_path, model)
    run(model, cache, prompt(60, 0, vocabulary))
    real, more = disk_of(cache).store.write, iter(range(1, 40))

    def asked_meanwhile(*args: Any) -> Any:
        written = real(*args)
        seed = next(more, None)
        if seed is not None:  # so that there is always something waiting
            # A fetch would wait for the tier's thread, which waits for this one.
            run(model, cache, prompt(60, seed, vocabulary), fetch=False)
            cache.flush(wait=False)
        return written

    disk_of(cache).store.write = asked_meanwhile  # type: ignore[method-assign]
    cache.flush()
    assert next(more) < 10
    list(more)
    disk_of(cache).flush(None)
    cache.close()


@pytest.fixture
def endless_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a writer that rests go on resting until it is needed."""
    monkeypatch.setattr(writer, "REST", 1e9)
    monkeypatch.setattr(writer, "LONGEST_REST", 1e6)


def written_after(cache: PrefixCache, model: Any, count: int) -> int:
    """Wait until the writer does nothing more by itself, and count the files."""
    for seed in range(count):
        run(model, cache, prompt(60, seed, zoo.vocabulary("llama")))
    cache.flush(wait=False)
    handed_over(cache)
    disk, until = disk_of(cache).writer, time.monotonic() + 60
    while disk_of(cache).trees.has_work and not disk.rests:
        assert time.monotonic() < until, "the writer neither works nor rests"
        time.sleep(0.01)
    time.sleep(0.2)  # it may go on although it should not
    return len(list(disk_of(cache).store.folder.rglob("*.safetensors")))


@pytest.mark.usefixtures("endless_rest")
def test_the_writer_stands_back_while_there_are_requests(tmp_path: Path) -> None:
    model = zoo.tiny("llama")
    cache = cache_on(tmp_path, model)
    with cache.acquire(prompt(10)):
        assert written_after(cache, model, 5) == disk_of(cache).writer.rests == 1
    cache.close()


@pytest.mark.usefixtures("endless_rest")
@pytest.mark.parametrize("call", ["flush", "clear", "close"])
def test_whoever_waits_for_the_writer_gets_all_of_it(call: str, tmp_path: Path) -> None:
    model = zoo.tiny("llama")
    cache = cache_on(tmp_path, model)
    with cache.acquire(prompt(10)):
        written_after(cache, model, 5)
        waiter = threading.Thread(target=getattr(cache, call), daemon=True)
        waiter.start()
        waiter.join(20)
        assert not waiter.is_alive()
        assert disk_of(cache).trees.waiting_bytes == 0
    cache.close()


@pytest.mark.usefixtures("endless_rest")
@pytest.mark.parametrize("case", ["idle", "nearly full"])
def test_the_writer_does_not_rest_for_nobody_nor_at_the_cost_of_what_comes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.tiny("llama")
    cache = cache_on(tmp_path, model)
    disk = disk_of(cache).writer
    lease = cache.acquire(prompt(10))
    if case == "idle":
        lease.release()
    else:
        monkeypatch.setattr(writer, "NEARLY_FULL", 1e-6)
    assert written_after(cache, model, 5) >= 5
    assert disk.rests <= (case == "nearly full")  # after the last one nothing waits
    lease.release()
    cache.close()


def test_what_is_being_written_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on disk already, and no longer planned."""
    model = zoo.tiny("qwen3_5")
    cache = cache_on(tmp_path, model, disk_size="3MB")
    store = disk_of(cache).store
    write = store.write
    seen = []

    def watched(id: int, arrays: Any, planned: int) -> int:
        before = store.unplanned_bytes()
        size = write(id, arrays, planned)
        seen.append(store.unplanned_bytes() - before + size - planned)
        return size

    monkeypatch.setattr(store, "write", watched)
    run(model, cache, prompt(300))
    assert cache.flush()
    assert seen
    assert not any(seen)
    cache.close()

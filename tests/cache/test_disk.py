"""Nothing is forgotten over a restart, and nothing false is remembered."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rewarm.cache import PrefixCache
from rewarm.cache.tiers.disk import files, writer
from rewarm.values import Boundary
from tests import zoo
from tests.cache.lanes import handed_over
from tests.conftest import SOAK
from tests.generate.test_explain_cache import evict
from tests.support import (
    CHUNK,
    Prompt,
    cold,
    disk_of,
    divergence,
    joined,
    prompt,
    run,
)

ARCHITECTURES = ("qwen3_5", "nemotron_h", "gpt_oss", "llama", "gemma3_text", "deepseek_v3")


def cache_on(
    folder: Path, model: Any, *, memory: str = "64MB", disk_size: str = "1GB", **options: Any
) -> PrefixCache:
    return PrefixCache(
        model, memory=memory, disk=str(folder), disk_size=disk_size, chunk=CHUNK, **options
    )


def turn(model: Any, cache: PrefixCache, history: Prompt, number: int, vocabulary: int) -> Prompt:
    """One turn of a chat whose thinking is stripped: what is decoded does not come back."""
    asked = joined(history, prompt(11 + number % 7, 100 + number, vocabulary))
    boundary = [Boundary(len(history), "turn"), Boundary(len(asked), "user")]
    full = joined(asked, prompt(3, 7, vocabulary))
    run(model, cache, full, decode=6, boundaries=[b for b in boundary if b.position])
    return joined(asked, prompt(9, 200 + number, vocabulary))


@pytest.mark.parametrize("reuse", ["fast", "exact"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_restart_costs_nothing(name: str, reuse: Any, tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny(name), zoo.vocabulary(name)
    restarted = cache_on(tmp_path, model, reuse=reuse)
    kept = PrefixCache(model, memory="64MB", chunk=CHUNK, reuse=reuse)
    history = prompt(70, 1, vocabulary)
    for number in range(40 if SOAK else 6):
        turn(model, kept, history, number, vocabulary)
        history = turn(model, restarted, history, number, vocabulary)
    restarted.close()

    model = zoo.tiny(name)
    restarted = cache_on(tmp_path, model, reuse=reuse)
    asked = joined(history, prompt(20, 99, vocabulary))
    boundary = [Boundary(len(history), "turn")]
    before = kept.match(asked, boundaries=boundary)
    again = run(model, restarted, asked, decode=4, boundaries=boundary)
    assert before.resume > 0
    assert again.match.resume == before.resume
    assert again.match.tier == "disk"
    alone = cold(model, asked, decode=4, like=restarted, boundaries=boundary)
    if reuse == "exact":
        assert np.array_equal(again.logits, alone.logits)
    else:
        assert divergence(again.logits, alone.logits) <= 1e-5
    assert again.tokens == alone.tokens
    restarted.verify()
    restarted.close()


def test_what_memory_evicts_comes_back_from_disk(tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny("qwen3_5"), zoo.vocabulary("qwen3_5")
    cache = cache_on(tmp_path, model, memory="1MB")
    prompts = [prompt(200, seed, vocabulary) for seed in range(12)]
    for each in prompts:
        run(model, cache, each)
    assert cache.stats().evictions
    tiers = []
    for each in prompts:
        ran = run(model, cache, each)
        tiers.append(ran.match.tier)
        assert ran.match.resume == len(each) - 1
        assert divergence(ran.logits, cold(model, each, like=cache).logits) <= 1e-5
        cache.verify()
    assert "disk" in tiers
    cache.close()


def test_another_model_never_matches(tmp_path: Path) -> None:
    vocabulary = zoo.vocabulary("llama")
    asked = prompt(100, 1, vocabulary)
    first = cache_on(tmp_path, zoo.tiny("llama", seed=0))
    run(zoo.tiny("llama", seed=0), first, asked)
    first.close()
    for other in (
        {"model": zoo.tiny("llama", seed=1)},
        {"model": zoo.tiny("llama", seed=0), "kv_bits": 8, "kv_group_size": 32},
        {"model": zoo.tiny("llama", seed=0), "reuse": "exact"},
    ):
        cache = cache_on(tmp_path, other.pop("model"), **other)
        assert cache.match(asked).shared == 0
        cache.close()
    same = cache_on(tmp_path, zoo.tiny("llama", seed=0))
    assert same.match(asked).resume == 99
    assert same.match(asked, salt="tenant").shared == 0
    same.close()


def test_a_second_process_goes_on_without_a_disk_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = zoo.tiny("llama")
    holder = cache_on(tmp_path, model)
    with caplog.at_level(logging.WARNING, "rewarm"):
        second = cache_on(tmp_path, model)
    assert not second.tiers
    assert str(os.getpid()) in caplog.text
    holder.close()
    second.close()


def test_clear_forgets_the_disk_too(tmp_path: Path) -> None:
    model, asked = zoo.tiny("llama"), prompt(100)
    cache = cache_on(tmp_path, model)
    run(model, cache, asked)
    cache.flush()
    cache.clear()
    assert cache.match(asked).shared == 0
    cache.close()
    cache = cache_on(tmp_path, model)
    assert cache.match(asked).shared == 0
    assert not list(tmp_path.rglob("*.safetensors"))
    cache.close()


class Watch:
    """The most that a folder held at any moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most = self.largest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stop.is_set():
            sizes = [files.size_of(path) for path in self.folder.rglob("*") if path.is_file()]
            self.most = max(self.most, sum(sizes))
            self.largest = max(self.largest, *sizes, 0)
            time.sleep(0.001)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("limit", [1_000_000, 3_000_000] if SOAK else [1_000_000])
def test_the_limit_is_kept_at_every_moment(name: str, limit: int, tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny(name), zoo.vocabulary(name)
    cache = cache_on(tmp_path, model, memory="1MB", disk_size=str(limit))
    seed = 0
    with Watch(tmp_path) as watch:
        while disk_of(cache).writer.written < (10 if SOAK else 3) * limit:
            run(model, cache, prompt(200, seed, vocabulary))
            seed += 1
            if seed % 3 == 0:
                cache.flush()
    assert watch.most <= limit + watch.largest
    assert watch.most > limit // 2
    assert not disk_of(cache).writer.paused
    cache.flush()
    assert cache.match(prompt(200, seed - 1, vocabulary)).resume == 199
    cache.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "missing"])
def test_damaged_files_cost_a_miss_and_nothing_else(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, vocabulary = zoo.tiny("qwen3_5"), zoo.vocabulary("qwen3_5")
    asked = prompt(150, 1, vocabulary)
    cache = cache_on(tmp_path, model)
    run(model, cache, asked)
    cache.close()
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if damage == "truncate" else data)
        if damage == "empty":
            path.write_bytes(b"")
        if damage == "missing":
            path.unlink()
    cache = cache_on(tmp_path, model)
    with caplog.at_level(logging.WARNING, "rewarm"):
        again = run(model, cache, asked)
    assert again.match.resume == 0
    assert "rewarm" in {record.name for record in caplog.records}
    assert np.array_equal(again.logits, cold(model, asked, like=cache).logits)
    cache.verify()
    cache.close()
    cache = cache_on(tmp_path, model)
    assert cache.match(asked).resume == len(asked) - 1  # computed again, and kept again
    cache.close()


@contextmanager
def served(folder: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with log.open("w") as out:
        arguments = ("serve", "--port", "0", "--disk", str(folder))
        server = subprocess.Popen(
            [sys.executable, "-m", "rewarm", *arguments], stdout=out, stderr=out
        )
        try:
            while (url := re.search(r"http://127.0.0.1:\d+", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
            yield server, url[0]
        finally:
            server.kill()
            server.wait()


def ask(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    found: dict[str, Any] = reply
    return found


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_server_goes_on_where_the_last_one_was(way: str, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "You know the tides. " * 40}]
    with served(tmp_path / "disk", tmp_path / "first") as (server, url):
        for number in range(3):
            chat.append({"role": "user", "content": f"When is high tide on day {number}?"})
            reply = ask(url, chat)
            chat.append({"role": "assistant", "content": "At noon."})
        again = ask(url, chat[:-1])["rewarm"]
        if way == "killed":
            wait_until_idle_work_is_done(tmp_path / "disk")
            server.kill()
        else:
            server.send_signal(signal.SIGINT)
        server.wait(60)
    with served(tmp_path / "disk", tmp_path / "second") as (server, url):
        after = ask(url, chat[:-1])
        assert after["choices"] == reply["choices"]
        assert after["rewarm"]["resume"]["tier"] == "disk"
        lost = again["cached_tokens"] - after["rewarm"]["cached_tokens"]
        assert lost <= again["cached_tokens"] // 100


def wait_until_idle_work_is_done(folder: Path) -> None:
    """Until nothing has been written for longer than idle work waits."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < 12:
        files = len(list(folder.rglob("*.safetensors")))
        if files != last:
            last, since = files, time.monotonic()
        time.sleep(0.2)


def test_the_form_of_the_caches_is_part_of_what_must_be_equal(tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny("qwen3"), zoo.vocabulary("qwen3")
    asked = prompt(100, 1, vocabulary)
    for size in (48, 64, None):
        cache = cache_on(tmp_path, model, max_kv_size=size)
        assert cache.match(asked).shared == 0
        run(model, cache, asked)
        cache.close()
        cache = cache_on(tmp_path, model, max_kv_size=size)
        assert cache.match(asked).resume == 99
        cache.close()


def test_what_memory_lets_go_of_is_not_held_for_the_disk(tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny("llama"), zoo.vocabulary("llama")
    cache = cache_on(tmp_path, model, memory="1MB")
    for seed in range(12):
        run(model, cache, prompt(200, seed, vocabulary))
    assert cache.stats().evictions
    assert len(cache._lower.lanes[0].fresh) <= cache.stats().entries
    cache.close()


class Failing:
    """A function that raises a number of times."""

    def __init__(self, works: Any, times: int) -> None:
        self.works, self.times = works, times

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.times:
            self.times -= 1
            raise OSError(28, "no space left on device")
        return self.works(*args, **options)


@pytest.mark.parametrize("what", ["put_payload", "commit"])
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


def test_a_window_that_memory_let_go_of_comes_back_with_what_follows_it(tmp_path: Path) -> None:
    model = zoo.tiny("gpt_oss")
    cache = PrefixCache(model, memory="64MB", disk=str(tmp_path), chunk=128)
    asked = prompt(129, 1)
    run(model, cache, asked)
    cache.flush()
    run(model, cache, joined(asked[:124], prompt(60, 7)))  # splits the node in memory, not on disk
    evict(cache, "leaf", at=128)
    evict(cache, "window", at=124)
    assert cache.match(asked).resume == 128
    lease = cache.acquire(asked)
    assert (lease.cost.match.resume, lease.cost.match.tier) == (128, "disk")
    lease.release()
    cache.verify()
    cache.close()


def test_a_disk_that_goes_away_costs_nothing_but_itself(tmp_path: Path) -> None:
    model, asked = zoo.tiny("llama"), prompt(100)
    cache = cache_on(tmp_path / "disk", model)
    run(model, cache, asked)
    shutil.rmtree(tmp_path / "disk")
    cache.flush(wait=False)
    cache.stats()
    assert run(model, cache, asked).match.resume == 99
    cache.close()


def test_what_cannot_be_read_now_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = zoo.tiny("llama"), prompt(100)
    cache = cache_on(tmp_path, model)
    run(model, cache, asked)
    cache.close()
    cache = cache_on(tmp_path, model)
    store = disk_of(cache).store
    monkeypatch.setattr(store, "read", lambda *_: None)
    assert run(model, cache, asked[:50]).match.resume == 0
    monkeypatch.undo()
    assert cache.match(asked).resume == 99
    cache.close()


def test_a_clock_that_is_set_back_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, vocabulary = zoo.tiny("llama"), zoo.vocabulary("llama")
    cache = cache_on(tmp_path, model, memory="1MB", disk_size="2MB")
    now = time.time()
    for seed in range(20):
        monkeypatch.setattr(time, "time", lambda at=now - seed: at)
        run(model, cache, prompt(200, seed, vocabulary))
        cache.flush()
    assert not disk_of(cache).writer.paused
    cache.close()


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_what_the_disk_knows_and_cannot_resume_at_is_replayed(name: str, tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny(name), zoo.vocabulary(name)
    first = prompt(120, 1, vocabulary)
    asked = joined(first[:100], prompt(20, 2, vocabulary))
    cache = cache_on(tmp_path, model)
    ends = [Boundary(40, "system")]
    run(model, cache, first, boundaries=ends)
    before = cache.match(asked, boundaries=ends)
    assert before.shared == 100
    cache.close()
    cache = cache_on(tmp_path, model)
    for tier in ("disk", "memory"):  # the second time memory has what was brought up
        found = cache.match(asked, boundaries=ends)
        with cache.acquire(asked, boundaries=ends) as lease:
            assert lease.cost.match == found
        assert (found.shared, found.resume, found.reason) == (100, before.resume, before.reason)
        assert found.tier == (tier if found.resume else None)
    again = run(model, cache, asked, boundaries=ends)
    assert again.match.replay == before.replay
    assert cache.match(joined(asked[:100], prompt(9, 3, vocabulary))).resume == 100
    cache.close()


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.8e9
        monkeypatch.setattr(time, "time", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def write(
    model: Any, cache: PrefixCache, clock: Clock, prompts: list[Prompt], apart: float = 0.002
) -> None:
    for each in prompts:
        clock.pass_by(apart)
        run(model, cache, each)
        assert cache.flush()


def held_on_disk(cache: PrefixCache, prompts: list[Prompt]) -> list[bool]:
    disk = disk_of(cache)
    found = [disk.find(cache._query(each, None, ())).result() for each in prompts]
    return [f is not None and f.resume == len(p) - 1 for f, p in zip(found, prompts, strict=True)]


def test_what_was_just_written_outlives_whatever_is_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, vocabulary = zoo.tiny("qwen3_5"), zoo.vocabulary("qwen3_5")
    clock = Clock(monkeypatch)
    cache = cache_on(tmp_path, model, memory="1MB", disk_size="2MB")
    long = [prompt(300, seed, vocabulary) for seed in range(20)]
    short = [prompt(20, seed, vocabulary) for seed in range(100, 112)]
    write(model, cache, clock, long)
    assert not all(held_on_disk(cache, long)), "the disk was never full"
    before = held_on_disk(cache, long)
    clock.pass_by(120)
    write(model, cache, clock, short, apart=4)  # worth so little that age alone saves none
    assert held_on_disk(cache, long) != before, "nothing was evicted"
    assert all(held_on_disk(cache, short))
    cache.close()


def test_where_all_is_fresh_the_oldest_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, vocabulary = zoo.tiny("qwen3_5"), zoo.vocabulary("qwen3_5")
    clock = Clock(monkeypatch)
    cache = cache_on(tmp_path, model, memory="1MB", disk_size="2MB")
    lengths = random.Random(0).choices(range(20, 300), k=40)
    prompts = [prompt(length, seed, vocabulary) for seed, length in enumerate(lengths)]
    write(model, cache, clock, prompts)
    held = held_on_disk(cache, prompts)
    assert held == sorted(held)
    assert 2 <= sum(held) < len(held)
    cache.close()


def test_asking_leaves_no_trace_on_disk(tmp_path: Path) -> None:
    model = zoo.tiny("llama")
    cache = cache_on(tmp_path, model)
    for number in range(5):
        cache.match(prompt(50), salt=f"tenant {number}")
    assert disk_of(cache).store.namespaces() == []
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
    real, more = disk_of(cache).store.put_payload, iter(range(1, 40))

    def asked_meanwhile(*args: Any) -> Any:
        written = real(*args)
        seed = next(more, None)
        if seed is not None:  # so that there is always something waiting
            run(model, cache, prompt(60, seed, vocabulary))
            cache.flush(wait=False)
        return written

    disk_of(cache).store.put_payload = asked_meanwhile  # type: ignore[method-assign]
    cache.flush()
    assert next(more) < 10
    list(more)
    disk_of(cache).flush(None)
    cache.close()


@pytest.fixture
def endless_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that rests once does so until it is needed."""
    monkeypatch.setattr(writer, "REST", 1e9)
    monkeypatch.setattr(writer, "LONGEST_REST", 1e6)


def written_after(cache: PrefixCache, model: Any, count: int) -> int:
    """How many jobs are over once the writer does nothing more by itself."""
    for seed in range(count):
        run(model, cache, prompt(60, seed, zoo.vocabulary("llama")))
    cache.flush(wait=False)
    handed_over(cache)
    disk, until = disk_of(cache).writer, time.monotonic() + 60
    while disk.waiting and not disk.rests:
        assert time.monotonic() < until, "the writer neither works nor rests"
        time.sleep(0.01)
    time.sleep(0.2)  # it may go on although it should not
    return disk._ended


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
    disk = disk_of(cache).writer
    with cache.acquire(prompt(10)):
        written_after(cache, model, 5)
        waiter = threading.Thread(target=getattr(cache, call), daemon=True)
        waiter.start()
        waiter.join(20)
        assert not waiter.is_alive()
        assert disk.waiting == 0
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


def test_salts_that_nobody_asks_for_make_room_for_others(tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny("llama"), zoo.vocabulary("llama")
    first = cache_on(tmp_path, model, disk_size="1MB")
    for seed in range(3):
        run(model, first, prompt(150, seed, vocabulary), salt="old")
    first.close()
    second = cache_on(tmp_path, model, disk_size="1MB")
    for seed in range(10, 13):
        asked = prompt(150, seed, vocabulary)
        run(model, second, asked, salt="new")
        assert second.flush()
    second.close()
    third = cache_on(tmp_path, model, disk_size="1MB")
    assert third.match(asked, salt="new").resume == len(asked) - 1
    assert {n.about["salt"] for n in disk_of(third).store.namespaces() if n.bytes} >= {
        hashlib.sha256(b"new").hexdigest()[:16]
    }
    third.close()


def test_another_models_things_go_first(tmp_path: Path) -> None:
    vocabulary = zoo.vocabulary("llama")
    old, new = zoo.tiny("llama", seed=0), zoo.tiny("llama", seed=1)
    cache = cache_on(tmp_path, old, disk_size="1MB")
    for seed in range(3):
        run(old, cache, prompt(100, seed, vocabulary))
    cache.close()
    cache = cache_on(tmp_path, new, disk_size="1MB")
    prompts = [prompt(100, seed, vocabulary) for seed in range(3)]
    for each in prompts:
        run(new, cache, each)
    assert cache.flush()
    cache.close()
    cache = cache_on(tmp_path, new, disk_size="1MB")
    assert all(cache.match(each).resume == 99 for each in prompts)
    cache.close()


def test_flush_says_false_where_the_disk_is_too_small(tmp_path: Path) -> None:
    model = zoo.tiny("llama")
    cache = cache_on(tmp_path, model, memory="64MB", disk_size="1MB")
    run(model, cache, prompt(40))
    assert cache.flush()
    run(model, cache, prompt(4000, 1))
    assert not cache.flush()
    cache.close()


def test_what_is_being_written_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a job is in the store already, and all of it in the writer's queue."""
    model = zoo.tiny("qwen3_5")
    cache = cache_on(tmp_path, model, disk_size="3MB")
    writer, put = disk_of(cache).writer, disk_of(cache).store.put_payload
    seen = []

    def without_the_queue() -> int:
        with writer._changed:  # others may add to it
            return writer.free_bytes() + writer.waiting - writer.freeing

    def watched(*given: Any) -> Any:
        before = without_the_queue()
        stored = put(*given)
        seen.append((before, without_the_queue()))
        return stored

    monkeypatch.setattr(disk_of(cache).store, "put_payload", watched)
    run(model, cache, prompt(300))
    assert cache.flush()
    assert seen
    assert all(before == after for before, after in seen)
    cache.close()

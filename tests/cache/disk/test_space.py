"""The disk tier keeps its limit, and makes room for what matters more."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import pytest

from rewarm.cache import PrefixCache
from tests import zoo
from tests.cache.disk.caches import disk_of
from tests.runs import Prompt, prompt, run
from tests.sets import SOAK

from .caches import Watch, cache_on


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("limit", [1_000_000, 3_000_000] if SOAK else [1_000_000])
def test_the_limit_is_kept_at_every_moment(name: str, limit: int, tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny(name), zoo.vocabulary(name)
    cache = cache_on(tmp_path, model, memory="1MB", disk_size=str(limit))
    seed = 0
    with Watch(tmp_path) as watch:
        while disk_of(cache).writer.written < (10 if SOAK else 2) * limit:
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


class Clock:
    """A clock that a test moves."""

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
    found = []
    for each in prompts:
        with cache._looking_for(each, None, (), keep=False) as (query, _):
            found.append(disk.find(query).result())
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
    assert {n.about["salt"] for n in disk_of(third).store.index.namespaces() if n.bytes} >= {
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
